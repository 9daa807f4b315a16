"""How fast this run copies, and how long its forward and backward take: by host time on the CPU,
by events on CUDA.

    training stream   begins ─ forward, backward ─ mark │ wait for the copies │ update
    side stream       mark ─ copies ─ mark

A CUDA call returns when its work is enqueued, so that host time tells nothing of it. The marks
around a step are read when the device has passed them, in a later call of the thread that trains;
nobody waits.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

_NEW = 0.3
_GROWTH_MAX = 2.0
"""A step counts as that many usual ones at most."""
_SIZE_MIN = 1 << 20
_STEADY = 0.02
"""A mean that changed by a smaller part counts as unchanged: windows leave more room (FILL)."""


def mark(device: torch.device) -> torch.cuda.Event:
    """Recorded now, on the current stream of that device."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, slots=True)
class Span:
    """What is copied off a device between two marks, in bytes."""

    device: torch.device
    begin: torch.cuda.Event
    end: torch.cuda.Event
    size: int


class CopySpeed:
    """What was measured; 0 until then. Means that forget. For the thread that trains, but for
    `copied`, which is for the one that copies."""

    def __init__(
        self,
        mark: Callable[[torch.device], torch.cuda.Event] = mark,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_per_s = 0.0
        """From the device (or the CPU's own memory) to the arena, beside training."""
        self.overlap_s = 0.0
        """Of a step, in which copies may run: from checkpointer.step() to the next update."""
        self._told = 0.0, 0.0
        self._mark = mark
        self._clock = clock
        self._call: tuple[float, Mapping[torch.device, torch.cuda.Event]] | None = None
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Of a call and the update after it, on each device, until all have passed them."""

    def steady(self) -> tuple[float, float]:
        """Return both, as they were when this was asked before if they have hardly changed: what is
        planned by them comes out the same then, and the same tensors lie at the same places."""
        now = self.bytes_per_s, self.overlap_s
        if any(abs(new - old) > _STEADY * old for new, old in zip(now, self._told, strict=True)):
            self._told = now
        return self._told

    def called(self, begins: Mapping[torch.device, torch.cuda.Event]) -> None:
        """Copies may begin now: those off CUDA devices at these marks."""
        self._call = self._clock(), begins

    def updating(self) -> None:
        """An update comes next; before anything waits for copies."""
        if self._marks and all(each.query() for pair in self._marks for each in pair):
            # The shortest of several devices: any piece may lie there.
            self._note(min(map(_seconds, self._marks)))
            self._marks = []
        if self._call is None:
            return
        (began, begins), self._call = self._call, None
        if not begins:
            self._note(self._clock() - began)
        elif not self._marks:  # else the device is behind, and this step is left out
            self._marks = [(begin, self._mark(device)) for device, begin in begins.items()]

    def _note(self, overlap_s: float) -> None:
        """Of one step. One in which training paused (to evaluate, say) is no longer for that."""
        known = self.overlap_s
        self.overlap_s = _mean(known, min(overlap_s, _GROWTH_MAX * (known or overlap_s)))

    def copied(self, spans: Iterable[Span], size: int, seconds: float) -> None:
        """All of one capture, of `size` bytes, is there, after `seconds` of host time. `spans`: of
        the copies off CUDA devices; where there are some, the rest is little."""
        totals: dict[torch.device, tuple[int, float]] = {}
        for span in spans:
            span.end.synchronize()  # it comes right after what is there
            known_size, known_s = totals.get(span.device, (0, 0.0))
            took_s = _seconds((span.begin, span.end))
            totals[span.device] = known_size + span.size, known_s + took_s
        # Small ones tell nothing; of several devices the slowest: updates wait for the last copy.
        rows = [*totals.values()] if totals else [(size, seconds)]
        if large := [each / took for each, took in rows if each >= _SIZE_MIN and took > 0]:
            self.bytes_per_s = _mean(self.bytes_per_s, min(large))


def _seconds(marks: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
    """Between two that the device has passed."""
    begin, end = marks
    return float(begin.elapsed_time(end)) / 1e3


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - _NEW) * old + _NEW * new
