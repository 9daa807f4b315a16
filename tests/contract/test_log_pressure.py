"""A keeper that stands still: nothing waits for it for ever. With when_full="skip" what goes
on from the step before waits all the same, since a whole state is larger, and so does a log's next
base; other whole states are skipped at once."""

import contextlib
import os
import signal
import threading

import pytest
from keepers import PATIENCE_S, stopped, until
from logs import build, train
from runs import check_steps, checkpointer, kinds, logged, snapshot

from everstep import Store, Unavailable
from everstep.capture import copier
from everstep.capture.saves import Skipped
from everstep.keeper import client
from examples import slow


def is_full(saver):
    """No slot is free, which only the keeper can change."""
    pool = saver._captures.pool
    return pool._current[1].free_slot() is None


def is_waiting(saver):
    """Whether a call is under way that finds no slot free."""
    return is_full(saver) and saver._saves.newest.call < saver._saves.calls


@contextlib.contextmanager
def stopped_until_somebody_waits(saver):
    """The keeper stands still until the training thread, which runs the block, waits for it."""
    seen = []

    def release(keeper):
        try:
            seen.append(until(lambda: is_waiting(saver), "somebody waits for memory"))
        finally:
            os.kill(keeper, signal.SIGCONT)

    with stopped(saver._client.keeper_pid) as keeper:
        thread = threading.Thread(target=release, args=(keeper,))
        thread.start()
        yield
        thread.join()
    assert seen == [True]


def advance(saver, state, steps, frozen):
    handles = {}
    for step in steps:
        train(state)
        handles[step] = saver.step(step)
        frozen[step] = snapshot(state)
    return handles


@pytest.mark.parametrize("base", [12, 18, *slow(10, 11, 13)])
def test_records_and_a_base_that_is_due_wait(store, base):
    """18: there is none. Whichever step it is that finds no memory: where the base is skipped, the
    next step is one, too, and is skipped again."""
    state, frozen = build(1), {}
    with logged(store, state, when_full="skip", base_every=base - 1, window=1) as saver:
        advance(saver, state, range(1, 9), frozen)
        saver.wait()
        with stopped_until_somebody_waits(saver):
            advance(saver, state, range(9, 18), frozen)
        saver.wait()
        assert saver.metrics.skips == 0
    assert kinds(store) == ("b" + "r" * (base - 2) + "b" + "r" * (17 - base))[:17]
    check_steps(store, build(2), frozen)


@pytest.mark.parametrize("pressure", ["wait", "skip"])
def test_they_do_not_wait_for_ever(store, monkeypatch, caplog, pressure):
    """Training is held up once. Then the chain ends, and nothing waits before a step is saved."""
    state, frozen = build(1), {}
    with logged(store, state, when_full=pressure) as saver:
        handles = advance(saver, state, range(1, 5), frozen)
        saver.wait()
        with monkeypatch.context() as patch, stopped(saver._client.keeper_pid):
            patch.setattr(client, "STALL_S", 1.0)
            handles |= advance(saver, state, range(5, 12), frozen)
        for handle in handles.values():
            until(handle.done, "it is saved or not")
        handles |= advance(saver, state, range(12, 15), frozen)
        saver.wait()
        lost = [step for step, handle in handles.items() if handle.error]
        assert lost == list(range(lost[0], 12))
        waited = [step for step in lost if "after 1 s of waiting" in str(handles[step].error)]
        assert waited == lost[:1]
        is_skip = [isinstance(handles[step].error, Skipped) for step in lost]
        assert is_skip == [False] + [pressure == "skip"] * (len(lost) - 1)
        assert saver.metrics.skips == sum(is_skip)
        assert saver.metrics.failures == len(lost) - sum(is_skip)
    assert f"step {lost[0]} was not saved" in caplog.text
    assert Store(store).steps() == [*range(1, lost[0]), 12, 13, 14]
    assert Store(store).manifest(12).previous is None  # a base, at once
    assert kinds(store)[-2:] == "rr"
    check_steps(store, build(2), frozen)


def test_a_tag_does_not_wait_for_ever(store, monkeypatch):
    """For the step to be durable, which was saved already."""
    monkeypatch.setattr(client, "STALL_S", 0.5)
    state = build(1)
    with logged(store, state, when_full="wait") as saver:
        advance(saver, state, range(1, 4), {})
        saver.wait()
        with stopped(saver._client.keeper_pid):
            handle = advance(saver, state, [4], {})[4]
            with pytest.raises(Unavailable, match="step 4 to be durable: nothing is being saved"):
                saver.save(4, tag="best")
        handle.wait()
        saver.save(4, tag="best")
    assert Store(store).manifest("best").step == 4


def test_shares_of_a_window_wait(store):
    """But for the first, before which nothing was done in vain."""
    state, frozen = build(1), {}
    options = {"strategy": "spread", "every": 8, "window": 7, "when_full": "skip"}
    with checkpointer(store, state, **options) as saver:
        advance(saver, state, range(1, 11), frozen)  # 8 is whole; 10 is the first share of 16
        saver.wait()
        with stopped_until_somebody_waits(saver):
            advance(saver, state, range(11, 17), frozen)
        saver.wait()
        assert saver.metrics.skips == 0
    assert Store(store).manifest(16).is_spread
    assert check_steps(store, build(2), frozen) == [8, 16]


@pytest.mark.parametrize("options", [{"strategy": "full"}, {"base_every": 1}])
def test_whole_states_do_not_wait(store, options):
    state, frozen = build(1), {}
    with logged(store, state, when_full="skip", **options) as saver:
        advance(saver, state, range(1, 3), frozen)
        saver.wait()
        with stopped(saver._client.keeper_pid):
            handles = advance(saver, state, range(3, 10), frozen)
            assert is_full(saver)
        assert saver.metrics.skips > 0
        errors = [str(handle.error) for handle in handles.values() if handle.error]
        assert all("skipped, because" in error for error in errors)
    check_steps(store, build(2), frozen)


def test_no_record_is_announced_before_one_that_waits(store, monkeypatch):
    """The epoch is claimed so late that two steps are copied already, which are sealed one after
    the other then: the next could be announced at once."""
    monkeypatch.setattr(copier, "_SEAL_S", 0.01)
    state = build(1)
    claimed, announced = threading.Event(), threading.Event()
    with logged(store, state) as saver:
        begun = saver._captures
        client, announce = begun._client, begun._copier._announce
        claim, submit = client.claim, client.submit
        submitted = []

        def claim_late(parent):
            assert claimed.wait(PATIENCE_S)
            return claim(parent)

        def announce_and_tell(capture):
            found = announce(capture)
            if capture.step == 3:
                announced.set()
            return found

        def submit_in_turn(*told):
            submitted.append(told)
            if len(submitted) == 1:  # the first step; the second is sealed after the third came
                assert announced.wait(PATIENCE_S)
            submit(*told)

        monkeypatch.setattr(client, "claim", claim_late)
        monkeypatch.setattr(client, "submit", submit_in_turn)
        monkeypatch.setattr(begun._copier, "_announce", announce_and_tell)
        handles = []
        for step in range(1, 4):
            train(state)
            if step == 3:
                claimed.set()
                until(lambda: begun.epoch is not None, "no epoch is claimed")
            handles.append(saver.step(step))
        for handle in handles:
            handle.wait("local")
    assert kinds(store) == "brr"
