"""strategy="log" on a disk that lies, fills up or is cleaned up, and with keepers that die."""

import contextlib
import itertools
import os
import signal

import pytest
from keepers import ended, until
from logs import build, train
from runs import check_steps, kinds, logged, run_logged, snapshot
from test_bad_disk import fill, small  # noqa: F401 - a fixture

from everstep import Conflict, EverstepError, Store, Unavailable
from examples import slow
from stores import files_of, packs_of


def test_deleting_what_a_record_follows(store):
    run_logged(store, build(1), train, base_every=5)
    before = files_of(store)
    for step in (1, 3, 6, 7):
        with pytest.raises(Conflict, match="goes on from there"):
            Store(store).delete(step)
    assert files_of(store) == before
    for step in (8, 7, 6):
        assert Store(store).delete(step) > 0
    assert kinds(store) == "brrrr"
    assert Store(store).verify().ok
    assert len(packs_of(store)) == 5


def test_a_full_disk_ends_the_chain(small, caplog):  # noqa: F811
    store, state, frozen = small / "store", build(1, width=1000), {}
    failed = []
    with logged(store, state) as saver:
        for step in range(1, 11):
            if step == 4:
                filler = fill(small)
            if step == 7:
                filler.unlink()
            train(state)
            handle = saver.step(step)
            frozen[step] = snapshot(state)
            try:
                handle.wait("local")
            except Unavailable:
                failed.append(step)
        assert failed == [4, 5, 6]
        assert "No space left" in caplog.text
        assert saver.metrics.failures == 3
    assert kinds(store) == "brrbrrr"
    assert Store(store).verify().ok
    assert check_steps(store, build(2, width=1000), frozen) == [1, 2, 3, 7, 8, 9, 10]


@pytest.mark.slow
def test_a_full_disk_that_nobody_waits_for(small):  # noqa: F811
    """Records that follow one that failed fail as well: no gap in a chain, and all handles tell."""
    store, state, frozen, handles = small / "store", build(1, width=1000), {}, {}
    with logged(store, state) as saver:
        for step in itertools.count(1):
            if step == 10:
                filler = fill(small)
            if step == 25:
                filler.unlink()
            train(state)
            handles[step] = saver.step(step)
            frozen[step] = snapshot(state)
            if step > 38:  # what failed may be told late: then the next ones are saved
                with contextlib.suppress(EverstepError):
                    handles[step].wait("local")
                    break
            assert step < 80
    saved = {step for step, handle in handles.items() if handle.error is None}
    assert saved == {*Store(store).steps()}
    assert Store(store).verify().ok
    check_steps(store, build(2, width=1000), frozen)


@pytest.mark.parametrize("waits", [False, *slow(True)])
def test_the_keeper_dies_in_the_middle_of_a_chain(store, waits):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 21):
            if step in (5, 6, 13):
                keeper = saver._client.keeper_pid
                with contextlib.suppress(ProcessLookupError):  # the one of the step before, still
                    os.kill(keeper, signal.SIGKILL)
                if waits:
                    assert ended(keeper)
            train(state)
            handle = saver.step(step)
            frozen[step] = snapshot(state)
            if step % 4 == 0:
                until(handle.done, "the save comes to an end")
        until(handle.done, "the last save comes to an end")
    assert Store(store).latest() == 20
    assert Store(store).verify().ok
    check_steps(store, build(2), frozen)
