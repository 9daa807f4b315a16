"""Trust: whether what is captured at a step may go on from what was captured before.

What is unusual costs a whole state, not a mechanism: a *surprise* (somebody changed tensors outside
of an update, or moved them) ends the chain of records, and a whole state begins another. The third
one, with no whole base interval between, ends it for the run: whole states stay. So does a run of
several ranks, where nobody asks anybody. A surprise of one rank makes the step fail on all of them,
as the others have captured their record of it already; the keepers report the failed call, by its
number, to all, and all count alike. What is known only when the call is over (a gradient that was
written to while its record was copied) costs that step, and the next one is a whole state.

What follows a step that was not saved is worth nothing, whatever the reason (a full disk), so a
chain goes on from a whole state that came later. Several ranks have to take the same one. Where
steps are long all have heard of a failure by the next call, and that is the one. Where steps are so
short that the next call failed, too, each hears of it at another call: so all save whole states up
to one by which they will have heard, and go on from that.

A log's bases are made by the process that trains, by copies; or by the replica, while it lives. A
failure of that may want a base, too.
"""

import logging
import threading

from everstep.errors import EverstepError, Mismatch, Unsupported

log = logging.getLogger("everstep")

SURPRISES_MAX = 3
JOIN_EVERY = 8
"""Calls from one of those where ranks may go on together to the next; ..."""
HEARD_WITHIN = 4
"""... so many lie between a failure and the first of them, at least."""


class Trust:
    """Of one Checkpointer. Thread-safe."""

    def __init__(self, *, is_alone: bool, by_replica: bool = False) -> None:
        """`is_alone`: of one process, not of several ranks."""
        self._is_alone = is_alone
        self.by_replica = by_replica
        """Whether a replica makes a log's bases."""
        self.wants_base = False
        """Whether the next step is to be a base, whatever was planned."""
        self._join = -1
        self._surprises: list[int] = []
        """The calls of those that nothing has forgiven."""
        self._reason = "the ranks had different things to save"
        self.lost: str | None = None
        """Why whole states stay for the rest of the run."""
        self._changed = threading.Lock()

    def surprise(self, call: int, step: int, reason: str, *, counts: bool = True) -> None:
        """No record can be made of this step, and a whole state is saved instead. `counts`: not
        where it is known not to come again."""
        with self._changed:
            self._reason = reason
            if self._is_alone and counts:
                self._count(call)
        log.warning(
            "no record is made of step %s: %s. A whole state is saved instead%s%s",
            step,
            reason,
            "" if self._is_alone else " by all ranks, at one of the next steps",
            ", and from now on" if self.lost else "",
        )

    def note_failure(self, call: int, error: EverstepError) -> None:
        """What was to be saved at this call was not (SaveHandle.call). What fails before the next
        common call belongs to what failed before. Any thread."""
        with self._changed:
            if call < self._join:
                return
            is_next = self._is_alone or call > self._join + 1
            far = -(-(call + HEARD_WITHIN) // JOIN_EVERY) * JOIN_EVERY
            self._join = call + 1 if is_next else far
            if isinstance(error, Unsupported if self._is_alone else Mismatch):
                self._reason = str(error) if self._is_alone else self._reason
                self._count(call)

    def note_replica(self, *, wants_base: bool, is_end: bool) -> None:
        """The replica can go on from a base alone, or will not any more. Of several ranks nobody
        knows when the others hear of it, so that they go by numbers of steps alone. Any thread."""
        self.wants_base |= wants_base and self._is_alone
        self.by_replica &= not (is_end and self._is_alone)

    @property
    def plans_bases(self) -> bool:
        """Whether this process makes bases from time to time."""
        return not (self.by_replica and self._is_alone)

    def note_interval(self, call: int) -> None:
        """All went well up to the base of this call, which was due. On all ranks alike."""
        with self._changed:
            self._surprises = [each for each in self._surprises if each >= call]

    def joins_at(self, call: int) -> bool:
        """Whether all ranks count on a whole state of just this call, to go on from."""
        return not self._is_alone and call == self._join

    def may_follow(self, call: int) -> bool:
        """Whether records may go on from the whole state of that call."""
        return call >= self._join

    def _count(self, call: int) -> None:
        if self._surprises and not self._is_alone and call < self._surprises[-1] + HEARD_WITHIN:
            return  # not all have heard of that one
        self._surprises.append(call)
        if len(self._surprises) == SURPRISES_MAX:
            self.lost = f"{SURPRISES_MAX} surprises, the last of them: {self._reason}"
