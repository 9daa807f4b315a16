"""SIGTERM to ranks, at different moments: all save the same last step, and end."""

import contextlib
import os
import random
import signal
import time

import deaths
import pytest
import zoo
from deaths import LAYOUT, RECIPE, _note, noted, opened

from comparing import check_equal
from everstep import Store
from examples import slow
from processes import until

RANKS = 2  # of the gang


def trains(store, folder, every, last=10**6, handler=False):
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


@pytest.mark.parametrize(
    ("every", "told"),
    [(1, [0, 1]), *slow((1000, [1, 0]), (1000, [1]))],
)
def test_all_ranks_save_the_same_last_step(gang, store, tmp_path, every, told):
    gang.start(trains, store, tmp_path, every)
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
    (step, found, _), *_ = gang.run(trains, store, tmp_path, every, 0)
    assert step == latest
    check_equal(found, gang.run(deaths.states, latest)[0][latest])
    assert Store(store).verify().ok


def test_a_handler_of_the_programs_own_decides(gang, store, tmp_path):
    gang.start(trains, store, tmp_path, 1000, 10**6, True)
    until(lambda: min(noted(tmp_path, "returned")) > 0, "no step")
    os.kill(gang.pid(0), signal.SIGTERM)
    (_, _, last), (_, _, other) = [outcome.value for outcome in gang.finish()]
    assert last == other == Store(store).latest()
