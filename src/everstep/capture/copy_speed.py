"""How fast this run copies, how long its forward and backward take, and over which steps the pieces
of a checkpoint should therefore be spread."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_NEW = 0.3
_OUTLIER = 2.0
SIZE_MIN = 1 << 20
WINDOW_MAX = 64
FILL = 0.95
"""Of what fits beside forward and backward, the part that is planned for: both vary."""
RECORDS_MAX = 1.0
"""Of the state's bytes, those of the gradients that a window may record."""
GAIN_MIN = 0.1
"""Of a step's forward and backward: by so much a window must be better than a full copy."""
CALLS = 2.0
"""What a step of a window takes from training even where all is copied in time, in calls: the call
itself, and about as much around the update."""


@dataclass(slots=True)
class CopySpeed:
    """Measured; 0 until then. Means that forget. Any thread."""

    bytes_per_s: float = 0.0
    """From the device (or the CPU's own memory) to the arena, beside training."""
    overlap_s: float = 0.0
    """Of a step, in which copies may run: from checkpointer.step() to the next update."""
    call_s: float = 0.0
    """Of the thread that trains, for a call that captures something, without its waits."""
    _waited_s: float = 0.0

    def note_copy(self, size: int, seconds: float) -> None:
        """A capture took that long. Small ones tell nothing."""
        if size >= SIZE_MIN and seconds > 0:
            self.bytes_per_s = _mean(self.bytes_per_s, size / seconds)

    def note_overlap(self, seconds: float) -> None:
        """An update began that long after the call before it."""
        self.overlap_s = _mean(self.overlap_s, seconds)

    def note_wait(self, seconds: float) -> None:
        """So much of the call under way was waiting for the copies before."""
        self._waited_s = seconds

    def note_call(self, seconds: float) -> None:
        """A call took that long. The first one, which makes plans, and those that were interrupted
        tell little: the mean falls at once, and rises slowly."""
        seconds, self._waited_s = seconds - self._waited_s, 0.0
        if not self.call_s or seconds * _OUTLIER < self.call_s:
            self.call_s = seconds
        else:
            self.call_s = _mean(self.call_s, min(seconds, _OUTLIER * self.call_s))

    def describe(self) -> dict[str, Any]:
        """For `everstep show`."""
        return {
            "copy_bytes_per_s": round(self.bytes_per_s),
            "overlap_s": round(self.overlap_s, 6),
            "call_s": round(self.call_s, 6),
        }

    def has_moved(self, other: "CopySpeed") -> bool:
        """Whether what was chosen by the other one should be chosen anew."""
        return (
            _differ(self.bytes_per_s, other.bytes_per_s, 0.05)
            or _differ(self.overlap_s, other.overlap_s, 0.05)
            or _differ(self.call_s, other.call_s, 0.5)
        )


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - _NEW) * old + _NEW * new


def _differ(one: float, two: float, part: float) -> bool:
    return abs(one - two) > part * max(one, two)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is copied together, and the gradient that brings it one step further. In bytes."""

    name: str
    size: int
    gradient: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which pieces are copied at each step of a window but the last, which takes what is left."""

    groups: tuple[tuple[str, ...], ...] = ()
    stall_s: float = 0.0
    """For which updates and calls are expected to wait for copies, in all."""
    cost_s: float = 0.0
    """The same, with what the window's steps take where nothing waits."""

    @property
    def steps(self) -> int:
        """Of the window; 1: it is the full copy at once."""
        return len(self.groups) + 1


def schedule(pieces: Sequence[Piece], rest: int, pace: CopySpeed, every: int) -> Schedule:
    """The window that costs training least, of at most `every` steps. `rest`: bytes that are copied
    at the last step in any case.

    A step copies what fits beside its forward and backward: the gradients of what is copied
    already, and more pieces, the largest first. What is left at the due step is waited for there.
    The last gradients are copied after that update, and no update waits for them. With a window of
    one step this is the lazy full copy, (T − 1) steps for a copy that takes T of them. GoCkpt
    copies equal shares over N = T steps and waits for all gradients, N(N−1)/14 steps where they are
    2 of a parameter's 14 bytes.
    """
    if not pace.bytes_per_s or not pace.overlap_s:
        return Schedule()
    ordered = sorted(pieces, key=lambda piece: (-piece.size, piece.name))
    full = _fill(ordered, rest, pace, 1, False)
    found = [_fill(ordered, rest, pace, every, overfull) for overfull in (False, True)]
    best = min(found, key=lambda one: (one.cost_s, one.steps))
    return best if best.cost_s + GAIN_MIN * pace.overlap_s < full.cost_s else full


def _fill(
    left: Sequence[Piece], rest: int, pace: CopySpeed, every: int, overfull: bool
) -> Schedule:
    """The best of the windows that are begun in this way. `overfull`: a step takes one piece more
    than fits, which is waited for; pieces may be larger than what fits."""
    remaining = rest + sum(piece.size for piece in left)
    state, room = remaining, FILL * pace.bytes_per_s * pace.overlap_s
    groups: list[tuple[str, ...]] = []
    late, gradients, recorded = 0.0, 0, 0

    def late_with(size: float) -> float:
        return max(0.0, size / pace.bytes_per_s - pace.overlap_s)

    best = Schedule((), late_with(remaining), late_with(remaining))
    for _ in range(min(every, WINDOW_MAX) - 1):
        if remaining <= room or recorded + gradients > RECORDS_MAX * state:
            break
        chosen, left = _take(left, room - gradients, overfull)
        size = sum(piece.size for piece in chosen)
        late += late_with(size + gradients)
        recorded += gradients
        gradients += sum(piece.gradient for piece in chosen)
        remaining -= size
        groups.append(tuple(piece.name for piece in chosen))
        stall = late + late_with(remaining)
        cost = stall + len(groups) * CALLS * pace.call_s
        if cost < best.cost_s:
            best = Schedule(tuple(groups), stall, cost)
    return best


def _take(left: Sequence[Piece], room: float, overfull: bool) -> tuple[list[Piece], list[Piece]]:
    """Those that fit, the largest first, and the others."""
    chosen: list[Piece] = []
    others: list[Piece] = []
    for index, piece in enumerate(left):
        if room < left[-1].size:
            others += left[index:]
            break
        if piece.size <= room:
            chosen.append(piece)
            room -= piece.size
        else:
            others.append(piece)
    if overfull and others and room > 0:
        chosen.append(others.pop())
    return chosen, others


def stall(window: int, state_bytes: float, pace: CopySpeed) -> float:
    """Seconds for which updates wait in all, if equal parts of a state are copied over `window`
    steps, beside records that are there anyway. Of one step: (T − 1) steps for a copy that takes T
    of them."""
    return window * max(0.0, state_bytes / window / pace.bytes_per_s - pace.overlap_s)


def choose_window(state_bytes: int, pace: CopySpeed, every: int) -> int:
    """The number of steps that makes updates wait least, the smallest of equals; at most `every`.
    1 (a full copy at once) while nothing is measured."""
    if not pace.bytes_per_s or not pace.overlap_s:
        return 1
    windows = range(1, max(1, min(every, WINDOW_MAX)) + 1)
    return min(windows, key=lambda n: (stall(n, state_bytes, pace), n))
