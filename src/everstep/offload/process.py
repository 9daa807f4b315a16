"""The process that makes an offloaded optimizer's updates, as the trainer sees it."""

import contextlib
import logging
import os
from collections.abc import Sequence

from everstep.errors import EverstepError, Unavailable
from everstep.keeper.wire import Message
from everstep.keeper.workers import Worker
from everstep.offload.shared import Shared

log = logging.getLogger("everstep")

DEATHS_MAX = 3
"""Of processes, one after another, in one step."""


class Process:
    """It, and the next one where it dies, which is asked for all of the step again, and makes what
    is not made. For one thread at a time."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._asked: list[Message] = []
        self.worker: Worker | None = None

    def ask(self, given: Sequence[int]) -> None:
        """Let it update these parameters as well, in this step; does not wait for it."""
        place = {"step": self._shared.step, "position": len(self._asked)}
        self._asked.append({"type": "update", **place, "given": list(given)})
        with contextlib.suppress(OSError):  # finish() asks the next one
            if self.worker:
                self.worker.send(self._asked[-1])
            else:
                self._open()

    def finish(self) -> None:
        """Wait until all that was asked for is done. Raises Unavailable."""
        try:
            for _ in range(DEATHS_MAX):
                try:
                    worker = self.worker or self._open()
                    worker.send({"type": "end"})
                    worker.receive()
                except OSError as error:
                    log.warning("making an update: %s; another process goes on", error)
                    self.close()
                except EverstepError as error:
                    self.close()
                    raise Unavailable(f"making an update in another process: {error}") from error
                else:
                    return
            raise Unavailable(f"making an update: {DEATHS_MAX} processes for it have died")
        finally:
            self._asked.clear()

    def _open(self) -> Worker:
        worker = self.worker = Worker("everstep.offload.worker")
        worker.send({"type": "open", "trainer": os.getpid()}, self._shared.fds)
        for message in self._asked:
            worker.send(message)
        return worker

    def close(self) -> None:
        """End it, when it has made what it was asked for."""
        if self.worker:
            self.worker.close()
            self.worker = None

    def __del__(self) -> None:
        self.close()
