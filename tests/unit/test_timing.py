"""Lengths that a device tells later: marks on a simulated one, which passes them when told to."""

import pytest
import torch

from everstep.capture.copy_speed import CopySpeed, Span

ONE, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
MB = 1 << 20


class Device:
    """Its time in seconds; the host is ahead of it."""

    def __init__(self):
        self.now = 0.0

    def mark(self, after):
        return Mark(self, self.now + after)


class Mark:
    """What an event has to have: not read before it is passed."""

    def __init__(self, device, at):
        self.device, self.at = device, at

    def query(self):
        return self.device.now >= self.at

    def synchronize(self):
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end):
        assert self.query()
        assert end.query()
        return (end.at - self.at) * 1e3


class Run:
    """Steps as the copier tells of them."""

    def __init__(self):
        self.device, self.host = Device(), 0.0
        self.after: dict[torch.device, float] = {}
        self.pace = CopySpeed(
            lambda device: self.device.mark(self.after[device]), lambda: self.host
        )

    def step(self, **after):
        """`after`: how long each device is from the call to the update."""
        self.after = {ONE: after["one"], OTHER: after.get("other", 0.0)}
        devices = [ONE, OTHER] if "other" in after else [ONE]
        self.pace.called({device: self.device.mark(0.0) for device in devices})
        self.host += 1e-4  # all is enqueued by then
        self.pace.updating()

    def copy(self, *rows):
        """Rows of device, bytes, seconds."""
        spans = [
            Span(device, self.device.mark(0.0), self.device.mark(seconds), size)
            for device, size, seconds in rows
        ]
        self.pace.copied(spans, sum(span.size for span in spans), 1e-5)


def test_nothing_is_told_before_the_device_has_passed_it():
    run = Run()
    run.step(one=2.0)
    run.device.now = 1.5
    run.pace.updating()
    assert run.pace.overlap_s == 0.0
    run.device.now = 2.0
    run.pace.updating()
    assert run.pace.overlap_s == pytest.approx(2.0)


def test_what_is_copied_is_told_when_it_is_there():
    run = Run()
    run.copy((ONE, 4 * MB, 1.0))
    assert run.pace.bytes_per_s == 4 * MB


def test_of_several_devices_the_shortest_step_and_the_slowest_copy_count():
    run = Run()
    run.step(one=3.0, other=2.0)
    # Two owners on one of them, and little on the other, whose speed tells nothing.
    run.copy((ONE, 2 * MB, 1.0), (OTHER, 6 * MB, 1.5), (ONE, 4 * MB, 1.0))
    run.device.now = 5.0
    run.pace.updating()
    assert run.pace.overlap_s == pytest.approx(2.0)
    assert run.pace.bytes_per_s == pytest.approx(3 * MB)
    again = Run()
    again.copy((ONE, 8 * MB, 1.0), (OTHER, 100, 1.0))
    assert again.pace.bytes_per_s == pytest.approx(8 * MB)


def test_only_the_first_update_after_a_call_ends_its_step():
    run = Run()
    run.step(one=1.0)
    run.device.now = 10.0
    run.pace.updating()
    run.pace.updating()
    assert run.pace.overlap_s == pytest.approx(1.0)


def test_without_devices_it_is_host_time():
    run = Run()
    run.pace.called({})
    run.host = 0.25
    run.pace.updating()
    run.pace.copied([], 8 * MB, 2.0)
    assert (run.pace.overlap_s, run.pace.bytes_per_s) == (0.25, 4 * MB)


def test_a_pause_is_no_step():
    run = Run()
    for ends in (1.0, 101.0):
        run.pace.called({})
        run.host = ends
        run.pace.updating()
    assert run.pace.overlap_s == pytest.approx(1.3)


def test_of_a_device_that_is_behind_one_step_is_measured_after_the_other():
    run = Run()
    for _ in range(3):
        run.step(one=1.0)
    run.device.now = 1.0
    run.step(one=3.0)
    assert run.pace.overlap_s == pytest.approx(1.0)
    run.device.now = 4.0
    run.pace.updating()
    assert run.pace.overlap_s > 1.0


def test_what_windows_are_planned_by_stays_where_it_has_hardly_changed():
    run = Run()
    assert run.pace.steady() == (0.0, 0.0)
    run.pace.bytes_per_s, run.pace.overlap_s = 1e9, 0.1
    assert run.pace.steady() == (1e9, 0.1)
    for bytes_per_s, overlap_s in ((1.015e9, 0.1), (0.985e9, 0.1015), (1e9, 0.0985)):
        run.pace.bytes_per_s, run.pace.overlap_s = bytes_per_s, overlap_s
        assert run.pace.steady() == (1e9, 0.1)
    run.pace.overlap_s = 0.105
    assert run.pace.steady() == (1e9, 0.105)  # and it does not creep away
