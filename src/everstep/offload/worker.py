"""python -m everstep.offload.worker: the process that makes an optimizer's updates.

The trainer starts it with a socket as its standard input, and sends `open` with three arenas, then
a `step` after each that it has put into them. It answers `done`, or `failed` with kind and message,
and ends when the socket closes.
"""

import contextlib
import fcntl
import os
import socket
import sys

import torch

from everstep.keeper import wire
from everstep.keeper.arena import Arena
from everstep.offload.inner import Inner


def main() -> int:
    """Serve until the trainer is gone."""
    connection = socket.socket(fileno=0)
    inner: Inner | None = None
    with contextlib.suppress(OSError):
        while received := wire.receive(connection):
            message, fds = received
            try:
                if message["type"] == "open":
                    torch.set_flush_denormal(bool(message["flushes"]))
                    exchange, state, undo = fds
                    fcntl.lockf(state, fcntl.LOCK_SH)  # goes with this process
                    if os.getppid() != message["trainer"]:  # what was asked for is not wanted
                        return 0
                    on_disk = bool(message["on_disk"])
                    inner = Inner(Arena(exchange), Arena(state, is_spill=on_disk), Arena(undo))
                assert inner
                inner.step()
                answer: wire.Message = {"type": "done"}
            except Exception as error:  # noqa: BLE001 - torch's and the optimizer's
                text = f"{type(error).__name__}: {error}"
                answer = {"type": "failed", "message": text[: wire.TEXT_MAX]}
            wire.send(connection, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
