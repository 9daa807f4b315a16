"""The last step before the end by SIGTERM: of one process the next, of several one that all save.

Ranks hear of the signal at different moments, and some perhaps not at all; they must save the same
step, or there is none. So the first one that is asked decides in step(s) that s + 1 is the last,
says so in the ranks' store, and goes on to it. Training is synchronous: when another one calls
step(s + 1), it has been through an update that the first one took part in, after it said so. Hence
a look at the store in each step() is enough, and nobody waits for anybody.
"""

import logging

from everstep.errors import Unavailable
from everstep.preemption import Preemption
from everstep.sharding.world import World

log = logging.getLogger("everstep")

_WHAT = "the last step"


class Ending:
    """Whether a step is to be saved because the process, or all ranks, will end after it. For the
    thread that trains."""

    def __init__(self, world: World, preemption: Preemption) -> None:
        self._world = world
        self._preemption = preemption
        self._last: int | None = None
        self._has_come = False

    @property
    def is_now(self) -> bool:
        """Whether this process ends after the step that it is at; alone, it may have been told just
        now."""
        return self._preemption.requested if self._world.is_alone else self._has_come

    def comes_with(self, step: int) -> bool:
        """Whether this step is the last one, or comes after it. All ranks call it for each step."""
        if not self._world.is_alone:
            self._has_come = self._is_agreed(step)
        return self.is_now

    def _is_agreed(self, step: int) -> bool:
        if self._last is None:
            asked = self._preemption.requested
            try:
                self._last = self._world.decide(_WHAT, step + 1 if asked else None)
            except Unavailable as error:
                if not asked:
                    return False
                log.warning("%s. This rank ends with step %s", error, step)
                self._last = step
        if self._last is None or step < self._last:
            return False
        self._preemption.requested = True  # of one rank: the others cannot go on without it
        return True
