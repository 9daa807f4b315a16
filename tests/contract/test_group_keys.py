"""Keys of parameter groups that the checkpoint does not have: what was saved is what is there, in
whichever way it was saved, as after torch's own load_state_dict."""

import copy

import pytest
import torch
from logs import build, train
from runs import check_same, checkpointer, freeze

from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
from everstep.tiers.disk import Disk
from examples import slow

WAYS = {
    "full": {"strategy": "full"},
    "log": {"strategy": "log", "base_every": 100},
    "spread": {"strategy": "spread", "every": 4, "window": 4},
}
WAY = pytest.mark.parametrize("way", ["log", *slow("full", "spread")])


def run(store, state, way, steps=8):
    with checkpointer(store, state, **WAYS[way]) as saver:
        for step in range(1, steps + 1):
            train(state)
            saver.step(step)


def restored(store, state, only=None):
    with checkpointer(store, state) as saver:
        assert saver.restore(8, only=only) == 8
    return state["optimizer"].param_groups[0]


@WAY
def test_more_keys_than_were_saved_go(store, way):
    state = build(1)
    run(store, state, way)
    fresh = build(2)
    group = fresh["optimizer"].param_groups[0]
    group["note"], group["scale"] = 1, torch.ones(3)
    torch.optim.lr_scheduler.OneCycleLR(fresh["optimizer"], 0.1, 10)  # puts six more there
    expected = copy.deepcopy(fresh["optimizer"])
    expected.load_state_dict(state["optimizer"].state_dict())
    found = restored(store, fresh)
    assert (
        found.keys() == expected.param_groups[0].keys() == state["optimizer"].param_groups[0].keys()
    )
    check_same(freeze(fresh), freeze(state))


@WAY
def test_a_key_that_was_saved_comes(store, way):
    state = build(1)
    state["optimizer"].param_groups[0]["note"] = 7
    run(store, state, way)
    fresh = build(2)
    assert restored(store, fresh)["note"] == 7
    check_same(freeze(fresh), freeze(state))


@WAY
def test_a_default_that_was_not_there_then_stays(store, way):
    """As of an optimizer of another torch, which has one more argument now."""
    state = build(1)
    kept = state["optimizer"].param_groups[0].pop("decoupled_weight_decay")
    run_without(state, store, way)
    found = restored(store, build(2))
    assert found["decoupled_weight_decay"] is kept


def run_without(state, store, way):
    defaults = state["optimizer"].defaults.pop("decoupled_weight_decay")
    group = state["optimizer"].param_groups[0]
    assert defaults is not None
    with checkpointer(store, state, **WAYS[way]) as saver:
        for number in range(1, 9):
            group["decoupled_weight_decay"] = defaults  # torch's own step reads it
            train(state)
            del group["decoupled_weight_decay"]
            saver.step(number)


@WAY
def test_a_step_that_was_made_whole(store, way):
    state = build(1)
    run(store, state, way)
    if way != "full":
        materialize(Disk(store), CheckpointName(8, 1))
    fresh = build(2)
    fresh["optimizer"].param_groups[0]["note"] = 1
    restored(store, fresh)
    check_same(freeze(fresh), freeze(state))
