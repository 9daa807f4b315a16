"""How trainer and keeper talk: small JSON messages, one per packet, on a Unix socket of this user.

Bulk never crosses the socket: it lies in the arena, whose descriptor comes with a message.
"""

import array
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

from everstep.errors import EverstepError, kind_of

PROTOCOL = 6
MESSAGE_BYTES_MAX = 64 << 10
DESCRIPTORS_MAX = 240
"""Of one message; Linux takes 253. A node's ranks leave one arena each."""

TEXT_MAX = 5000  # characters; one takes up to 12 bytes of a message

Message = dict[str, Any]

_NODES_MAX = 1 << 20


class Place(NamedTuple):
    """Where a rank is: its run's attachment (`id`; None: a run of one process), the numbers of the
    ranks of its node, by local number, which of the run's nodes that is (0 is that of rank 0, which
    commits), of how many; its own local number; and whether each node has a store of its own, which
    the others do not see."""

    id: str | None = None
    ranks: tuple[int, ...] = (0,)
    node: int = 0
    nodes: int = 1
    local: int = 0
    own_store: bool = False

    @property
    def here(self) -> tuple[int, int]:
        """Its local number, and how many ranks this node has."""
        return self.local, len(self.ranks)

    @property
    def is_alone(self) -> bool:
        """Whether the run is one process."""
        return self.id is None

    @property
    def commits(self) -> bool:
        """Whether manifests are this node's to create."""
        return self.node == 0

    def parts_of(self, node: int) -> range:
        """Numbers of the parts that lie in this node's store: its own, and those that other numbers
        of nodes have left without one."""
        return range(node, _NODES_MAX, self.nodes)

    def named(self, number: int) -> str:
        """Of whom a document in the store is: an epoch of claim `number` of this run, or a part
        document of the save of call `number`."""
        return f"{self.id}.{number}"


ALONE = Place()


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
    size = MESSAGE_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, flags, _ = connection.recvmsg(*size)
    except ConnectionResetError:
        # Linux says once, and before what it had sent, that who died had not read all that it got.
        data, ancillary, flags, _ = connection.recvmsg(*size)
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


def failure(error: Exception) -> Message:
    """What a message says of an error."""
    text = (
        str(error) if isinstance(error, EverstepError) else f"the other process failed: {error!r}"
    )
    return {"kind": kind_of(error), "message": text[:TEXT_MAX]}


def number(value: object) -> int:
    """A step, an epoch, a count of bytes that a message names. Raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"not a number of a step or epoch: {value!r}")
    return value
