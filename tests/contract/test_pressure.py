"""What happens when memory is short, the keeper slow, or the disk gone at the wrong moment."""

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from keepers import PATIENCE_S, stopped, until
from logs import build, train
from runs import check_steps, checkpointer, kinds, logged, restore, snapshot
from torch import nn

import everstep
import forked
from everstep import Store, Unavailable
from everstep.capture import captures, copier
from everstep.capture.saves import Skipped
from everstep.keeper import client
from examples import slow


def test_a_growing_state_stays_within_two_arenas(store):
    """Each step outgrows the arena while nothing can be written: later saves are skipped."""
    history: list[torch.Tensor] = []
    saver = checkpointer(store, {"history": history}, when_full="skip")
    saver.save(0).wait()
    with stopped(saver._client.keeper_pid):
        for step in range(1, 13):
            history.append(torch.zeros(300_000))
            saver.save(step)
            assert len(saver._captures.pool._retired) <= 1
    assert saver.metrics.skips > 0
    assert saver.metrics.failures == 0
    saver.wait()
    history.append(torch.zeros(300_000))
    saver.save(20).wait()
    assert everstep.Store(store).latest() == 20
    saver.close()


@contextlib.contextmanager
def files_of_at_most(size):
    """Of this process, within."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_state_that_no_arena_may_hold_is_refused_at_once(store):
    model = nn.Linear(1000, 1000)
    limit = 2 * 4 * 1000 * 1001 - 1
    with files_of_at_most(limit), pytest.raises(Unavailable, match=rf"RLIMIT_FSIZE.* {limit + 1}"):
        everstep.Checkpointer(store, {"model": model})


def test_a_state_that_outgrows_the_largest_arena_fails_loudly(store, caplog):
    """Of a fresh optimizer nobody knows how large it will be."""
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    with checkpointer(store, {"model": model, "optimizer": optimizer}, strategy="full") as saver:
        with files_of_at_most(20 << 20):
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
            handle = saver.step(1)
        with pytest.raises(Unavailable, match=r"of 20971520 bytes at most \(RLIMIT_FSIZE"):
            handle.wait()
        assert saver.metrics.failures == 1
        assert "RLIMIT_FSIZE" in caplog.text
        saver.step(2).wait()


def test_copies_go_on_while_the_epoch_cannot_be_claimed(store, monkeypatch):
    """A keeper that does not answer holds up saves, and never the optimizer."""
    monkeypatch.setattr(copier, "_SEAL_S", 0.05)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = checkpointer(store, {"model": model, "optimizer": optimizer}, when_full="skip")
    with stopped(saver._client.keeper_pid):
        for step in range(1, 9):  # hangs where a copy waits for the claim
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            saver.step(step)
    saver.wait()
    saver.close()
    assert everstep.Store(store).steps()[0] == 1


@contextlib.contextmanager
def no_keeper(saver):
    """It is gone, and no other one starts, within."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        os.kill(saver._client.keeper_pid, signal.SIGKILL)
        until(lambda: saver._client._lost, "the client gives up for now")
        yield


def test_a_call_waits_for_the_next_keeper(store, monkeypatch):
    """What was on its way when the last one died is saved, too."""
    monkeypatch.setattr(client, "_PAUSE_S_MAX", 0.05)
    waiting = threading.Event()
    with checkpointer(store, state := {"weight": torch.zeros(1000)}, strategy="full") as saver:
        saver.save(1).wait()
        wait = saver._captures.pool._wait
        monkeypatch.setattr(
            saver._captures.pool, "_wait", lambda since: waiting.set() or wait(since)
        )
        os.kill(saver._client.keeper_pid, signal.SIGSTOP)
        handles = [saver.save(2)]
        handles[0].wait("captured")
        with no_keeper(saver):
            thread = threading.Thread(target=lambda: handles.append(saver.save(3)))
            thread.start()
            assert waiting.wait(60)
        thread.join()
        for handle in handles:
            handle.wait()
        assert saver.metrics.failures == 0
    assert everstep.Store(store).steps() == [1, 2, 3]
    assert restore(store, state) == 3


