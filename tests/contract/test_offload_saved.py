"""Checkpoints of a run whose optimizer is offloaded: whole states, logs, replicas."""

import os
import signal

import pytest
import torch
from runs import check_same, check_steps, checkpointer, end_keeper, logged, snapshot
from torch import nn
from wholes import come, whole_steps

import forked
from everstep import OffloadedOptimizer, Store
from everstep.restore.materialize import materialize
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk
from examples import slow

pytestmark = pytest.mark.timeout(300)  # replicas give way to whatever else this machine does


def build(seed, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 12)).to(dtype)
    optimizer = OffloadedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state):
    state["optimizer"].zero_grad()
    inputs = torch.randn(8, 12).to(state["model"][0].weight.dtype)
    (3 * state["model"](inputs) - 1).square().mean().backward()
    state["optimizer"].step()
    state["scheduler"].step()


def run(store, dtype, steps=7, **options):
    state, frozen = build(1, dtype), {}
    with checkpointer(store, state, **options) as saver:
        for step in range(1, steps + 1):
            train(state)
            saver.step(step).wait("local")
            frozen[step] = snapshot(state)
    return state, frozen


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("full", torch.bfloat16),
        *slow(("full", torch.float32), ("log", torch.float32), ("log", torch.bfloat16)),
    ],
)
def test_every_step_is_restored_as_it_was(store, strategy, dtype):
    _, frozen = run(store, dtype, strategy=strategy)
    assert len(check_steps(store, build(2, dtype), frozen)) == 7
    fresh = build(3, dtype)
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore(4) == 4
    for _ in range(5, 8):
        train(fresh)
    check_same(snapshot(fresh), frozen[7])
    if strategy == "log":
        assert sum(not each.previous for each in map(Store(store).manifest, range(1, 8))) <= 2
        assert materialize(Disk(store), CheckpointName(6, 1)).exact
        assert whole_steps(store) == [6]
        assert len(check_steps(store, build(4, dtype), frozen)) == 7


def trains_and_dies(store):
    state = build(1)
    saver = logged(store, state, replica=True, base_every=1000)
    for step in range(saver.restore() + 1, 100):
        train(state)
        saver.step(step).wait("local")
        if step % 6 == 0:
            break
    come(saver, step)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_replica(store, monkeypatch):
    for _ in range(2):
        assert forked.run(trains_and_dies, store).returncode == -signal.SIGKILL
    expected = build(1)
    for _ in range(12):
        train(expected)
    frozen, restored = snapshot(expected), build(2)
    with monkeypatch.context() as patch, checkpointer(store, restored) as restorer:
        patch.setattr("everstep.restore.choose._Lazy.read_into", None)
        assert restorer.restore() == 12
    check_same(snapshot(restored), frozen)
    end_keeper(store)
