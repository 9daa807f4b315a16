"""SIGTERM: the newest completed step is durable, and the process ends as it was told to."""

import contextlib
import os
import signal
import sys
import threading

import pytest
import torch
from runs import check_restored, check_same, checkpointer, freeze, restore, supervised  # fmt: skip
from torch import nn

import forked
from everstep import Store
from examples import slow


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 500), nn.BatchNorm1d(500), nn.Linear(500, 6))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def trains(store, every, mode):
    if mode == "handler":

        def handler(number, frame):
            os.write(1, b"handler\n")  # print() may be what was interrupted
            raise SystemExit(5)

        signal.signal(signal.SIGTERM, handler)
    if mode == "ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state = build(1)
    with checkpointer(store, state, every=every) as saver:
        step = saver.restore()
        limit = 13 if mode in ("end", "ignored") else 10**9
        while step < limit:
            supervised(state)
            step += 1
            saver.step(step)
            print(step, flush=True)
            if step == 13 and mode != "fast":
                if mode == "end":
                    print("last", flush=True)
                sys.stdin.readline()
    print("closed", flush=True)


def terminate(store, every, mode, at=13):
    """Run the trainer, send SIGTERM once it has completed step `at`; (status, completed, lines)."""
    process = forked.Forked(trains, store, every, mode)
    lines = []
    while not lines or lines[-1] != ("last" if mode == "end" else str(at)):
        line = process.stdout.readline()
        assert line, f"the trainer has ended after {lines}"
        lines.append(line.strip())
    process.send_signal(signal.SIGTERM)
    if mode == "waiting" and every == 1:  # what is due is saved: it ends without another step
        process.wait()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("go on\n")
        process.stdin.close()
    lines += process.stdout.read().split()
    process.wait()
    process.close()
    completed = max(int(line) for line in lines if line.isdigit())
    return process.returncode, completed, lines


def reference(step):
    state = build(1)
    for _ in range(step):
        supervised(state)
    return freeze(state)


@pytest.mark.parametrize(
    ("every", "mode"), [(10, "waiting"), (1, "fast"), *slow((1, "waiting"), (10, "fast"))]
)
def test_the_newest_completed_step_is_durable(store, every, mode):
    status, completed, _ = terminate(store, every, mode)
    assert status == -signal.SIGTERM
    fresh = build(2)
    latest = restore(store, fresh)
    # However many steps it did before the signal reached it: it ends at once where the newest is
    # saved, else in the call for the next one, before its print.
    assert completed <= latest <= completed + 1
    if mode == "waiting":
        assert latest == (13 if every == 1 else 14)
    check_same(freeze(fresh), reference(latest))
    assert Store(store).verify().ok


def test_a_users_handler_decides(store):
    status, _, lines = terminate(store, 1, "handler")
    assert status == 5
    assert "handler" in lines
    assert "closed" not in lines
    assert Store(store).latest() == 13


def test_a_signal_after_the_last_step_ends_the_process_when_all_is_closed(store):
    status, _, _ = terminate(store, 10, "end")
    assert status == -signal.SIGTERM
    assert Store(store).latest() == 10


def test_a_signal_that_is_ignored_on_purpose_stays_so(store):
    status, _, lines = terminate(store, 1, "ignored")
    assert status == 0
    assert lines[-1] == "closed"


def test_the_handler_goes_with_the_checkpointer(store):
    previous = signal.getsignal(signal.SIGTERM)
    with checkpointer(store, {"x": 1}):
        assert signal.getsignal(signal.SIGTERM) != previous
    assert signal.getsignal(signal.SIGTERM) == previous


def ends(store, strategy, how):
    """12 steps, during the last of which the disk stands still."""
    state = build(1)
    saver = checkpointer(store, state, strategy=strategy)
    for step in range(1, 13):
        supervised(state)
        if step == 10:
            keeper = saver._client.keeper_pid
            os.kill(keeper, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (keeper, signal.SIGCONT)).start()
        saver.step(step)
    if how == "error":
        with saver:
            raise ArithmeticError("of the program")
    elif how == "close":
        saver.close()
    elif how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()


@pytest.mark.parametrize("strategy", ["log", *slow("auto", "full", "spread")])
@pytest.mark.parametrize("how", ["close", "exit", *slow("error", "sigterm")])
def test_the_last_step_is_durable_however_it_ends(store, strategy, how):
    wanted = {"error": 1, "sigterm": -signal.SIGTERM}.get(how, 0)
    assert forked.run(ends, store, strategy, how).returncode == wanted
    assert Store(store).latest() == 12
    check_restored(store, build(2), reference(12))