def test_a_call_does_not_wait_for_ever_for_a_keeper(store, monkeypatch):
    monkeypatch.setattr(client, "_PAUSE_S_MAX", 0.05)
    monkeypatch.setattr(client, "STALL_S", 0.5)
    with checkpointer(store, {"weight": torch.zeros(1000)}, strategy="full") as saver:
        saver.save(1).wait()
        os.kill(saver._client.keeper_pid, signal.SIGSTOP)
        handles = [saver.save(2)]
        with no_keeper(saver):
            handles += [saver.save(step) for step in (3, 4)]
            for handle in handles:
                with pytest.raises(Unavailable, match="starting the keeper"):
                    handle.wait()
            assert saver.metrics.failures == 3
        until(lambda: saver._client._lost is None, "there is another keeper")
        saver.save(5).wait()
        assert saver._client.patience.lasts(time.monotonic())
    assert 5 in everstep.Store(store).steps()


def test_keepers_that_die_one_after_the_other_lose_nothing(store, monkeypatch, caplog):
    """But time: after so many of them without a commit there is none for a while."""
    monkeypatch.setattr(client, "LOSSES_MAX", 1)
    monkeypatch.setattr(client, "_PAUSE_S_MAX", 0.05)
    with checkpointer(store, {"weight": torch.zeros(1000)}, strategy="full") as saver:
        for step in range(1, 8):
            keeper = saver._client.keeper_pid
            saver.save(step)
            os.kill(keeper, signal.SIGKILL)
            until(lambda keeper=keeper: saver._client.keeper_pid != keeper, "another one")
        saver.wait()
        assert saver.metrics.failures == 0
    assert "1 were lost before anything was saved" in caplog.text
    assert everstep.Store(store).steps() == list(range(1, 8))


def test_training_that_waits_for_the_disk_is_told_once(store, monkeypatch, caplog):
    monkeypatch.setattr(captures, "_SLOW_S", 0.01)
    with checkpointer(store, {"weight": torch.zeros(1000)}, strategy="full") as saver:
        saver.save(0).wait()
        for step in range(1, 40, 10):
            keeper = saver._client.keeper_pid
            os.kill(keeper, signal.SIGSTOP)
            threading.Timer(0.2, os.kill, [keeper, signal.SIGCONT]).start()
            for each in range(step, step + 4):
                saver.save(each)
            saver.wait()
    assert caplog.text.count("training has waited") == 1


def saves_a_torn_copy_and_dies(store):
    model = nn.Linear(2048, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = everstep.Checkpointer(store, {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        model.weight.fill_(1.0)
    saver.step(1).wait()
    (store / "data").rename(store / "data.away")
    (store / "data").write_text("in the way")
    with torch.no_grad():
        model.weight.fill_(2.0)
    handle = saver.step(2)
    with torch.no_grad():
        model.weight[2000:].fill_(3.0)  # behind the optimizer's back, during the copy
    try:
        handle.wait()
    except everstep.EverstepError as error:
        print(type(error).__name__, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_memory_never_offers_a_torn_copy_that_could_not_be_written(store):
    done = forked.run(saves_a_torn_copy_and_dies, store)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.strip() in ("Unsupported", "Unavailable")
    (store / "data").unlink()
    Path(store / "data.away").rename(store / "data")
    model = nn.Linear(2048, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with checkpointer(store, {"model": model, "optimizer": optimizer}) as saver:
        assert saver.restore() == 1
        assert model.weight.unique().tolist() == [1.0]


def is_preempted(store):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    saver = everstep.Checkpointer(store, state, when_full="skip")

    def step(number):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        return saver.step(number)

    step(1).wait()
    keeper = saver._client.keeper_pid
    os.kill(keeper, signal.SIGSTOP)
    for number in range(2, 8):
        last = step(number)
    assert last.error is not None, "all slots were to be busy"
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Timer(0.5, lambda: os.kill(keeper, signal.SIGCONT)).start()
    step(8)
    print("not reached")


def test_sigterm_waits_for_memory_where_saves_are_skipped(store):
    done = forked.run(is_preempted, store)
    assert done.returncode == -signal.SIGTERM
    assert everstep.Store(store).latest() == 8


def test_a_captured_copy_that_is_torn_raises_where_it_is_waited_for(store):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = checkpointer(store, {"model": model, "optimizer": optimizer})
    saver.save(1).wait()
    with stopped(saver._client.keeper_pid):  # so that nobody looks before we do
        handle = saver.save(2)
        with torch.no_grad():
            model.weight.mul_(2.0)
        with pytest.raises(everstep.Unsupported, match=r"model\.weight"):
            handle.wait("captured")
    with pytest.raises(everstep.Unsupported):
        saver.close()
    assert everstep.Store(store).steps() == [1]


# ---- logs and windows, where nothing waits for ever ----------------------------------------------


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
