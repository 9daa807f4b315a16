"""Boxes against arrays of numbers that say the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitions import boxes_in, partitions, shapes

from everstep.format.boxes import Box, flat_boxes
from everstep.format.tiling import find_overlap, problem_of


def marks(shape, box):
    found = np.zeros(shape, int)
    found[box.slices_in(Box.whole(shape))] = 1
    return found


@settings(max_examples=300, deadline=None)
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


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_is_wrong_with_a_partition(data):
    """A partition of which boxes are dropped, repeated, or replaced by others."""
    shape = data.draw(shapes())
    boxes = data.draw(partitions(shape))
    assert problem_of(shape, boxes) is None
    changed = data.draw(st.lists(st.sampled_from(boxes), unique=True))
    changed += data.draw(st.lists(boxes_in(shape), max_size=2))
    counts = sum((marks(shape, box) for box in changed), np.zeros(shape, int))
    flaw = find_overlap(shape, changed)
    assert bool(flaw) == (counts > 1).any()
    if flaw:
        assert (counts[flaw.box.slices_in(Box.whole(shape))] > 1).all()
    problem = problem_of(shape, changed)
    assert (problem is None) == (counts == 1).all()
    if problem:  # where there are both, either
        said = problem.split("[")[1].split("]")[0]
        pairs = [tuple(map(int, pair.split(":"))) for pair in said.split(",") if pair]
        there = counts[tuple(slice(*pair) for pair in pairs)]
        assert there.size
        assert (there > 1).all() if "overlap" in problem else not there.any()


def test_what_no_cut_divides():
    wheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert problem_of((3, 3), wheel) == "elements [1:2,1:2] are in no piece"
    assert problem_of((3, 3), [*wheel, Box((1, 1), (1, 1))]) is None
    assert problem_of((3, 3), [*wheel, Box((1, 1), (1, 2))]) == "two pieces overlap at [1:2,2:3]"


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((), [], "elements [] are in no piece"),
        ((), [Box((), ())] * 2, "two pieces overlap at []"),
        ((4,), [Box((2,), (3,))], "a piece [2:5] lies outside of its shape [4]"),
        ((4,), [Box((0, 0), (4, 1))], "a piece [0:4,0:1] lies outside of its shape [4]"),
        ((0, 3), [], None),
        ((0, 3), [Box((0, 1), (0, 2))] * 2, None),
    ],
)
def test_odd_pieces(shape, boxes, problem):
    assert problem_of(shape, boxes) == problem


def test_ten_thousand_pieces():
    """Of a grid, and of flat ranges: compared in pairs they would take minutes."""
    grid = [Box((7 * a, 3 * b), (7, 3)) for a in range(100) for b in range(100)]
    assert problem_of((700, 300), grid) is None
    shape = (997, 31, 64)
    ends = np.linspace(0, np.prod(shape), 2001).astype(int).tolist()
    ranges = [box for k, end in enumerate(ends[1:]) for box in flat_boxes(shape, ends[k], end)]
    assert problem_of(shape, ranges) is None
