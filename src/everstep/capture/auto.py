"""The strategy `auto`: `full` or `log`, by what was measured, and the reason in words.

It starts as `full`. What counts is the bytes that leave the device and reach the disk for each
step, as the time of a save goes with them: a state every `every` steps, or a record of every step
and a base now and then. It changes only when enough saves were seen and the other is much
cheaper, and goes back when what it hoped for did not come.
"""

import logging
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("everstep")

SAVES_MIN = 50
CHEAPER = 0.6
"""A log is begun where it takes less than this part of what full states do, ..."""
DEARER = 0.8
"""... and ended where it takes more than this."""


@dataclass(slots=True)
class Auto:
    """Chooses between whole states and a log. For the thread that trains."""

    every: int
    is_log: bool = False
    reason: str = "full: nothing is measured yet"
    _seen: int = 0
    _state_bytes: int = 0
    _record_bytes: float = 0.0
    _refusal: str | None = None

    def refuse(self, why: str) -> None:
        """A log does not fit this run."""
        self._refusal = why
        self._switch(False, f"full: {why}")

    def note_state(self, size: int, gradients: int) -> None:
        """A whole state of that many bytes is being saved; a record would have had about as many
        bytes as the parameters that take part in training."""
        self._state_bytes = size
        if not self.is_log:
            self._record_bytes = gradients
            self._seen += 1

    def note_record(self, size: int) -> None:
        """A record reached the disk, with that many bytes."""
        self._record_bytes += 0.2 * (size - self._record_bytes)
        self._seen += 1

    def decide(self, distance: int) -> bool:
        """Whether the next is part of a log. `distance`: from one base to the next."""
        if self._refusal or self._seen < SAVES_MIN or not self._state_bytes:
            return self.is_log
        full = self._state_bytes / self.every
        bases = self._state_bytes / distance
        part = (self._record_bytes + bases) / full
        figures = (
            f"MB a step: {self._record_bytes / 1e6:.1f} in records and {bases / 1e6:.1f} in bases, "
            f"or {full / 1e6:.1f} in whole states"
        )
        if not self.is_log and part < CHEAPER:
            self._switch(True, f"log: {figures}")
        elif self.is_log and part > DEARER:
            self._switch(False, f"full: {figures}")
        elif not self.is_log:
            self.reason = f"full: {figures}"
        return self.is_log

    def figures(self) -> dict[str, Any]:
        """For `everstep show`."""
        return {
            "reason": self.reason,
            "saves_seen": self._seen,
            "state_bytes": self._state_bytes,
            "record_bytes": round(self._record_bytes),
        }

    def _switch(self, is_log: bool, reason: str) -> None:
        self._seen = 0
        self.reason = reason
        if is_log != self.is_log:
            log.warning("strategy auto goes to %s", reason)
        self.is_log = is_log
