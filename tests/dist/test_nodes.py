"""Several nodes, each with a keeper of its own, commit one checkpoint. One machine plays them all:
EVERSTEP_NODE tells them apart."""

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import zoo

from everstep import Checkpointer, Store
from everstep.errors import EverstepError
from everstep.store import catalog, names
from everstep.tiers.disk import Disk
from stores import end_keeper, keeper_pid

RECIPE = zoo.Recipe()
NODES = "aabb"
"""The node of each rank."""


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    yield path
    for node in ("", *sorted(set(NODES))):
        if pid := keeper_pid(path, node):
            os.kill(pid, signal.SIGCONT)
        end_keeper(path, node)


@contextlib.contextmanager
def checkpointer(job, store, nodes, **more):
    """Of this rank, on its node; `nodes`: a letter for each rank."""
    os.environ["EVERSTEP_NODE"] = nodes[dist.get_rank()]
    state = {"model": job.model, "optimizer": job.optimizer}
    with Checkpointer(store, state, strategy="full", **more) as made:
        yield made


def trains(layout, store, nodes, first, last, more):
    """The full state after each step, and its loss."""
    job = zoo.build(layout, RECIPE)
    losses, states = [], []
    with checkpointer(job, store, nodes, **more) as made:
        assert made.restore() == first - 1
        for step in range(first, last + 1):
            losses.append(job.train(step))
            made.step(step).wait("local")
            states.append(job.full_state())
    return losses, states


def restores(layout, store, nodes, last, step=None):
    """The step, the state, and the loss of the steps up to `last`."""
    job = zoo.build(layout, RECIPE)
    with checkpointer(job, store, nodes) as made:
        step = made.restore(step)
        state = job.full_state()
        losses = [job.train(number) for number in range(step + 1, last + 1)]
    return step, state, losses


def check_equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def check_stored(store, state):
    """What is on the disk, read without any rank."""
    assert Store(store).verify().ok
    stored = Store(store).read()
    for name, tensor in state.items():
        parameter, _, key = name.partition(":")
        at = f"optimizer.model.{parameter}.{key}" if key else f"model.{parameter}"
        assert torch.equal(stored[at], tensor), name


def part_documents(store):
    return sorted(path.name for path in store.glob("checkpoints/*/part-*.json"))


@pytest.mark.parametrize("more", [{}, {"check_replicas": True}], ids=["", "checked"])
@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", "fsdp_tp"])
def test_two_nodes_commit_one_checkpoint_that_any_number_restores(gang, store, layout, more):
    (losses, states), *_ = gang.run(trains, layout, store, NODES, 1, 2, more)
    assert keeper_pid(store, "a") not in (None, keeper_pid(store, "b"))
    check_stored(store, states[-1])
    assert part_documents(store) == []
    manifest = Store(store).manifest()
    assert [part.rank for part in manifest.parts] == [0, 1]
    assert len(manifest.ranks) == 4
    step, state, after = gang.run(restores, layout, store, NODES, 3)[0]
    assert step == 2
    check_equal(state, states[-1])
    for other, size, nodes in (("fsdp2", 2, "aa"), ("fsdp2", 2, "ab"), ("hsdp", 4, "abab")):
        step, state, losses = gang.run(restores, other, store, nodes, 3, size=size)[0]
        assert step == 2
        check_equal(state, states[-1])
        assert losses == pytest.approx(after, abs=2e-6)
