"""How trainer and keeper talk: small JSON messages, one per packet, on a Unix socket of this user.

Bulk never crosses the socket: it lies in the arena, whose descriptor comes with a message.
"""

import array
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep.errors import Unavailable

log = logging.getLogger("everstep")

PROTOCOL = 1
MESSAGE_BYTES_MAX = 64 << 10
DESCRIPTORS_MAX = 240
"""Of one message; Linux takes 253. A node's ranks leave one arena each."""

BACKLOG = 128
_SO_PEERPIDFD = 77
_NAMES_MAX = 8
_DIRECTORY_BYTES_MAX = 107 - len("/.sock") - 24
"""Linux takes 107 bytes for the path of a socket."""

Message = dict[str, Any]


def runtime_directory() -> Path:
    """Where this user's sockets, locks and keeper logs lie: nobody else can enter it.

    It is the first of these that can be had: EVERSTEP_RUNTIME_DIR (nothing else where that is set),
    XDG_RUNTIME_DIR/everstep, /tmp/everstep-UID; where somebody else was there first, numbered names
    beside it, which all processes of this user try in one order; and one that only this process
    and its children know. Raises Unavailable.
    """
    if chosen := os.environ.get("EVERSTEP_RUNTIME_DIR"):
        return _prepared(Path(chosen).absolute())
    for directory in _shared_directories():
        with contextlib.suppress(Unavailable):
            return _prepared(directory)
    return _prepared(_own_directory())


def _shared_directories() -> Iterator[Path]:
    """Those that all processes of this user try, in this order."""
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    with contextlib.suppress(OSError):
        if given.is_absolute() and _is_private(given.stat()):  # su may leave another user's
            yield given / "everstep"
    first = _temporary_directory() / f"everstep-{os.getuid()}"
    yield first
    for number in range(1, _NAMES_MAX):
        yield first.with_name(f"{first.name}-{number}")


@functools.cache
def _own_directory() -> Path:
    try:
        directory = Path(tempfile.mkdtemp(prefix="everstep-", dir=_temporary_directory()))
    except OSError as error:
        raise Unavailable(f"making a directory for the keeper's socket: {error}") from error
    log.warning(
        "nobody shares the keepers of this process, whose sockets are in %s: all names that other "
        "processes would look for are taken by other users. Set EVERSTEP_RUNTIME_DIR to a "
        "directory that only you can enter",
        directory,
    )
    return directory


def _temporary_directory() -> Path:
    """Without a look at TMPDIR where that is possible: it differs between a user's processes."""
    try:
        return Path("/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir())
    except OSError as error:
        raise Unavailable(f"looking for a directory for the keeper's socket: {error}") from error


def _prepared(directory: Path) -> Path:
    """The directory, made where it is missing. Raises Unavailable where it does not serve."""
    if len(os.fsencode(directory)) > _DIRECTORY_BYTES_MAX:
        raise Unavailable(
            f"preparing {directory}: a socket's path can be {_DIRECTORY_BYTES_MAX} bytes before "
            f"its name. Set EVERSTEP_RUNTIME_DIR to a shorter one"
        )
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise Unavailable(f"preparing {directory}: {error.strerror}") from error
    if not _is_private(found):
        raise Unavailable(
            f"preparing {directory}: it must be a directory of user {os.getuid()} that nobody else "
            f"can enter (found mode {stat.filemode(found.st_mode)}, owner {found.st_uid}). "
            f"Remove it, or set EVERSTEP_RUNTIME_DIR to another"
        )
    return directory


def _is_private(found: os.stat_result) -> bool:
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return is_own and not found.st_mode & 0o077


def endpoint(store: str | os.PathLike[str]) -> Path:
    """The path, without suffix, of a store's keeper on this node: .sock, .lock, .log."""
    name = os.fsencode(os.path.realpath(store))
    if part := node():
        name += b"\0" + os.fsencode(part)
    return runtime_directory() / hashlib.sha256(name).hexdigest()[:24]


def node() -> str:
    """What tells nodes apart that share a host: containers with one /tmp set EVERSTEP_NODE."""
    return os.environ.get("EVERSTEP_NODE", "")


def take_lock(path: Path) -> int | None:
    """The keeper's lock, held while the returned descriptor is open; None if another has it."""
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd
        os.close(fd)  # the keeper that had it has ended, and removed it


def listen(path: Path) -> socket.socket:
    """Listen there; the caller holds the lock, so what lies there is left over. Raises OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    previous = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(previous)
    listener.listen(BACKLOG)
    return listener


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
