"""How trainer and keeper talk: small JSON messages, one per packet, on a Unix socket of this user.

Bulk never crosses the socket: it lies in the arena, whose descriptor comes with a message.
"""

import array
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

PROTOCOL = 1
MESSAGE_BYTES_MAX = 64 << 10
DESCRIPTORS_MAX = 240
"""Of one message; Linux takes 253. A node's ranks leave one arena each."""

_SO_PEERPIDFD = 77

Message = dict[str, Any]


def connect(path: Path) -> socket.socket:
    """Connect to a keeper; raises OSError where none listens, or where it does not accept."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)  # one that is stopped, with a full queue: do not wait
        connection.connect(str(path))
        connection.setblocking(True)
        check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_peer(connection: socket.socket) -> int:
    """The process id at the other end; raises PermissionError where it is another user's."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise PermissionError(
            f"process {pid} of user {uid} is at the other end of the keeper's socket"
        )
    return int(pid)


def open_peer(connection: socket.socket, pid: int) -> int:
    """A pidfd of the process at the other end, which is `pid`; raises OSError where it is gone.

    Asks the socket (Linux 6.5 and later): a number may have gone to another process since.
    """
    try:
        answer = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, struct.calcsize("i"))
    except OSError:
        return os.pidfd_open(pid)
    fd = int(struct.unpack("i", answer)[0])
    os.set_inheritable(fd, False)
    return fd


def send(connection: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    """Send one message, and descriptors with it; raises OSError."""
    data = json.dumps(message).encode()
    assert len(data) <= MESSAGE_BYTES_MAX, "bulk belongs into the arena"
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([data], rights)


def receive(connection: socket.socket) -> tuple[Message, list[int]] | None:
    """Wait for a message; None at the end. The caller owns the descriptors.

    Raises OSError, and ValueError for what is no message.
    """
    space = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(
        MESSAGE_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a message was cut short")
        if not data and not fds:
            return None
        message = json.loads(data)
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise ValueError("a message without type")
    except (ValueError, RecursionError) as error:
        for fd in fds:
            os.close(fd)
        raise ValueError(str(error)) from error
    return message, list(fds)


def number(value: object) -> int:
    """A step, an epoch, a count of bytes that a message names. Raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"not a number of a step or epoch: {value!r}")
    return value
