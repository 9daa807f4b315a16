"""What is measured while training goes on: what comes to a tier and how fast, the cores that are
free, and memory."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_SPEED_BYTES_MIN = 8 << 20
_FLUSH_S = 0.005
"""A sync of nothing: it is no matter of bytes."""
_WINDOW_S = 0.25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(slots=True)
class Traffic:
    """What came to a tier so far. `newest`: the step that it has; `problem`: why nothing comes."""

    level: str
    """Of what is there."""
    place: str
    copied: int = 0
    given_up: int = 0
    bytes: int = 0
    seconds: float = 0.0
    newest: int | None = None
    newest_at: float | None = None
    """time.time() at which that was told."""
    problem: str | None = None
    bytes_per_s: float | None = None
    """What it was seen to take; None until then."""
    noted: float = field(default_factory=time.monotonic)
    """When that was noted last."""

    def wrote(self, size: int, seconds: float) -> None:
        """One write, with its sync; the speed is a mean that forgets."""
        self.bytes += size
        self.seconds += seconds
        if size >= _SPEED_BYTES_MIN and seconds > 0:
            seen = size / max(seconds - _FLUSH_S, seconds / 2)
            self.noted = time.monotonic()
            self.bytes_per_s = 0.7 * (self.bytes_per_s or seen) + 0.3 * seen

    def reached(self, step: int) -> None:
        """It has this step."""
        self.copied += 1
        if step >= (self.newest or 0):
            self.newest, self.newest_at = step, time.time()

    def status(self, waiting: int) -> dict[str, Any]:
        """For who looks on."""
        said = {**asdict(self), "waiting": waiting}
        del said["noted"]
        return said


class FreeCores:
    """The cores that nobody has used since the last look, of those that this process may use, with
    what it has used itself for what can be left out. For one thread."""

    def __init__(
        self,
        idle_s: Callable[[], float | None] = lambda: idle_seconds(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_s`: seconds for which cores were idle so far, summed up."""
        self._idle_s, self._clock = idle_s, clock
        self._at, self._seen = clock(), idle_s()
        self._own_s = 0.0
        self._cores = 0.0

    def look(self, own_s: float) -> float:
        """The mean since the last look, or of the last one where that was just now. `own_s`: what
        this process has used so far for what it need not do."""
        now = self._clock()
        elapsed = now - self._at
        if elapsed >= _WINDOW_S:
            seen = self._idle_s()
            if seen is not None and self._seen is not None:
                free = (seen - self._seen + own_s - self._own_s) / elapsed
                self._cores = max(0.0, min(free, core_count()))
            self._at, self._seen, self._own_s = now, seen, own_s
        return self._cores


def core_count() -> float:
    """The cores that this process may use at a time: by its affinity, and its container's quota."""
    return min(float(len(os.sched_getaffinity(0))), _quota() or float("inf"))


def idle_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """For how long cores that this process may use had nothing to do; where a container has a
    quota, how much of that it did not use. None where that cannot be known."""
    try:
        if quota := _quota():
            words = dict(line.split() for line in (_CGROUP / "cpu.stat").read_text().splitlines())
            return quota * time.monotonic() - int(words["usage_usec"]) / 1e6
        own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [line.split() for line in stat.read_text().splitlines()]
        ticks = sum(int(row[4]) + int(row[5]) for row in rows if row and row[0] in own)
    except (OSError, ValueError, LookupError):
        return None
    return ticks / _TICKS_PER_S


def available_memory() -> int:
    """Bytes that can be had without swapping, within the limit of this process's control group."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            top = Path(_CGROUP, limit).read_text().strip()
            used = int(Path(_CGROUP, usage).read_text())
        except (OSError, ValueError):
            continue
        if top.isdigit():
            available = min(available, max(0, int(top) - used))
    return available


def _quota() -> float | None:
    """Cores that a container may use at a time; None where it has no limit."""
    try:
        allowed, period = (_CGROUP / "cpu.max").read_text().split()
        return None if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError):
        return None
