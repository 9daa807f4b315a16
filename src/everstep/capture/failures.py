"""Saves that came to nothing, and from where a log goes on after them.

What follows a step that was not saved is worth nothing, so a log goes on from a whole state that
came later. Several ranks have to take the same one. Where steps are long all have heard of a
failure by the next call, and that is the one. Where steps are so short that the next call failed,
too, each hears of it at another call: so all save whole states up to one by which they will have
heard, and go on from that. Nobody asks anybody: they count the calls alike.
"""

import threading

from everstep.errors import EverstepError, Mismatch

JOIN_EVERY = 8
"""Calls from one of those where ranks may go on together to the next; ..."""
HEARD_WITHIN = 4
"""... so many lie between a failure and the first of them, at least."""


class Failures:
    """What a log hears of its saves. Thread-safe."""

    def __init__(self, *, is_alone: bool) -> None:
        """`is_alone`: of one process, not of several ranks."""
        self._is_alone = is_alone
        self._join = -1
        self._setbacks = self._partings = 0
        self._changed = threading.Lock()

    def note(self, call: int, error: EverstepError) -> None:
        """The save of this call failed (SaveHandle.call). What fails before the next common call
        belongs to what failed before."""
        with self._changed:
            if call < self._join:
                return
            is_next = self._is_alone or call > self._join + 1
            self._join = call + 1 if is_next else _join_after(call)
            self._setbacks += 1
            self._partings += isinstance(error, Mismatch)

    def joins_at(self, call: int) -> bool:
        """Whether all ranks count on a whole state of just this call, to go on from."""
        return not self._is_alone and call == self._join

    def may_follow(self, call: int) -> bool:
        """Whether records may go on from the whole state of that call."""
        return call >= self._join

    def take(self) -> tuple[int, int]:
        """How often, since this was asked last, a log had to begin anew; and how often of these
        because the ranks had different things to save."""
        with self._changed:
            taken = self._setbacks, self._partings
            self._setbacks = self._partings = 0
        return taken


def _join_after(call: int) -> int:
    return -(-(call + HEARD_WITHIN) // JOIN_EVERY) * JOIN_EVERY
