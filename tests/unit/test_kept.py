"""What is kept by parameter: by identity, and only for as long as the parameter lives."""

import gc
import weakref

import torch
from torch import nn

from everstep.redo import kept as keeping
from everstep.redo.kept import ByParameter, Interest


def test_equal_parameters_are_two() -> None:
    kept: ByParameter[str] = ByParameter()
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    assert not kept
    kept[first] = "first"
    assert kept.get(first) == "first"
    assert kept.get(second) is None
    kept[first] = "again"
    assert kept.get(first) == "again"
    kept.discard(second)
    kept.discard(first)
    kept.discard(first)
    assert not kept


def test_it_ends_with_the_parameter() -> None:
    kept: ByParameter[int] = ByParameter()
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(10)]
    for number, parameter in enumerate(parameters):
        kept[parameter] = number
    del parameters[1:], parameter
    gc.collect()
    assert len(kept) == 1
    assert kept.get(parameters[0]) == 0
    others = [nn.Parameter(torch.zeros(1)) for _ in range(100)]  # some have addresses of those
    assert [kept.get(other) for other in others] == [None] * 100


def test_an_old_one_takes_nothing_from_a_new_one() -> None:
    """Which has its address, and may be kept before it is known that the old one is gone."""
    kept: ByParameter[str] = ByParameter()
    parameter = nn.Parameter(torch.zeros(1))
    kept[parameter] = "new"
    key = id(parameter)
    old, kept._parameters[key] = kept._parameters[key], weakref.ref(parameter)
    old.__callback__(old)
    assert kept.get(parameter) == "new"


def test_what_torch_holds_lives() -> None:
    """The object in Python goes and comes back, the parameter stays."""
    kept: ByParameter[str] = ByParameter()
    module = nn.Linear(2, 2)
    kept[module.weight] = "weight"
    held = module.weight.view(-1)  # its base
    del module
    gc.collect()
    assert kept.get(held._base) == "weight"


def test_clear() -> None:
    kept: ByParameter[int] = ByParameter()
    parameter = nn.Parameter(torch.zeros(1))
    kept[parameter] = 1
    kept.clear()
    assert kept.get(parameter) is None


def test_gradients_from_before_clipping_are_kept_while_anybody_wants_them() -> None:
    first, second = Interest(), Interest()
    seen = []
    for interest, is_on, raw in [
        (first, True, True),
        (second, True, False),
        (first, True, False),
        (second, True, True),
        (second, True, True),
        (second, False, True),
        (first, False, False),
    ]:
        interest.set(is_on, raw)
        seen.append((keeping.is_wanted(), keeping.wants_raw()))
    on, off = (True, True), (True, False)
    assert seen == [on, on, off, on, on, off, (False, False)]


def test_torch_keeps_the_object_of_a_storage() -> None:
    """By which a recorder knows memory again."""
    tensor = torch.zeros(4)
    known = weakref.ref(tensor.untyped_storage())
    gc.collect()
    view = tensor[1:]
    del tensor
    gc.collect()
    assert known() is view.untyped_storage()
    del view
    assert known() is None
