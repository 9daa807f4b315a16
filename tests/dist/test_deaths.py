"""A rank dies, all die, the keeper dies, at picked and at random moments: the next start goes on
from one step on all ranks, with nothing lost that was promised. One rank is late, or never comes,
leaves a step out, tears its copy, is told to end: all ranks say the same of each step."""

import contextlib
import os
import random
import signal
import threading
import time

import deaths
import jobs
import pytest
import torch
import torch.distributed as dist
import zoo
from deaths import AT, LAST, LAYOUT, RECIPE, _note, come_back, noted, opened, trains

import everstep.checkpointer
from comparing import check_equal
from everstep import Store, Unavailable, Unsupported
from examples import slow
from processes import stopped, until
from stores import end_keeper, keeper_pid

SEEDS = range(int(os.environ.get("EVERSTEP_DEATHS", "12")))


RANKS = 2  # of the gang


@pytest.fixture(scope="module")
def reference(gang):
    return gang.run(deaths.states, LAST + 1)[0]


@pytest.mark.parametrize(
    ("how", "victims", "least", "most"),
    [
        # The others have their part of step AT: it does not exist.
        *slow(("before", [1], AT - 1, AT - 1)),
        ("copying", [0], AT - 1, AT - 1),
        ("untold", [1], AT, AT),  # the keeper finds what is sealed
        ("written", [1], AT, LAST),  # it may have gone on before it was asked
    ],
)
def test_ranks_that_die_at_picked_moments(
    gang, store, tmp_path, reference, how, victims, least, most
):
    outcomes = gang.outcomes(trains, store, tmp_path, LAST, how, victims)
    for outcome in outcomes:
        assert outcome.killed == (outcome.rank in victims), outcome
    assert least <= come_back(gang, store, tmp_path, reference) <= most


@pytest.mark.slow
@pytest.mark.parametrize("victims", [[1], [0, 1]])
def test_ranks_that_die_when_all_is_sealed(gang, store, tmp_path, reference, victims):
    gang.start(trains, store, tmp_path, LAST, "sealed")
    until(lambda: noted(tmp_path, "ready") == [AT, AT], "they are not there")
    with stopped(keeper_pid(store)):
        (tmp_path / "stopped").touch()
        until(lambda: noted(tmp_path, "captured") == [AT, AT], "it is not sealed")
        gang.kill(*victims)
    (tmp_path / "go").touch()
    gang.finish()
    assert come_back(gang, store, tmp_path, reference) >= AT


def test_all_ranks_die_at_once(gang, store, tmp_path, reference):
    gang.start(trains, store, tmp_path, 1000)
    until(lambda: min(noted(tmp_path, "returned")) >= 2, "no step")
    gang.kill()
    gang.finish()
    last = max(noted(tmp_path, "returned"))
    come_back(gang, store, tmp_path, gang.run(deaths.states, last + 2)[0], last + 2)


def test_the_keeper_dies_twice_and_nobody_notices(gang, store, tmp_path, reference):
    gang.start(trains, store, tmp_path, LAST, None, (), 0.3)
    for step in (2, 4):
        until(lambda step=step: min(noted(tmp_path, "returned")) >= step, f"no step {step}")
        end_keeper(store)
    outcomes = gang.finish()
    assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, outcomes
    assert noted(tmp_path, "local") == [LAST, LAST]
    assert come_back(gang, store, tmp_path, reference) == LAST


