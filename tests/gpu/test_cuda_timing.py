"""The pace that is measured by events on the device, and that nothing waits for it."""

import contextlib
import time
import warnings

import pytest
import torch
from test_cuda import build, state_bytes, train

import everstep
from choices import chosen
from everstep.capture.copies import Devices
from everstep.keeper.arena import Arena


@contextlib.contextmanager
def no_waiting():
    """Within, what torch knows to wait for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str
)
@pytest.mark.parametrize("strategy", ["full", "log", "spread", "auto"])
def test_neither_call_nor_update_waits_for_the_device(store, strategy, options):
    state = build(0, **options)
    settings = {"every": 4, "window": 3} if strategy == "spread" else {}
    with everstep.Checkpointer(
        store, state, **chosen(strategy=strategy, **settings)
    ) as checkpointer:
        for step in range(1, 9):  # arenas are pinned by then
            train(state)
            checkpointer.step(step)
        checkpointer.wait()
        for step in range(9, 17):
            with no_waiting():
                train(state)
                checkpointer.step(step)
        expected = state_bytes(state)
    other = build(1, **options)
    with everstep.Checkpointer(store, other) as checkpointer:
        assert checkpointer.restore() == 16
        assert state_bytes(other) == expected


def test_window_and_bandwidth_are_those_of_the_device(store):
    """The host is done with a step at once, the device after a while: that is what counts."""
    cycles = _cycles_of(0.2)
    state = build(0, width=2048, layers=4)
    with everstep.Checkpointer(
        store, state, strategy=everstep.Spread(window=1), every=2
    ) as checkpointer:
        pace = checkpointer._captures._copier._pace
        for step in range(1, 9):
            data = torch.randn(64, 2048, device="cuda")
            state["model"](data).square().mean().backward()
            torch.cuda._sleep(cycles)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            checkpointer.step(step)
        checkpointer.wait()
        torch.cuda.synchronize()
        train(state)  # reads what is over by now
        assert 0.1 < pace.overlap_s < 0.6
        known = _bandwidth()
        assert known / 3 < pace.bytes_per_s < known * 3


def _cycles_of(seconds):
    """For torch.cuda._sleep; clocks differ."""
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    return int(100_000_000 * seconds / (time.perf_counter() - began))


def _bandwidth():
    """Of a copy into a pinned arena, by host time."""
    size = 256 << 20
    arena, devices = Arena.create(1, 1 << 16, size), Devices()
    devices.pin(arena, torch.device("cuda", torch.cuda.current_device()))
    target = torch.frombuffer(arena.image(0), dtype=torch.uint8)
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    devices.unpin(arena)
    return size / min(times)
