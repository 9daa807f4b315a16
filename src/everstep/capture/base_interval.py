"""How many steps of a log lie between one base and the next.

A base comes when the log since the last one has grown to as many bytes as four states: a recovery
then takes about three whole restores, and a log of which retention can delete nothing is bounded.
Or the user fixes it.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from everstep.handle import SaveHandle

EVERY_MIN, EVERY_MAX = 10, 1000
STATES = 4
_UNSTORED_MAX = 8


@dataclass(slots=True)
class BaseInterval:
    """The figures behind the choice. For the thread that trains, but for `note_whole`."""

    base_every: int | None
    """Steps, fixed by the user; None: chosen."""
    base_bytes: int = 0
    _base_step: int = 0
    _whole_step: int = 0
    _in_memory_bytes: int = 0
    _records: deque[SaveHandle] = field(default_factory=lambda: deque(maxlen=_UNSTORED_MAX))

    def note_base(self, step: int) -> None:
        """There is a base of this step."""
        self._base_step = self._whole_step = step

    def note_whole(self, step: int) -> None:
        """The state at this step was made whole in the background: no recovery goes back farther.
        Any thread."""
        self._whole_step = step

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
        if not self.record_bytes:
            return EVERY_MIN
        return max(EVERY_MIN, min(EVERY_MAX, STATES * self.base_bytes // self.record_bytes))

    @property
    def origin(self) -> int:
        """From where it counts: the last base, or a later step that was made whole since. But a
        base comes at least every EVERY_MAX steps: it does not depend on what the log has
        noticed."""
        if self.base_every is not None:
            return self._base_step
        last = self._base_step + EVERY_MAX - self.steps
        return max(self._base_step, min(self._whole_step, last))

    def describe(self) -> dict[str, Any]:
        """What `everstep show` prints of it."""
        chosen: dict[str, Any] = {"base_every": self.steps}
        if self.base_every is None:
            sizes = {"base_bytes": self.base_bytes, "record_bytes": self.record_bytes}
            chosen["base_interval"] = sizes
        return chosen
