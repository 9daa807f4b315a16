"""A run with much state is killed by SIGKILL, and goes on from memory or disk, bit for bit."""

import os
import signal

import pytest
import torch
from runs import check_same, checkpointer, end_keeper, freeze
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel

import forked

STEPS = 5


def build(seed):
    """Two models of odd make, an EMA copy, a scaler, schedulers, generators, values."""
    torch.manual_seed(seed)
    g = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 6))
    d = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1)).to(torch.bfloat16)
    d.add_module("tied", nn.Linear(64, 1))
    d.tied.weight = d[2].weight
    first = {"params": g[0].parameters(), "lr": torch.tensor(0.01)}
    optimizers = {
        "g": torch.optim.AdamW([first, {"params": g[1:].parameters()}], lr=0.02, amsgrad=True),
        "d": torch.optim.SGD(d[:3].parameters(), lr=0.1, momentum=0.9),
    }
    parts = [LinearLR(optimizers["d"], 0.5, total_iters=3), MultiStepLR(optimizers["d"], [1, 1, 4])]
    return {
        "models": {"g": g, "d": d, "average": AveragedModel(g, use_buffers=True)},
        "optimizers": optimizers,
        "schedulers": [
            SequentialLR(optimizers["d"], parts, [4]),
            ReduceLROnPlateau(optimizers["g"], patience=0),
        ],
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0 * seed, growth_interval=2),
        "data": torch.Generator().manual_seed(seed),
        "note": {"losses": [], "best": float("inf"), 7: (seed, None)},
    }


def train(state):
    g, d, average = state["models"].values()
    scaler = state["scaler"]
    for optimizer in state["optimizers"].values():
        optimizer.zero_grad()
    noise = torch.randn(8, 6, generator=state["data"])
    loss = d[:3](g(noise).bfloat16()).float().square().mean()
    scaler.scale(loss).backward()
    for optimizer in state["optimizers"].values():
        scaler.step(optimizer)
    scaler.update()
    average.update_parameters(g)
    state["schedulers"][0].step()
    state["schedulers"][1].step(loss.item())
    state["note"]["losses"].append(loss.item())
    state["note"]["best"] = min(state["note"]["best"], loss.item())


def trains_and_dies(store):
    state = build(1)
    saver = checkpointer(store, state, strategy="full")
    start = saver.restore()
    for step in range(start + 1, start + STEPS + 1):
        train(state)
        handle = saver.step(step)
    handle.wait("captured")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(store, source, monkeypatch):
    for _ in range(2):  # the second one goes on from what the first one left
        assert forked.run(trains_and_dies, store).returncode == -signal.SIGKILL
        if source == "disk":
            with checkpointer(store, {"nothing": 0}) as other:
                other._client.settle()  # what was sealed is finished
            end_keeper(store)
    expected = build(1)
    for _ in range(2 * STEPS):
        train(expected)
    frozen = freeze(expected)
    if source == "memory":  # no file with data is opened
        monkeypatch.setattr("everstep.restore.choose._Lazy.read_into", None)
    restored = build(2)
    with checkpointer(store, restored) as restorer:
        assert restorer.restore() == 2 * STEPS
        check_same(freeze(restored), frozen)
        random_state = torch.get_rng_state()
        for _ in range(3):
            train(restored)
    torch.set_rng_state(random_state)
    for _ in range(3):
        train(expected)
    check_same(freeze(restored), freeze(expected))
