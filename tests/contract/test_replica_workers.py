"""Replicas: the processes that hold them, which die, fail, and give way."""

import os
import signal

import pytest
from keepers import ended, stopped, until
from runs import logged, restore
from wholes import advance, begun, build, come, whole_steps, workers_of

from everstep import Store
from everstep.store import retain
from everstep.tiers.disk import Disk
from stores import packs_of

pytestmark = pytest.mark.timeout(300)  # workers give way to whatever else this machine does


def replicated(store, state, **options):
    return logged(store, state, **{"replica": True, "base_every": 1000, **options})


@pytest.mark.slow
def test_workers_that_die(store):
    """There is another, which goes on from base and records, but not for ever."""
    state, killed = build(1), []
    with replicated(store, state, base_every=3) as saver:
        advance(saver, state, range(1, 5))
        come(saver, 4)
        keeper, worker = begun(saver)
        os.kill(worker, signal.SIGKILL)
        until(lambda: saver.metrics.replica_failures, "the failure")
        advance(saver, state, range(5, 8))
        come(saver, 7)
        assert Store(store).verify().ok

        def kill_again():
            for worker in workers_of(keeper):
                killed.append(worker)
                os.kill(worker, signal.SIGKILL)
            return saver.metrics.replica_failures == 4

        until(kill_again, "three failures in a row")
        assert len({*killed}) == 3
        advance(saver, state, range(8, 13))
        assert not workers_of(keeper)
        assert "has died" in saver.metrics.last_error
    manifests = [Store(store).manifest(step) for step in Store(store).steps()]
    assert any(not each.previous for each in manifests[7:])  # training makes bases again
    assert restore(store, build(2)) == 12


def test_what_a_dead_worker_had_written_of_a_base_is_deleted(store):
    state = build(1)
    with replicated(store, state) as saver:
        advance(saver, state, range(1, 5))
        come(saver, 4)
        _, worker = begun(saver)
        there = packs_of(store)
        names = [f"00000004-0001-abcd-{number}.safetensors" for number in range(2)]
        for name in names:
            (store / "data" / name).write_bytes(bytes(1000))
        os.kill(worker, signal.SIGKILL)
        until(lambda: packs_of(store) == there, "the end of them")
        advance(saver, state, range(5, 7))
    assert Store(store).verify().ok
    assert restore(store, build(2)) == 6


def test_a_worker_ends_with_its_keeper(store):
    state = build(1)
    with replicated(store, state) as saver:
        advance(saver, state, range(1, 4))
        keeper, worker = begun(saver)
        os.kill(keeper, signal.SIGKILL)
        assert ended(worker)
        advance(saver, state, range(4, 7))  # and the next keeper goes on
        come(saver, 6)
        assert saver._client.keeper_pid != keeper
    assert Store(store).verify().ok
    assert restore(store, build(2)) == 6


@pytest.mark.slow
def test_a_worker_gives_way_and_ends_with_its_trainer(store):
    """In peace: nothing will be added to this log."""
    state = build(1)
    with replicated(store, state, base_every=2) as saver:
        advance(saver, state, range(1, 4))
        come(saver, 3)
        keeper, worker = begun(saver)
        until(lambda: os.getpriority(os.PRIO_PROCESS, worker) == 19, "that it gives way")
        assert os.getsid(worker) == worker
        assert os.getpriority(os.PRIO_PROCESS, keeper) == 0
    assert ended(worker)
    assert ended(keeper)
    assert Store(store).verify().ok
    retain.sweep(Disk(store))
    assert len(packs_of(store)) == 3 + len(whole_steps(store))


@pytest.mark.slow
def test_a_worker_that_stands_still_costs_nothing_but_its_state(store):
    """Slots and commits go on; what it missed it reads from the disk."""
    state = build(1)
    with replicated(store, state) as saver:
        advance(saver, state, range(1, 4))
        come(saver, 3)
        _, worker = begun(saver)
        with stopped(worker):
            advance(saver, state, range(4, 100))
            assert saver.metrics.replica_step == 3
        come(saver, 99)
        assert saver.metrics.replica_failures == 0
