"""Boxes against arrays of numbers that say the same."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from partitions import boxes_in, shapes

from everstep.format.boxes import Box, flat_boxes
from examples import examples


@settings(max_examples=examples(300))
@given(st.data())
def test_a_flat_range_is_a_few_boxes_in_order(data):
    shape = data.draw(shapes())
    count = int(np.prod(shape))
    start = data.draw(st.integers(0, count))
    end = data.draw(st.integers(start, count))
    boxes = flat_boxes(shape, start, end)
    numbers = np.arange(count).reshape(shape)
    found = [numbers[(*box.slices_in(Box.whole(shape)), ...)].ravel() for box in boxes]
    assert np.concatenate([*found, []]).tolist() == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_boxes_meet_in_their_common_elements(data):
    shape = data.draw(shapes(longest=5))
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    numbers = np.arange(np.prod(shape)).reshape(shape)

    def elements(box):
        return set(numbers[(*box.slices_in(Box.whole(shape)), ...)].ravel()) if box else set()

    assert elements(one.intersect(other)) == elements(one) & elements(other)
    assert len(elements(one)) == one.count


def test_whole_boxes():
    assert Box.whole(()).count == 1
    assert Box.whole(()).intersect(Box.whole(())) == Box.whole(())
    assert Box.whole((0, 3)).intersect(Box.whole((0, 3))) == Box.whole((0, 3))
