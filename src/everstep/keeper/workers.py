"""Workers: processes that have torch. Who owns one sends it messages (wire.py) over a socket that
is its standard input. It ends when that closes; and when it fails, of which it says why.

It owns nothing itself: what it makes lies in arenas, and follows from what is there, or in a store.
So another one goes on where one has died.
"""

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence

from everstep.errors import KINDS, Unavailable
from everstep.keeper import wire
from everstep.keeper.home import python_path

Sent = tuple[wire.Message, list[int]]
"""A message, and descriptors that come with it."""


class Worker:
    """One, for its owner. For one thread at a time, but for `terminate`."""

    def __init__(self, *module: str) -> None:
        """Begin it: a module, with these arguments. Raises OSError."""
        self._connection, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with others:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *module],
                stdin=others.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )
        _connections.add(self._connection)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def check(self) -> None:
        """Raises ConnectionError where it has died."""
        if self._process.poll() is not None:
            raise _died()

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Raises OSError where it has died."""
        wire.send(self._connection, message, list(fds))

    def receive(self) -> Sent:
        """Wait for its answer. Raises what it failed with, ConnectionError where it has died."""
        received = wire.receive(self._connection)
        if received is None:
            raise _died()
        message, _ = received
        if message["type"] == "failed":
            raise KINDS.get(message["kind"], Unavailable)(message["message"])
        return received

    def terminate(self) -> None:
        """Let it end now. Any thread; does not block."""
        self._process.terminate()

    def close(self) -> None:
        """Let it end when it has done what it was sent; blocks until then."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)  # also where a forked child has it as well
        self._connection.close()
        self._process.wait()


def serve(answer: Callable[[wire.Message, list[int]], Sent | None]) -> int:
    """In a worker: take one message after another, and send what `answer` returns, until its owner
    is gone or that fails. Returns the exit status."""
    connection = socket.socket(fileno=0)
    with contextlib.suppress(OSError):
        try:
            while received := wire.receive(connection):
                if found := answer(*received):
                    wire.send(connection, *found)
        except Exception as error:  # noqa: BLE001 - torch's and the optimizer's
            wire.send(connection, {"type": "failed", **wire.failure(error)})
            while wire.receive(connection):  # else its end would be heard before the message
                pass
    return 0


_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child (of a DataLoader) must not keep workers alive when their owner has died."""
    for connection in _connections:
        connection.close()


os.register_at_fork(after_in_child=_forget_in_child)


def _died() -> ConnectionError:
    return ConnectionError("its process has died")
