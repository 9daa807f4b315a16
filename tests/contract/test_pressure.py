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
from keepers import stopped, until
from runs import checkpointer, restore
from torch import nn

import everstep
import forked
from everstep import Unavailable
from everstep.capture import captures, copier
from everstep.keeper import client


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
    monkeypatch.setattr(client, "_LOSSES_MAX", 1)
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
