"""Boxes against a dense reference: each element is counted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.format.boxes import Box, flat_boxes
from everstep.format.tiling import Flaw, find_flaw
from examples import examples


def _slices(box: Box) -> tuple[slice, ...]:
    spans = zip(box.offsets, box.lengths, strict=True)
    return tuple(slice(at, at + n) for at, n in spans)


def _counts(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[_slices(box)] += 1
    return counts


@st.composite
def scattered(draw, shape: tuple[int, ...]) -> list[Box]:
    spans = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape))
    found = draw(st.lists(spans, max_size=6))
    return [Box(tuple(a for a, _ in s), tuple(b - a for a, b in s)) for s in found]


@st.composite
def tiled(draw, shape: tuple[int, ...]) -> list[Box]:
    """A tiling that need not fall apart: each element goes to the first box that took it, and a
    box grows from an element while it can. Then perhaps one is lost, or doubled."""
    taken = np.zeros(shape, bool)
    boxes = []
    for start in np.ndindex(*shape):
        if taken[start]:
            continue
        lengths = [1] * len(shape)
        for dim in draw(st.permutations(range(len(shape)))):
            for _ in range(draw(st.integers(0, shape[dim]))):
                longer = [n + (d == dim) for d, n in enumerate(lengths)]
                part = taken[_slices(Box(start, tuple(longer)))]
                if part.shape != tuple(longer) or part.any():
                    break
                lengths = longer
        boxes.append(Box(start, tuple(lengths)))
        taken[_slices(boxes[-1])] = True
    boxes = draw(st.permutations(boxes))
    change = draw(st.sampled_from(["none", "lose", "double"]))
    if boxes and change != "none":
        index = draw(st.integers(0, len(boxes) - 1))
        boxes = boxes[:index] + boxes[index + 1 :] if change == "lose" else [*boxes, boxes[index]]
    return boxes


@settings(max_examples=examples(600))
@given(st.data())
def test_flaws_are_those_of_the_elements(data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    boxes = data.draw(scattered(shape) | tiled(shape))
    counts = _counts(shape, boxes)
    overlap, flaw = find_flaw(shape, boxes, holes=False), find_flaw(shape, boxes)
    assert (overlap is None) == (counts <= 1).all()
    assert (flaw is None) == (counts == 1).all()
    for found in (overlap, flaw):
        if found is None:
            continue
        assert found.box.count > 0
        assert Box.whole(shape).intersect(found.box) == found.box
        if found.members:
            one, two = found.members
            assert one != two
            assert all(boxes[i].intersect(found.box) == found.box for i in found.members)
        else:
            assert found is flaw
            assert (counts[_slices(found.box)] == 0).all()


def _pinwheels(rings: int) -> tuple[tuple[int, int], list[Box]]:
    """Rings of four boxes around a middle: no cut in any dim misses all boxes."""
    size = 2 * rings + 1
    boxes = [Box((rings, rings), (1, 1))]
    for low in range(rings):
        high = size - low
        length = high - low - 1
        boxes += [
            Box((low, low), (1, length)),
            Box((low, high - 1), (length, 1)),
            Box((high - 1, low + 1), (1, length)),
            Box((low + 1, low), (length, 1)),
        ]
    return (size, size), boxes


@pytest.mark.parametrize("rings", [1, 2, 5])
def test_pinwheels(rings):
    shape, boxes = _pinwheels(rings)
    assert find_flaw(shape, boxes) is None
    for index, box in enumerate(boxes):
        rest = boxes[:index] + boxes[index + 1 :]
        flaw = find_flaw(shape, rest)
        assert flaw is not None
        assert flaw.members == ()
        assert box.intersect(flaw.box) == flaw.box
        assert find_flaw(shape, rest, holes=False) is None
        assert find_flaw(shape, [*boxes, box], holes=False) is not None


@pytest.mark.parametrize(
    ("shape", "boxes", "flaw"),
    [
        ((), [], Flaw(Box((), ()))),
        ((), [Box((), ())] * 2, Flaw(Box((), ()), (0, 1))),
        ((3, 3), [Box((0, 0), (3, 1))], Flaw(Box((0, 1), (3, 2)))),
        ((0, 3), [], None),
        ((0, 3), [Box((0, 1), (0, 2))] * 2, None),
    ],
)
def test_odd_pieces(shape, boxes, flaw):
    assert find_flaw(shape, boxes) == flaw


def test_ten_thousand_pieces():
    """Of a grid, and of flat ranges: compared in pairs they would take minutes."""
    grid = [Box((7 * a, 3 * b), (7, 3)) for a in range(100) for b in range(100)]
    assert find_flaw((700, 300), grid) is None
    shape = (997, 31, 64)
    ends = np.linspace(0, np.prod(shape), 2001).astype(int).tolist()
    ranges = [box for k, end in enumerate(ends[1:]) for box in flat_boxes(shape, ends[k], end)]
    assert find_flaw(shape, ranges) is None
