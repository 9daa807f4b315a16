"""catch_up: the processes that make steps whole, which die, fail, and give way."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from keepers import ended, until
from runs import logged, restore
from wholes import advance, begun, build, fill, whole_steps, workers_of

import forked
from everstep import Keep, Store
from everstep.keeper.catch_up import CatchUp
from everstep.restore import worker
from everstep.store import commit, retain
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk
from stores import packs_of

pytestmark = pytest.mark.timeout(300)  # workers give way to whatever else this machine does


class Own(torch.optim.SGD):
    """Not torch's own: nobody but the program can build it."""


def test_what_can_never_work_is_tried_once(store, caplog):
    state = build(1, Own)
    with logged(store, state, catch_up=2, base_every=1000) as saver:
        advance(saver, state, range(1, 6))
        until(lambda: saver.metrics.catch_up_failures, "a failure")
        advance(saver, state, range(6, 12))
        assert saver.metrics.catch_up_failures == 1
        assert "only torch's own" in saver.metrics.last_error
        assert not workers_of(saver._client.keeper_pid)
    assert "It is not tried any more" in caplog.text
    assert whole_steps(store) == []
    assert restore(store, build(2, Own)) == 11


def test_workers_that_die(store):
    """What one had begun is cleared away, and there is another, but not for ever."""
    state, killed = build(1), []
    with logged(store, state, catch_up=3, base_every=1000) as saver:
        advance(saver, state, range(1, 5))
        keeper, worker = begun(saver)
        os.kill(worker, signal.SIGKILL)
        until(lambda: saver.metrics.catch_up_failures, "the failure")
        advance(saver, state, range(5, 8))
        until(lambda: saver.metrics.catch_ups, "the next worker")
        assert whole_steps(store) == [7]
        assert Store(store).verify().ok
        step = 7

        def advance_and_kill():
            nonlocal step
            step += 1
            advance(saver, state, [step])
            for worker in workers_of(keeper):
                killed.append(worker)
                os.kill(worker, signal.SIGKILL)
            return saver.metrics.catch_up_failures == 4

        until(advance_and_kill, "three failures in a row")
        assert len({*killed}) == 3
        for _ in range(5):
            advance_and_kill()
        assert not workers_of(keeper)
        assert "has died" in saver.metrics.last_error
    assert restore(store, build(2)) == step


@pytest.mark.slow
def test_a_step_that_retention_took_before_the_worker_came_to_it(store):
    """Quick steps, and bases close to each other: no failure, and the next one is tried."""
    state = build(1)
    with logged(store, state, catch_up=2, base_every=4, keep=Keep(last=1)) as saver:
        advance(saver, state, range(1, 4))
        _, worker = begun(saver)
        said = Path(f"/proc/{worker}/cmdline")  # before that its keeper waits for it
        until(lambda: b"everstep.restore.worker" in said.read_bytes(), "the worker's program")
        os.kill(worker, signal.SIGSTOP)
        advance(saver, state, range(4, 10))
        until(lambda: min(Store(store).steps()) > 3, "retention")
        os.kill(worker, signal.SIGCONT)
        assert ended(worker)
        advance(saver, state, range(10, 12))
        until(lambda: saver.metrics.catch_ups, "a step that is there")
        assert saver.metrics.catch_up_failures == 0
        assert whole_steps(store) == [11]


def test_a_worker_ends_with_its_keeper(store):
    state = build(1)
    with logged(store, state, catch_up=2, base_every=1000) as saver:
        advance(saver, state, range(1, 4))
        keeper, worker = begun(saver)
        os.kill(keeper, signal.SIGKILL)
        assert ended(worker)
        advance(saver, state, range(4, 7))  # and the next keeper goes on
        until(lambda: saver.metrics.catch_ups, "a worker of the next keeper")
        assert saver._client.keeper_pid != keeper
    assert Store(store).verify().ok
    assert restore(store, build(2)) == 6


def test_a_worker_gives_way_and_ends_with_its_trainer(store):
    """In peace: nothing will be added to this log."""
    state = build(1)
    with logged(store, state, catch_up=2, base_every=1000) as saver:
        advance(saver, state, range(1, 4))
        keeper, worker = begun(saver)
        is_low = until(
            lambda: ended(worker, 0) or os.getpriority(os.PRIO_PROCESS, worker) == 19, "a low one"
        )
        assert is_low
        if not ended(worker, 0):
            assert os.getsid(worker) == worker
            assert os.getpriority(os.PRIO_PROCESS, keeper) == 0
    assert ended(worker)
    assert ended(keeper)
    assert Store(store).verify().ok
    retain.sweep(Disk(store))
    assert len(packs_of(store)) == 3 + len(whole_steps(store))


def test_none_is_begun_for_a_store_that_is_gone_or_taken_over(store):
    fill(store)
    name, told = CheckpointName(8, 1), []

    def attempt():
        caught_up = CatchUp(
            Disk(store), 1, is_resumed=False, tell=told.append, on_whole=lambda: None
        )
        assert caught_up._make_whole(name) is None

    commit.claim_epoch(Disk(store), 1, 8)
    attempt()
    shutil.rmtree(store)
    attempt()
    assert not told
    assert not store.exists()
    done = subprocess.run(
        [sys.executable, "-m", "everstep.restore.worker", str(store), str(name)],
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert not store.exists()


def works(store, name):
    sys.exit(worker.main([str(store), name]))


def test_the_worker_says_what_went_wrong(store):
    fill(store)
    for step, kind in ((1, "Unsupported"), (9, "Missing")):
        with forked.Forked(works, store, f"{step}-1") as process:
            assert json.loads(process.stdout.readline())["kind"] == kind
            assert process.wait() == 1