@pytest.mark.slow
def test_the_keeper_and_a_rank_die(gang, store, tmp_path, reference):
    gang.start(trains, store, tmp_path, LAST, None, (), 0.2)
    until(lambda: min(noted(tmp_path, "returned")) >= 3, "no step")
    end_keeper(store)
    gang.kill(0)
    gang.finish()
    come_back(gang, store, tmp_path, reference, is_memory_lost=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_deaths_at_random_moments(gang, store, tmp_path, seed):
    """Again and again in one store; EVERSTEP_DEATHS says how many such runs."""
    rng = random.Random(f"deaths {seed}")
    print(f"seed {seed}")  # shown where it fails
    done = 0
    for life in range(4):
        folder = tmp_path / str(life)
        folder.mkdir()
        gang.start(trains, store, folder, 10**6, None, (), rng.choice([0.0, 0.02]))
        until(lambda folder=folder: min(noted(folder, "returned")) > 0, "no step")
        wanted = rng.choice(["rank", "rank", "all", "keeper and rank", "keeper, all", "stopped"])
        kills = rng.choice([0, 0, 1, 2])
        for _ in range(kills):
            _pause(rng)
            end_keeper(store)
        _pause(rng)
        if wanted == "stopped" and (keeper := keeper_pid(store)):
            os.kill(keeper, signal.SIGSTOP)
            _pause(rng)
        if "keeper" in wanted:
            end_keeper(store)
        if "rank" in wanted:
            gang.kill(rng.randrange(2))
        else:
            gang.kill()
        if wanted == "stopped" and keeper:
            os.kill(keeper, signal.SIGCONT)
        gang.finish()
        last = max(*noted(folder, "returned"), done) + 1
        expected = gang.run(deaths.states, last)[0]
        lost = "keeper" in wanted or kills > 0  # the next one may not have had all arenas yet
        come_back(gang, store, folder, expected, last, is_memory_lost=lost)
        done = last


def _pause(rng):
    """A random moment, of about the length of a step."""
    time.sleep(rng.random() * 0.1)


# ---- one that is late, or has not all ------------------------------------------------------------


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
    run, other = gang.run(jobs.trains, LAYOUT, store)
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


# ---- SIGTERM, at different moments ---------------------------------------------------------------


def trains_until_told(store, folder, every, last=10**6, handler=False):
    """Like deaths.trains; `handler`: the program has one of its own, and goes on after SIGTERM."""
    told = []
    if handler:
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    job = zoo.build(LAYOUT, RECIPE)
    with opened(job, store, every=every) as saver:
        first = saver.restore()
        found = job.full_state()
        for step in range(first + 1, last + 1):
            job.train(step)
            saver.step(step)
            _note(folder, "returned", step)
            if handler and saver._preemption.is_last:
                break
    return first, found, step if last > first else first


@pytest.mark.parametrize(("every", "told"), [(1, [0, 1]), *slow((1000, [1, 0]), (1000, [1]))])
def test_all_ranks_save_the_same_last_step(gang, store, tmp_path, every, told):
    gang.start(trains_until_told, store, tmp_path, every)
    rng = random.Random(f"{every} {told}")
    until(lambda: min(noted(tmp_path, "returned")) > 0, "no step")
    for rank in told:
        time.sleep(rng.random() * 0.1)  # they hear of it at different moments
        with contextlib.suppress(ProcessLookupError):  # the first one's word was enough
            os.kill(gang.pid(rank), signal.SIGTERM)
    outcomes = gang.finish()
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGTERM] * 2, outcomes
    returned = noted(tmp_path, "returned")
    latest = Store(store).latest()
    assert latest == returned[0] + 1 == returned[1] + 1  # it ends in the call for it
    (step, found, _), *_ = gang.run(trains_until_told, store, tmp_path, every, 0)
    assert step == latest
    check_equal(found, gang.run(deaths.states, latest)[0][latest])
    assert Store(store).verify().ok


def test_a_handler_of_the_programs_own_decides(gang, store, tmp_path):
    gang.start(trains_until_told, store, tmp_path, 1000, 10**6, True)
    until(lambda: min(noted(tmp_path, "returned")) > 0, "no step")
    os.kill(gang.pid(0), signal.SIGTERM)
    (_, _, last), (_, _, other) = [outcome.value for outcome in gang.finish()]
    assert last == other == Store(store).latest()
