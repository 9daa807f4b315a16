"""The process that makes an offloaded optimizer's updates, as the trainer sees it."""

import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Sequence

from everstep.errors import Unavailable
from everstep.keeper import wire
from everstep.offload.shared import Shared
from everstep.sharding.topology import flushes_denormals

log = logging.getLogger("everstep")

DEATHS_MAX = 3
"""Of processes, one after another, in one step."""


class Process:
    """It, and the next one where it dies, which is asked for all of the step again, and makes what
    is not made. For one thread at a time."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._asked: list[wire.Message] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def ask(self, given: Sequence[int]) -> None:
        """Let it update these parameters as well, in this step; does not wait for it."""
        place = {"step": self._shared.step, "position": len(self._asked)}
        self._asked.append({"type": "update", **place, "given": list(given)})
        with contextlib.suppress(OSError):  # finish() asks the next one
            if self._connection:
                wire.send(self._connection, self._asked[-1])
            else:
                self._open()

    def finish(self) -> None:
        """Wait until all that was asked for is done. Raises Unavailable."""
        for _ in range(DEATHS_MAX):
            try:
                answer = self._answer()
            except OSError as error:
                answer = None
                log.warning("the optimizer's process: %s", error)
            if answer is None:
                log.warning("the optimizer's process has died; another one goes on")
                self.close()
                continue
            self._asked.clear()
            if answer["type"] == "done":
                return
            self.close()
            raise Unavailable(f"making an update in another process: {answer['message']}")
        self._asked.clear()
        raise Unavailable(f"making an update: {DEATHS_MAX} processes for it have died")

    def _answer(self) -> wire.Message | None:
        connection = self._connection or self._open()
        wire.send(connection, {"type": "end"})
        received = wire.receive(connection)
        return received and received[0]

    def _open(self) -> socket.socket:
        self._process, connection = wire.start_worker("everstep.offload.worker")
        self._connection = connection
        said = {"type": "open", "flushes": flushes_denormals(), "trainer": os.getpid()}
        said["on_disk"] = self._shared.state.is_spill
        wire.send(connection, said, self._shared.fds)
        for message in self._asked:
            wire.send(connection, message)
        return connection

    def close(self) -> None:
        """End it, when it has made what it was asked for."""
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._process:
            self._process.wait()
            self._process = None

    def __del__(self) -> None:
        self.close()
