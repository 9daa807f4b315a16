"""derive={name: None}: parts that nobody changes are in bases only."""

import pytest
import torch
from derived import averaged, build, run
from logs import train
from runs import check_steps, kinds, logged, snapshot
from torch import nn

from everstep import Store
from everstep.restore.materialize import materialize
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk


def adapted(seed):
    """A frozen layer with a small trained one beside it, as LoRA has them, and a frozen table."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 6), nn.Linear(6, 6))
    model[:2].requires_grad_(False)
    state = {"model": model, "optimizer": torch.optim.AdamW(model[2].parameters())}
    state["table"] = {"rows": torch.randn(5, 5), "note": seed}
    return state


def run_adapted(store, change=lambda state, step: None, steps=9, **options):
    state, frozen = adapted(1), {}
    derive = {"model.0": None, "model.1": None, "table": None}
    with logged(store, state, **{"derive": derive, **options}) as saver:
        for step in range(1, steps + 1):
            train(state)
            state["table"]["note"] = step
            change(state, step)
            saver.step(step)
            frozen[step] = snapshot(state)
    return frozen


@pytest.mark.parametrize("verify", ["rolling", "full"])
@pytest.mark.parametrize("derive", [None, {"model": None, "table": None}])
def test_frozen_weights_are_in_bases_only(store, verify, derive):
    frozen = run_adapted(store, verify=verify, **({"derive": derive} if derive else {}))
    assert kinds(store) == "brrrrrrrr"
    (table,) = Store(store).tables(Store(store).manifest(5))
    assert not [name for name in table.tensors if name.startswith(("model", "table"))]
    fresh = adapted(2)
    check_steps(store, fresh, frozen)  # which needs no rule
    manifest = materialize(Disk(store), CheckpointName(5, 1))
    assert manifest.exact
    check_steps(store, fresh, frozen, [6, 5])


def test_frozen_weights_and_bases_that_are_spread(store):
    frozen = run_adapted(store, steps=14, base_every=4, window=3)
    whole = sorted((store / "checkpoints").glob("*/state.json"))
    assert len(whole) == 3
    fresh = adapted(2)
    for gone in (None, whole[1]):
        if gone:
            gone.unlink()
        assert check_steps(store, fresh, frozen) == list(range(1, 15))
    for step in (5, 7, 10, 13, 14):
        assert materialize(Disk(store), CheckpointName(step, 1)).exact
        found = Store(store).read(step)
        assert torch.equal(found["model.0.weight"], fresh["model"][0].weight)
        check_steps(store, fresh, frozen, [step])


FROZEN = {
    "in place": lambda state: state["model"][0].weight.mul_(1),
    "data": lambda state: state["model"][1].weight.data.mul_(2),
    "swap": lambda state: setattr(state["model"][0].bias, "data", state["model"][0].bias + 0),
    "value": lambda state: state["table"].update(rows=torch.ones(5, 5)),
    "value in place": lambda state: state["table"]["rows"].add_(1),
}


@pytest.mark.parametrize("how", FROZEN)
def test_frozen_weights_that_somebody_changes(store, caplog, how):
    def change(state, step):
        if step == 5:
            with torch.no_grad():
                FROZEN[how](state)

    frozen = run_adapted(store, change)
    assert kinds(store) == "brrrbrrrr"
    assert "changed between two steps" in caplog.text
    check_steps(store, adapted(2), frozen)


def test_one_number_of_frozen_weights_changed_around_the_version_counter(store, other_store):
    """A sample of bytes misses it, but perhaps not the replay's; a full verify sees it at once."""

    def change(state, step):
        if step == 5:
            state["model"][0].weight.data[217, 3] += 1

    frozen = run_adapted(store, change, verify="full")
    assert kinds(store) == "brrrbrrrr"
    check_steps(store, adapted(2), frozen)
    run_adapted(other_store, change)
    assert kinds(other_store) == "brrrrrrrr"


def test_frozen_weights_and_buffers_of_one_module(store):
    """Running statistics change around the version counter: a sample of bytes shows it."""

    def make(state):
        averaged(state)
        return {"model": None, "ema": None}

    frozen = run(store, make, 6)
    assert kinds(store) == "bbbbbb"
    fresh, _ = build(2, make)
    check_steps(store, fresh, frozen)
