"""python -m everstep.offload.worker: the process that makes an optimizer's updates.

The trainer starts it with a socket as its standard input, and sends `open` with three arenas, then
`update` for some parameters after others, which are in the arenas, and `end` after the last of a
step. To that it answers `done`; or, once for all that comes, `failed` with a message. It ends when
the socket closes.
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
    with contextlib.suppress(OSError):
        try:
            _serve(connection)
        except Exception as error:  # noqa: BLE001 - torch's and the optimizer's
            text = f"{type(error).__name__}: {error}"
            wire.send(connection, {"type": "failed", "message": text[: wire.TEXT_MAX]})
            while wire.receive(connection):  # else its end would be heard before the message
                pass
    return 0


def _serve(connection: socket.socket) -> None:
    inner: Inner | None = None
    while received := wire.receive(connection):
        match received:
            case {"type": "open"} as message, fds:
                torch.set_flush_denormal(bool(message["flushes"]))
                exchange, state, undo = fds
                fcntl.lockf(state, fcntl.LOCK_SH)  # goes with this process
                if os.getppid() != message["trainer"]:  # what was asked for is not wanted
                    return
                on_disk = bool(message["on_disk"])
                inner = Inner(Arena(exchange), Arena(state, is_spill=on_disk), Arena(undo))
            case {"type": "update", "step": step, "position": position, "given": given}, _:
                assert inner
                inner.update(step, position, given)
            case _:
                wire.send(connection, {"type": "done"})


if __name__ == "__main__":
    sys.exit(main())
