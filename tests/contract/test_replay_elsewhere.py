"""A log of a run on a GPU, replayed on the CPU, where updates come to other last bits: what comes
of it is told to be inexact, and is not taken for damage. (Here the run's tables alone say that it
was on a GPU, and the replay is changed by one bit; a real one is in tests/gpu.)"""

import logging

import pytest
import torch
from logs import build, train
from runs import run_logged

from everstep import Checkpointer, Corrupt, Unsupported
from everstep.capture import plan
from everstep.format.manifest import CheckpointName
from everstep.redo import replay
from everstep.restore.materialize import materialize
from everstep.tiers.disk import Disk

LAST = 5


@pytest.fixture
def other_bits(monkeypatch):
    """The first weight comes to another last bit at each replayed update."""
    step = replay._step

    def again(state, call):
        step(state, call)
        with torch.no_grad():
            next(iter(state.parameters()))[2].view(torch.int32).view(-1)[0] += 1

    monkeypatch.setattr(replay, "_step", again)


@pytest.fixture(params=["cpu", "cuda:0"])
def device(request, monkeypatch):
    """What the tables say of where tensors were."""
    encode_table = plan.encode_table

    def encode(layout, aliases, devices, *rest):
        return encode_table(layout, aliases, dict.fromkeys(devices, request.param), *rest)

    monkeypatch.setattr(plan, "encode_table", encode)
    return request.param


def attempt(store, only=None, exact="allow"):
    state = build(2)
    with Checkpointer(store, state) as saver:
        assert saver.restore(LAST, only=only, exact=exact) == LAST
    return state["model"][0].weight.detach().clone()


@pytest.mark.parametrize("window", [1, 3])
def test_other_bits_are_damage_only_where_they_must_be_equal(
    store, device, other_bits, caplog, window
):
    run = build(1)
    run_logged(
        store, run, train, LAST, verify="full", base_every=3 if window > 1 else 20, window=window
    )
    trained = run["model"][0].weight
    if device == "cpu":
        for only in (None, "model"):
            with pytest.raises(Corrupt, match="other bytes"):
                attempt(store, only)
        with pytest.raises(Corrupt, match="other bytes"):
            materialize(Disk(store), CheckpointName(LAST, 1))
        return
    for only in (None, "model"):
        with pytest.raises(Unsupported, match="here on cpu"):
            attempt(store, only, exact="require")
        with caplog.at_level(logging.WARNING, "everstep"):
            weight = attempt(store, only)
        torch.testing.assert_close(weight, trained.detach())
        assert "here on cpu" in caplog.text
        caplog.clear()
    made = materialize(Disk(store), CheckpointName(LAST, 1))
    assert not made.exact
    assert "parameters on cuda, here on cpu" in made.topology["replayed"]["differs"]
