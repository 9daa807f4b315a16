"""How many steps of a log lie between one base and the next.

Chosen so that a recovery, which reads the base, and for each record reads it and repeats one
update, stays within what the user gives it; and so that a log of which retention can delete nothing
does not outgrow a few whole states. Or fixed by the user.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from everstep.capture.copy_speed import Pace
from everstep.handle import SaveHandle

EVERY_MIN, EVERY_MAX = 10, 1000
READ_BYTES_PER_S = 1e9
"""Until a restore has measured it."""
KEPT_STATES = 8
"""Where checkpoints are deleted: records between two bases that cannot be, in bytes of a state."""
_UNSTORED_MAX = 8


@dataclass(slots=True)
class Distance:
    """The figures behind the choice. For the thread that trains."""

    pace: Pace
    base_every: int | None
    """Steps, fixed by the user; None: chosen."""
    recovery_s: float
    """What a recovery may take."""
    has_retention: bool
    """Old checkpoints are deleted, but for those that later ones go on from."""
    base_bytes: int = 0
    update_seconds: float = 0.0
    """Of the last update, on the host."""
    _in_memory_bytes: int = 0
    _records: deque[SaveHandle] = field(default_factory=lambda: deque(maxlen=_UNSTORED_MAX))

    def note_record(self, handle: SaveHandle, size: int) -> None:
        """One that has nothing else in it. `size`: bytes in memory."""
        self._in_memory_bytes = size
        self._records.append(handle)

    @property
    def record_bytes(self) -> int:
        """Of a record on the disk, as the last one that is there; until then of one in memory."""
        stored = (handle.bytes for handle in reversed(self._records))
        return next((size for size in stored if size is not None), self._in_memory_bytes)

    @property
    def steps(self) -> int:
        """From one base to the next."""
        if self.base_every is not None:
            return self.base_every
        rate = self._read_rate
        per_record = self.record_bytes / rate + self.update_seconds
        left = self.recovery_s - self.base_bytes / rate
        affordable = int(left / per_record) if per_record else EVERY_MIN
        if self.has_retention and self.record_bytes:
            affordable = min(affordable, KEPT_STATES * self.base_bytes // self.record_bytes)
        return max(EVERY_MIN, min(EVERY_MAX, affordable))

    def origin(self, base_step: int, whole_step: int) -> int:
        """From where it counts: the last base, or a later step that was made whole since. But a
        base comes at least every EVERY_MAX steps: it does not depend on what the log has
        noticed."""
        if self.base_every is not None:
            return base_step
        return max(base_step, min(whole_step, base_step + EVERY_MAX - self.steps))

    def describe(self) -> dict[str, Any]:
        """What `everstep show` prints of it."""
        chosen: dict[str, Any] = {"base_every": self.steps}
        if self.base_every is None:
            known = "measured" if self.pace.read_bytes_per_s else "assumed"
            chosen["distance"] = {
                "recovery_budget_s": self.recovery_s,
                "base_bytes": self.base_bytes,
                "record_bytes": self.record_bytes,
                "update_s": round(self.update_seconds, 6),
                f"{known}_read_bytes_per_s": round(self._read_rate),
            }
        return chosen

    @property
    def _read_rate(self) -> float:
        """Bytes per second, as a restore read them; until then as a plain disk does."""
        return self.pace.read_bytes_per_s or READ_BYTES_PER_S
