"""A store that is put back to an older copy, while its keeper remembers what came after."""

import os
import shutil
import signal

import pytest
import torch
from runs import check_restored, checkpointer, freeze, save, supervised
from torch import nn

import forked


def build(seed):
    torch.manual_seed(seed)
    model = nn.Linear(6, 6)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train(state, rate):
    state["optimizer"].param_groups[0]["lr"] = rate
    supervised(state)


def trains_and_dies(store, steps, rate, every):
    state = build(1)
    saver = checkpointer(store, state, every=every)
    start = saver.restore()
    for step in range(start + 1, steps + 1):
        train(state, rate)
        saver.step(step)
        saver.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(store, steps, rate, every=1):
    ended = forked.run(trains_and_dies, store, steps, rate, every)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("undone", "steps", "every"),
    [
        (3, 3, 3),
        pytest.param(4, 2, 1, marks=pytest.mark.slow),
        pytest.param(4, 4, 4, marks=pytest.mark.slow),
    ],
)
def test_memory_of_what_was_undone_is_not_restored(store, other_store, undone, steps, every):
    """The second attempt has the same steps in the same epoch, and other content."""
    save(store, build(1))
    shutil.copytree(store, other_store)
    run_and_die(store, undone, 0.5)
    shutil.rmtree(store)
    shutil.copytree(other_store, store)
    expected = build(1)
    with checkpointer(other_store, expected) as saver:
        assert saver.restore() == 1
        for _ in range(1, steps):
            train(expected, 0.1)
    run_and_die(store, steps, 0.1, every)
    assert check_restored(store, build(2), freeze(expected)) == steps
