"""Records of several ranks: replayed to the bits of the run, on its own layout and on others."""

import pytest
import torch
import zoo

from everstep import Checkpointer, Store
from stores import end_keeper

STEPS = 7
RECIPE = zoo.Recipe()
LAYOUTS = ["ddp", "fsdp2", "tp", "hsdp", "fsdp_tp"]


@pytest.fixture
def store(tmp_path):
    yield tmp_path / "store"
    end_keeper(tmp_path / "store")


def attached(job, store, **more):
    state = {"model": job.model, "optimizer": job.optimizer}
    return Checkpointer(store, state, strategy="log", under_pressure="wait", **more)


def trains(layout, store, last):
    """From what is restored up to a step: where it began, the losses and the full state."""
    job = zoo.build(layout, RECIPE)
    with attached(job, store, base_every=5) as checkpointer:
        first = checkpointer.restore()
        state = job.full_state()
        losses = []
        for step in range(first + 1, last + 1):
            losses.append(job.train(step))
            checkpointer.step(step)
        checkpointer.wait()
        return first, state, losses, job.full_state()


def equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("saved", LAYOUTS)
def test_records_of_ranks_are_replayed(gang, store, tmp_path, saved):
    size = zoo.SIZES[saved]
    straight = tmp_path / "straight"
    try:
        (_, _, losses, final), *_ = gang.run(trains, saved, straight, STEPS + 2, size=size)
    finally:
        end_keeper(straight)
    (_, _, before, state), *_ = gang.run(trains, saved, store, STEPS, size=size)
    assert before == losses[:STEPS]
    manifests = [Store(store).manifest(step) for step in range(1, STEPS + 1)]
    assert [bool(manifest.records) for manifest in manifests] == [False] + [True] * 4 + [
        False,
        True,
    ]
    assert Store(store).verify().ok
    others = [layout for layout in ("dense", "fsdp2", "tp") if layout != saved]
    for layout in others:
        (first, found, _, _), *_ = gang.run(trains, layout, store, 0, size=zoo.SIZES[layout])
        assert first == STEPS
        equal(found, state)
    (first, found, after, ended), *_ = gang.run(trains, saved, store, STEPS + 2, size=size)
    assert first == STEPS
    equal(found, state)
    assert after == losses[STEPS:]
    equal(ended, final)
