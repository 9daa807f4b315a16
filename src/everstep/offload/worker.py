"""python -m everstep.offload.worker: the worker (keeper/workers.py) of an OffloadedOptimizer.

The trainer sends `open` with two arenas, then `update` for some parameters after others, which are
in the arenas, and `end` after the last of a step. To that it answers `done`.
"""

import fcntl
import os
import sys

from everstep.keeper import wire
from everstep.keeper.arena import Arena
from everstep.keeper.workers import Sent, serve
from everstep.offload.inner import Inner
from everstep.offload.memory import Memory


class Updates:
    """Of one optimizer."""

    _inner: Inner

    def answer(self, message: wire.Message, fds: list[int]) -> Sent | None:
        """To `end`, which comes when all is done that came before. Raises what torch and the
        optimizer do."""
        match message:
            case {"type": "open", "trainer": trainer}:
                exchange, state = fds
                fcntl.lockf(state, fcntl.LOCK_SH)  # goes with this process
                if os.getppid() != trainer:  # what it asked for is not wanted
                    sys.exit()
                self._inner = Inner(Memory(Arena(exchange)), Memory(Arena(state)))
            case {"type": "update", "step": step, "position": position, "given": given}:
                self._inner.update(step, position, given)
            case _:
                return {"type": "done"}, []
        return None


if __name__ == "__main__":
    sys.exit(serve(Updates().answer))
