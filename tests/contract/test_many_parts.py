"""A checkpoint in which several parts have boxes of one tensor comes back as if it were one."""

from dataclasses import replace

import pytest
import torch
from runs import bits, check_same, checkpointer, freeze, restore, save, supervised
from test_round_trip import Holder, build_tied, odd_tensors

from divide import divide
from everstep import Corrupt, Store
from everstep.store import commit
from everstep.tiers.disk import Disk
from independent_reader import Damaged
from independent_reader import read as read_independently


def odd_state(seed):
    torch.manual_seed(seed)
    return {"buffers": Holder(**odd_tensors(seed)), "value": odd_tensors(seed)}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tensors_of_all_kinds(store, seed):
    first, second = odd_state(1), odd_state(2)
    expected = freeze(first)
    save(store, first)
    divide(store, 1, 2, seed)
    strides = {name: tensor.stride() for name, tensor in second["value"].items()}
    assert restore(store, second, 2) == 2
    check_same(freeze(second), expected)
    assert {name: tensor.stride() for name, tensor in second["value"].items()} == strides


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_reader_says_the_same(store):
    save(store, odd_state(1))
    divide(store, 1, 2)
    opened = Store(store)
    assert opened.verify().ok
    before, after = opened.read(1), opened.read(2)
    assert before.keys() == after.keys()
    assert [bits(before[name]) for name in before] == [bits(after[name]) for name in before]
    assert read_independently(store, 1)[1] == read_independently(store, 2)[1]
    some = opened.read(2, ["value.large", "value.zero_dim"])
    assert bits(some["value.large"]) == bits(before["value.large"])


def test_training_goes_on(store):
    state, other = build_tied(1), build_tied(2)
    with checkpointer(store, state, strategy="full") as saver:
        for step in (1, 2):
            supervised(state)
            saver.step(step)
    divide(store, 2, 3)
    assert restore(store, other, 3) == 3
    assert other["model"].head.weight is other["model"].embed.weight
    check_same(freeze(other), freeze(state))
    assert bits(Store(store).read(3)["model.head.weight"]) == bits(state["model"].embed.weight)


def test_what_no_part_has_is_missed(store):
    """By its name, before anything is changed."""
    state = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.zeros(2)}
    save(store, state)
    divide(store, 1, 2, lose="a")
    message = r"tensor 'a': elements \[.*\] are in no piece"
    fresh = {"a": torch.zeros(3, 4), "b": torch.ones(2)}
    with pytest.raises(Corrupt, match=message):
        restore(store, fresh, 2)
    assert not fresh["a"].any()
    with pytest.raises(Corrupt, match=message):
        Store(store).read(2)
    with pytest.raises(Damaged, match="a: covered"):
        read_independently(store, 2)
    problems = Store(store).verify().problems
    assert list(problems) == ["00000002-0001"]
    assert "elements" in problems["00000002-0001"][0]


def test_what_two_parts_have_is_refused(store):
    save(store, {"a": torch.arange(12.0)})
    manifest = divide(store, 1, 2)
    whole = Store(store).manifest(1)
    both = (*manifest.parts, replace(whole.parts[0], steps=3))
    parts = tuple(replace(part, steps=3) for part in both)
    commit.publish(Disk(store), replace(manifest, step=3, parts=parts))
    with pytest.raises(Corrupt, match="overlap"):
        restore(store, {"a": torch.zeros(12)}, 3)
    assert "overlap" in Store(store).verify(3).problems["00000003-0001"][0]
