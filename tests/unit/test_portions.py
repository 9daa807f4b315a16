"""Which parameters of a record are updated first: half of what is left at a time, where updates may
be made one by one."""

import pytest
import torch
from torch import nn

from everstep.format.boxes import Box
from everstep.format.global_tensors import GlobalTensor
from everstep.format.manifest import Record
from everstep.format.packs import Piece, Spec
from everstep.format.tables import TensorEntry
from everstep.restore.portions import MIN_BYTES, portions
from everstep.state.optimizers import OptimizerState

ONE_CALL = ({"optimizer": "optimizer"},)


class Coupled(torch.optim.SGD):
    """Of nobody knows which kind."""


def optimizer(kind=torch.optim.SGD):
    return OptimizerState("optimizer", kind(nn.Linear(3, 3).parameters(), lr=0.1), 0)


def stored(sizes):
    """Gradients of so many bytes, one after the other."""
    found, offset = {}, 0
    for name, size in sizes.items():
        shape = (size // 4,)
        piece = Piece(Box.whole(shape), 0, offset, size, 0)
        found[f"@0.{name}"] = GlobalTensor((TensorEntry(Spec(name, "float32", shape), (piece,)),))
        offset += size
    return found


def told(sizes, calls=ONE_CALL, kind=torch.optim.SGD):
    return portions(Record(5, calls, ()), stored(sizes), [optimizer(kind)])


def test_half_of_what_is_left_in_the_order_of_the_file():
    sizes = dict.fromkeys("hgfedcba", MIN_BYTES)
    assert told(sizes) == [set("hgfe"), set("dc"), set("b"), set("a")]


def test_a_large_one_is_a_portion():
    assert told({"a": MIN_BYTES, "b": 20 * MIN_BYTES, "c": MIN_BYTES}) == [{"a", "b"}, {"c"}]
    assert told({"a": 20 * MIN_BYTES}) == [{"a"}]


def test_little_comes_at_once():
    assert told(dict.fromkeys("abc", MIN_BYTES // 2)) == [set("abc")]
    assert told({}) == [set()]


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Coupled])
def test_what_may_couple_parameters_is_updated_at_once(kind):
    assert told(dict.fromkeys("abcd", MIN_BYTES), kind=kind) == [set("abcd")]


@pytest.mark.parametrize(
    "calls",
    [
        ONE_CALL * 2,
        ({**ONE_CALL[0], "generators": {"cpu": 0}},),
        ({**ONE_CALL[0], "ranks": [{}, {"generators": {"cpu": 0}}]},),
        ({**ONE_CALL[0], "compressed": [{"names": ["a"]}]},),
    ],
)
def test_calls_that_cannot_be_made_in_several_are_made_at_once(calls):
    """Two of one optimizer; one that draws random numbers; one whose gradients are stored together
    with those of other parameters."""
    assert told(dict.fromkeys("abcd", MIN_BYTES), calls) == [set("abcd")]
