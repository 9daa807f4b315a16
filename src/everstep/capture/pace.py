"""How fast this run copies, how long its forward and backward take, and over how many steps a
checkpoint should therefore be spread."""

from dataclasses import dataclass
from typing import Any

_NEW = 0.3
_SIZE_MIN = 1 << 20
WINDOW_MAX = 64


@dataclass(slots=True)
class Pace:
    """Measured; 0 until then. Means that forget. Any thread."""

    bytes_per_s: float = 0.0
    """From the device (or the CPU's own memory) to the arena, beside training."""
    overlap_s: float = 0.0
    """Of a step, in which copies may run: from checkpointer.step() to the next update."""

    def note_copy(self, size: int, seconds: float) -> None:
        """A capture took that long. Small ones tell nothing."""
        if size >= _SIZE_MIN and seconds > 0:
            self.bytes_per_s = _mean(self.bytes_per_s, size / seconds)

    def note_overlap(self, seconds: float) -> None:
        """An update began that long after the call before it."""
        self.overlap_s = _mean(self.overlap_s, seconds)

    def describe(self) -> dict[str, Any]:
        """For `everstep show`."""
        return {"copy_bytes_per_s": round(self.bytes_per_s), "overlap_s": round(self.overlap_s, 6)}


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - _NEW) * old + _NEW * new


def stall(window: int, state_bytes: float, gradient_bytes: float, pace: Pace) -> float:
    """Seconds for which updates wait in all, if a state is copied over `window` steps.

    Each step copies an equal part of the state, and of the gradients those whose parameters are
    copied already: after i of N steps i/N of them. What does not fit beside forward and backward
    is waited for. With a window of one step this is the lazy full copy, (T − 1) steps for a copy
    that takes T of them; GoCkpt's model of its own stall, N(N−1)/14 for N = T, is the gradients'
    part of this sum for mixed precision (2 of 14 bytes of a parameter).
    """
    late = 0.0
    for index in range(window):
        size = (state_bytes + gradient_bytes * index) / window
        late += max(0.0, size / pace.bytes_per_s - pace.overlap_s)
    return late


def choose_window(state_bytes: int, gradient_bytes: int, pace: Pace, every: int) -> int:
    """The number of steps that makes updates wait least, the smallest of equals; at most `every`.
    1 (a full copy at once) while nothing is measured."""
    if not pace.bytes_per_s or not pace.overlap_s:
        return 1
    windows = range(1, max(1, min(every, WINDOW_MAX)) + 1)
    return min(windows, key=lambda n: (stall(n, state_bytes, gradient_bytes, pace), n))
