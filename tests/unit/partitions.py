"""Shapes, boxes and partitions for property tests."""

import math

from hypothesis import strategies as st

from divide import halves
from everstep.format.boxes import Box


def shapes(longest=12, dims=4):
    """Seldom of no elements."""
    sizes = st.integers(1, longest)
    some = st.lists(sizes, max_size=dims)
    return st.one_of(some, some, some, st.lists(st.integers(0, 2), max_size=dims)).map(tuple)


@st.composite
def boxes_in(draw, shape):
    """Seldom of no elements."""
    offsets, lengths = [], []
    least = draw(st.sampled_from([0, 1, 1, 1]))
    for size in shape:
        start = draw(st.integers(0, max(0, size - least)))
        offsets.append(start)
        lengths.append(draw(st.integers(min(least, size), size - start)))
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
        found += halves(box, dim, draw(st.integers(1, box.lengths[dim] - 1)))
    return draw(st.permutations(found))
