"""Trainer, keeper, replica and the optimizer's process are killed at random moments: no step that
was durable is lost, and in the end all bytes are those of a run without kills."""

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from runs import check_same, end_keeper, logged, snapshot
from wholes import workers_of

import forked
from everstep import OffloadedOptimizer, Store

ROUNDS = int(os.environ.get("EVERSTEP_ROUNDS", "10"))
STEP_S = 0.02


def build(seed, kind):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 12))
    if kind in ("offload", "overlap"):
        model = model.bfloat16()
        adamw, overlap = torch.optim.AdamW, kind == "overlap"
        optimizer = OffloadedOptimizer(adamw, model.parameters(), lr=0.01, overlap=overlap)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer}


def train(state):
    state["optimizer"].zero_grad()
    inputs = torch.randn(8, 12).to(state["model"][0].weight.dtype)
    (3 * state["model"](inputs) - 1).square().mean().backward()
    state["optimizer"].step()


def trains(store, kind):
    """Without an end; says each step that is durable, and who may be killed."""
    state = build(1, kind)
    layerwise = kind == "layerwise"
    saver = logged(store, state, replica=True, layerwise=layerwise, base_every=20)
    step = saver.restore()
    while True:
        worker = getattr(state["optimizer"], "_process", None)
        process = worker and worker.worker
        print(step, saver._client.keeper_pid, process and process.pid, flush=True)
        step += 1
        train(state)
        saver.step(step).wait("local")
        time.sleep(STEP_S)  # so that a run of many rounds has not too many steps


def victims(rng, trainer, keeper, updater):
    """Some of them; the trainer always, as the last."""
    found = [keeper] if rng.random() < 0.4 else []
    found += workers_of(keeper) if rng.random() < 0.4 else []
    found += [updater] if updater and rng.random() < 0.4 else []
    rng.shuffle(found)
    return [*found, trainer]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["plain", "layerwise", "offload", "overlap"])
def test_whoever_is_killed_at_any_moment(store, kind):
    """EVERSTEP_SEED=... again, EVERSTEP_ROUNDS=... more."""
    seed = int(os.environ.get("EVERSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"EVERSTEP_SEED={seed}")
    rng, last = random.Random(seed), 0
    for _ in range(ROUNDS):
        with forked.Forked(trains, store, kind) as process:
            first = process.stdout.readline().split()
            assert first, "the trainer ended"
            assert int(first[0]) >= last
            for number in range(rng.randrange(1, 60)):
                line = process.stdout.readline().split()
                assert line, f"the trainer ended after {number} steps"
            updater = None if line[2] == "None" else int(line[2])
            for pid in victims(rng, process.pid, int(line[1]), updater):
                time.sleep(rng.choice([0.0, 0.0, rng.uniform(0.0, 0.3)]))  # or at once
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            rest = [row.split() for row in process.stdout.read().splitlines()]
            last = int([line, *(row for row in rest if len(row) == 3)][-1][0])
    restored = build(2, kind)
    with logged(store, restored, replica=True, base_every=20) as restorer:
        steps = restorer.restore()
    assert steps >= last
    found, expected = snapshot(restored), build(1, kind)
    for _ in range(steps):
        train(expected)
    check_same(snapshot(expected), found)
    end_keeper(store)
    verdict = Store(store).verify()
    assert verdict.ok, verdict.problems
