"""How fast this run copies, and how long its forward and backward take: by host time on the CPU,
by events on CUDA.

    training stream   begins ─ forward, backward ─ mark │ wait for the copies │ update
    side stream       mark ─ copies ─ mark

A CUDA call returns when its work is enqueued, so that host time tells nothing of it. The marks are
read when the device has passed them, in a later call of the thread that trains; nobody waits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

_NEW = 0.3
_SIZE_MIN = 1 << 20
_UNREAD_MAX = 64
_STEADY = 0.02
"""A mean that changed by a smaller part counts as unchanged: windows leave more room (FILL)."""


def mark(device: torch.device) -> torch.cuda.Event:
    """Recorded now, on the current stream of that device."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, slots=True)
class Span:
    """What a device does between two marks; `size`: bytes that are copied meanwhile."""

    device: torch.device
    begin: torch.cuda.Event
    end: torch.cuda.Event
    size: int = 0

    @property
    def is_over(self) -> bool:
        """Whether its length can be read. Does not block."""
        return bool(self.begin.query() and self.end.query())

    @property
    def seconds(self) -> float:
        """Its length, once it is over."""
        return float(self.begin.elapsed_time(self.end)) / 1e3


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
        # Bounded: without updates nobody reads.
        self._unread: deque[tuple[Callable[[list[Span]], None], list[Span]]]
        self._unread = deque(maxlen=_UNREAD_MAX)

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
        self._read()
        if self._call is None:
            return
        (began, begins), self._call = self._call, None
        if begins:
            spans = [Span(device, begin, self._mark(device)) for device, begin in begins.items()]
            self._unread.append((self._read_overlap, spans))
        else:
            self.overlap_s = _mean(self.overlap_s, self._clock() - began)

    def copied(self, spans: Iterable[Span], size: int, seconds: float) -> None:
        """All of one capture, of `size` bytes, is there, after `seconds` of host time. `spans`: of
        the copies off CUDA devices; where there are some, the rest is little."""
        if chosen := list(spans):
            self._unread.append((self._read_copy, chosen))
        else:
            self._note_copy(size, seconds)

    def _note_copy(self, size: int, seconds: float) -> None:
        if size >= _SIZE_MIN and seconds > 0:  # small ones tell nothing
            self.bytes_per_s = _mean(self.bytes_per_s, size / seconds)

    def _read(self) -> None:
        """Note what the devices have finished."""
        while self._unread:
            read, spans = self._unread.popleft()
            if not all(span.is_over for span in spans):
                self._unread.appendleft((read, spans))
                return
            read(spans)

    def _read_overlap(self, spans: list[Span]) -> None:
        """Note the shortest step of several devices: any piece may lie there."""
        self.overlap_s = _mean(self.overlap_s, min(span.seconds for span in spans))

    def _read_copy(self, spans: list[Span]) -> None:
        """Note the slowest of several devices: updates wait for the last copy."""
        totals: dict[torch.device, tuple[int, float]] = {}
        for span in spans:
            size, seconds = totals.get(span.device, (0, 0.0))
            totals[span.device] = size + span.size, seconds + span.seconds
        large = [row for row in totals.values() if row[0] >= _SIZE_MIN and row[1] > 0]
        if large:
            self._note_copy(*min(large, key=lambda row: row[0] / row[1]))


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - _NEW) * old + _NEW * new
