"""Which part has which boxes: runs say as much as the boxes that they were made of."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.format.boxes import Box
from everstep.format.document import find_flaw
from everstep.format.index import INDEX, Index, Run, runs_of
from everstep.format.packs import Spec
from everstep.format.tables import TensorEntry


def test_equal_boxes_one_after_another_are_one_run():
    rows = [(rank, (4 * rank, 0), (4, 8)) for rank in range(1000)]
    assert runs_of(rows) == [Run(0, 1000, (0, 0), (4, 8), 0)]
    assert list(runs_of(rows)[0].parts_of(Box((10, 2), (4, 1)))) == [2, 3]


def test_what_is_no_run_is_told_one_by_one():
    grid = [(0, (0, 0), (2, 2)), (1, (0, 2), (2, 2)), (2, (2, 0), (2, 2)), (3, (2, 2), (2, 2))]
    assert runs_of(grid) == [Run(0, 2, (0, 0), (2, 2), 1), Run(2, 2, (2, 0), (2, 2), 1)]
    assert runs_of([(0, (0,), (2,)), (1, (2,), (1,))]) == [
        Run(0, 1, (0,), (2,)),
        Run(1, 1, (2,), (1,)),
    ]
    assert runs_of([(0, (), ()), (1, (), ())]) == [Run(0, 1, (), ()), Run(1, 1, (), ())]


@st.composite
def placed(draw):
    """Boxes on a grid, in parts some of which have none."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    height, width = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    boxes = [
        ((r * height, c * width), (height, width)) for r in range(rows) for c in range(columns)
    ]
    parts = draw(
        st.lists(st.integers(0, 20), min_size=len(boxes), max_size=len(boxes), unique=True)
    )
    return sorted(
        (part, *box) for part, box in zip(parts, draw(st.permutations(boxes)), strict=True)
    )


@given(placed(), st.tuples(*[st.integers(0, 12)] * 2), st.tuples(*[st.integers(1, 6)] * 2))
def test_every_part_with_something_of_a_box_is_named(rows, offsets, lengths):
    box = Box(offsets, lengths)
    entry = TensorEntry(Spec("w", "float32", (20, 20)), (), ("v",), "cuda:0", (1, 20))
    index = Index({"w": entry}, {}, {"w": runs_of(rows)})
    read = Index.from_json(json.loads(json.dumps(index.to_json())), 21)
    assert read == index
    named = set(read.parts_of({"w": [box]}))
    needed = {part for part, at, size in rows if 0 not in size and Box(at, size).intersect(box)}
    assert needed <= named <= {part for part, *_ in rows}


@pytest.mark.parametrize(
    "wrong",
    [
        {"runs": [[0, 3, [0], [2], 0]]},  # more parts than there are
        {"runs": [[0, 1, [0, 0], [2], 0]]},
        {"runs": [[0, 1, [0], [2], 1]]},
        {"runs": [[0, -1, [0], [2], 0]]},
        {"runs": None},
        {"dtype": "float33"},
        {"strides": [2]},
    ],
)
def test_what_cannot_be_is_refused(wrong):
    row = {"name": "w", "dtype": "float32", "shape": [4], "device": "cpu", "runs": [], **wrong}
    value = {"tensors": [row], "optimizers": {}}
    if find_flaw(value, INDEX) is None:
        with pytest.raises(ValueError, match="'w'"):
            Index.from_json(value, 2)
