"""One rank is late, or never comes, leaves a step out, tears its copy, or is of another run: the
others wait or are told, all ranks say the same of each step, and none says more than is there."""

import os
import signal
import threading
import time

import deaths
import pytest
import torch
import torch.distributed as dist
import zoo
from deaths import LAYOUT, RECIPE, _note, noted, opened
from jobs import trains

import everstep.checkpointer
from comparing import check_equal
from everstep import Store, Unavailable, Unsupported
from examples import slow
from processes import stopped, until
from stores import end_keeper, keeper_pid

RANKS = 2  # of the gang


@pytest.fixture(scope="module")
def reference(gang):
    return gang.run(deaths.states, 4)[0]


def levels(handles):
    """What became of each save."""
    for handle in handles:
        until(handle.done, f"{handle} is pending")
    return [handle.level == "local" for handle in handles]


def is_late(store, folder):
    """Rank 1 stops itself before it hands in step 2, until it is woken."""
    job, rank = zoo.build(LAYOUT, RECIPE), dist.get_rank()
    with opened(job, store) as saver:
        handles = []
        for step in (1, 2, 3):
            job.train(step)
            if step == 2 and rank == 1:
                _note(folder, "late", step)
                os.kill(os.getpid(), signal.SIGSTOP)
            handles.append(saver.step(step))
            if step == 1:
                saver.wait()
            if step == 2 and rank == 0:
                with pytest.raises(TimeoutError):
                    handles[1].wait("local", timeout=0.1)
                _note(folder, "waits", step)
                until((folder / "go").exists, "nobody says go")
        found = levels(handles)
    return found


@pytest.mark.parametrize("seconds", [0, *slow(30)])
def test_a_rank_that_is_late(gang, store, tmp_path, seconds):
    gang.start(is_late, store, tmp_path)
    until(lambda: noted(tmp_path, "late")[1] and noted(tmp_path, "waits")[0], "it is not late")
    time.sleep(seconds)  # 0 but for the slow test, of which it is the point
    (tmp_path / "go").touch()
    os.kill(gang.pid(1), signal.SIGCONT)
    assert [outcome.value for outcome in gang.finish()] == [[True] * 3] * 2
    assert Store(store).steps() == [1, 2, 3]


def never_comes(store, folder):
    """Rank 1 lives, but does not hand in step 2."""
    job, rank = zoo.build(LAYOUT, RECIPE), dist.get_rank()
    saver = opened(job, store)
    job.train(1)
    saver.step(1).wait("local")
    if rank == 1:
        until((folder / "closed").exists, "rank 0 does not close")
        saver.close()
        return
    handle = saver.step(2)
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.1)
    with pytest.raises(TimeoutError):
        saver.wait(timeout=0.1)
    assert handle.level in ("captured", "held")
    assert handle.error is None
    everstep.checkpointer._CLOSE_S, before = 0.1, everstep.checkpointer._CLOSE_S
    try:
        with pytest.raises(TimeoutError):
            saver.close()
    finally:
        everstep.checkpointer._CLOSE_S = before
        (folder / "closed").touch()


def test_a_rank_that_never_comes(gang, store, tmp_path, reference):
    gang.run(never_comes, store, tmp_path)
    run, other = gang.run(trains, LAYOUT, store)
    assert run.first == other.first == 1
    check_equal(run.begun, reference[1])


def has_no_memory(store):
    """Rank 1 has too little for any save, and training goes on."""
    job, rank = zoo.build(LAYOUT, RECIPE), dist.get_rank()
    with opened(job, store, memory_bytes=4096 if rank == 1 else None) as saver:
        for step in (1, 2):
            job.train(step)
            with pytest.raises(Unavailable, match="memory_bytes=4096"):
                saver.step(step).wait("local")
        saver._saves.newest = None  # close() would say it once more


def test_a_rank_without_memory(gang, store):
    gang.run(has_no_memory, store)
    assert Store(store).steps() == []


def skips(store, folder):
    """Rank 1 has two slots, rank 0 three, while the keeper stands still."""
    job, rank = zoo.build(LAYOUT, RECIPE), dist.get_rank()
    options = {"when_full": "skip"}
    with opened(job, folder / "other", **options) as saver:
        job.train(1)
        saver.step(1)
        saver.wait()
        arena = saver._captures.pool._current[1]
        two = 2 * (arena.documents_size + arena.image_size)
    end_keeper(folder / "other")  # which may have told only one rank that step 1 is durable
    with opened(job, store, memory_bytes=two if rank else None, **options) as saver:
        handles = [saver.step(1)]
        saver.wait()
        _note(folder, "ready", 1)
        until((folder / "stopped").exists, "the keeper is not stopped")
        for step in (2, 3, 4):
            job.train(step)
            handles.append(saver.step(step))
            if handles[-1].error is None:
                handles[-1].wait("captured")
        _note(folder, "captured", 4)
        until((folder / "go").exists, "nobody says go")
        levels(handles)
        job.train(5)
        handles.append(saver.step(5))
        found = levels(handles)
        return found, saver.metrics.skips


def test_a_step_that_one_rank_skips_is_none_of_any(gang, store, tmp_path):
    gang.start(skips, store, tmp_path)
    until(lambda: noted(tmp_path, "ready") == [1, 1], "they are not there")
    with stopped(keeper_pid(store)):
        (tmp_path / "stopped").touch()
        until(lambda: noted(tmp_path, "captured") == [4, 4], "it is not captured")
    (tmp_path / "go").touch()
    (found, skipped), (other, more) = [outcome.value for outcome in gang.finish()]
    assert found == other == [True, True, True, False, True]
    assert (skipped, more) == (0, 1)
    assert Store(store).steps() == [1, 2, 3, 5]
    assert Store(store).verify().ok


def tears(store):
    """Rank 1 writes to its weights while step 2 is on its way."""
    job, rank = zoo.build(LAYOUT, RECIPE), dist.get_rank()
    with opened(job, store) as saver:
        job.train(1)
        saver.step(1).wait("local")
        job.train(2)
        torn, hear = threading.Event(), saver._client._on_event

        def hear_later(message):
            torn.wait()
            hear(message)

        saver._client._on_event = hear_later
        handle = saver.step(2)
        if rank == 1:
            with torch.no_grad():
                next(iter(job.model.parameters())).to_local().add_(1)
        torn.set()
        with pytest.raises(Unsupported, match="step 2"):
            handle.wait("local")
        job.train(3)
        saver.step(3).wait("local")
        assert saver.metrics.commits == 2


def test_a_copy_torn_on_one_rank_is_saved_by_none(gang, store):
    gang.run(tears, store)
    assert Store(store).steps() == [1, 3]
