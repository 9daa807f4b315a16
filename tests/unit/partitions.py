"""Shapes, boxes and partitions for property tests."""

import math

from hypothesis import strategies as st

from everstep.format.boxes import Box


def shapes(longest=12, dims=4):
    return st.lists(st.integers(0, longest), max_size=dims).map(tuple)


@st.composite
def boxes_in(draw, shape):
    offsets, lengths = [], []
    for size in shape:
        start = draw(st.integers(0, size))
        offsets.append(start)
        lengths.append(draw(st.integers(0, size - start)))
    return Box(tuple(offsets), tuple(lengths))


@st.composite
def partitions(draw, shape, cuts=12):
    """Boxes that are each element once: cut in two again and again."""
    found = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, cuts)) if math.prod(shape) > 1 else 0):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        dims = [dim for dim, length in enumerate(box.lengths) if length > 1]
        if not dims:
            found.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.lengths[dim] - 1))
        low, high = list(box.lengths), list(box.lengths)
        low[dim], high[dim] = at, box.lengths[dim] - at
        offsets = list(box.offsets)
        offsets[dim] += at
        found += [Box(box.offsets, tuple(low)), Box(tuple(offsets), tuple(high))]
    return draw(st.permutations(found))
