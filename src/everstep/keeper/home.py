"""Where the keeper of a store lives on a node (a directory of this user, in it a lock, a socket and
a log), and how a trainer starts one there.

Who holds the lock is the store's only keeper; the socket is its own, whatever lay there before.
"""

import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from everstep.errors import Conflict, Unavailable
from everstep.keeper import wire
from everstep.tiers.objects import Url
from everstep.tiers.tier import name_of

START_S = 20.0
"""How long a keeper may take until it listens."""

IDLE_S = 600.0
"""How long a keeper holds the memory of a trainer that died and has not come back, in seconds."""

LOG_BYTES_MAX = 1 << 20
_LOG_BYTES_KEPT = 64 << 10
BACKLOG = 128
_DIRECTORY_BYTES_MAX = 107 - len("/.sock") - 24
"""Linux takes 107 bytes for the path of a socket."""
_PATIENCE_S = 5.0
_NAMES_MAX = 8
"""Of the directories in /tmp that are tried."""
_TOUCH_S = 3600.0
_LEFT_S = 86_400.0
"""How long the files of a keeper that was killed are kept: its log may be wanted."""


# ---- the directory -------------------------------------------------------------------------------


def runtime_directory() -> Path:
    """Where this user's sockets, locks and keeper logs lie: nobody else can enter it.

    It is the first of these that can be had: EVERSTEP_RUNTIME_DIR (nothing else where that is set),
    XDG_RUNTIME_DIR/everstep, /tmp/everstep-UID, /tmp/everstep-UID-1 and so on: another user may
    have made those before. Raises Unavailable.
    """
    if chosen := os.environ.get("EVERSTEP_RUNTIME_DIR"):
        return _prepared(Path(chosen).absolute())
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    with contextlib.suppress(OSError, Unavailable):
        if given.is_absolute() and _is_private(given.stat()):  # su may leave another user's
            return _prepared(given / "everstep")
    base = _temporary_directory() / f"everstep-{os.getuid()}"
    for number in range(1, _NAMES_MAX):
        with contextlib.suppress(Unavailable):
            return _prepared(base)
        base = base.with_name(f"everstep-{os.getuid()}-{number}")
    return _prepared(base)


def _temporary_directory() -> Path:
    """Without a look at TMPDIR where that is possible: it differs between a user's processes."""
    return Path("/tmp" if os.access("/tmp", os.W_OK) else os.environ.get("TMPDIR", "/tmp"))


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
        raise Unavailable(
            f"preparing {directory}: {error.strerror}. Set EVERSTEP_RUNTIME_DIR to another one"
        ) from error
    if not _is_private(found):
        raise Unavailable(
            f"preparing {directory}: it must be a directory of user {os.getuid()} that nobody else "
            f"can enter (found mode {stat.filemode(found.st_mode)}, owner {found.st_uid}). "
            f"Remove it, or set EVERSTEP_RUNTIME_DIR to another, for all processes of a run"
        )
    return directory


def _is_private(found: os.stat_result) -> bool:
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return is_own and not found.st_mode & 0o077


def endpoint(store: str | os.PathLike[str]) -> Path:
    """The path, without suffix, of a store's keeper on this node: .sock, .lock, .log."""
    name = os.fsencode(name_of(store))
    if part := node():
        name += b"\0" + os.fsencode(part)
    return runtime_directory() / hashlib.sha256(name).hexdigest()[:24]


def node() -> str:
    """What tells nodes apart that share a host: containers with one /tmp set EVERSTEP_NODE."""
    return os.environ.get("EVERSTEP_NODE", "")


def status_of(store: str | os.PathLike[str]) -> wire.Message | None:
    """What the keeper of a store says of itself; None where none runs on this node."""
    try:
        with wire.connect(endpoint(store).with_suffix(".sock")) as connection:
            connection.settimeout(_PATIENCE_S)
            wire.send(connection, {"type": "status"})
            received = wire.receive(connection)
    except OSError:
        return None
    return received[0] if received else None


def check_no_writer(store: str | os.PathLike[str], what: str, claims: Sequence[str] = ()) -> None:
    """Raises Conflict where a process of this node has a Checkpointer on a store, or somebody has
    `claims` on it (presence.living)."""
    trainers = (status_of(store) or {}).get("trainers", ())
    others = [f"process {int(each['pid'])}" for each in trainers if each.get("is_attached")]
    if found := [*others, *claims]:
        raise Conflict(
            f"{what}: {found[0]} writes to it. A store has one writer at a time: close() that "
            f"Checkpointer first, or choose another store"
        )


# ---- the trainer starts a keeper -----------------------------------------------------------------


def python_path() -> str:
    """By which a process of Python finds this everstep, wherever it is."""
    source = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))


def spawn(store: Path | Url, idle_s: float) -> None:
    """Start a keeper, and wait until it listens (or another does). Raises Unavailable.

    It gets a session and stdio of its own, and is no child: nobody who waits for the trainer's
    pipes or children waits for the keeper, and no signal to the trainer's group reaches it.
    """
    options = ["--idle-s", str(idle_s), "--detach"]
    log = endpoint(store).with_suffix(".log")
    try:
        with open(log, "ab", opener=partial(os.open, mode=0o600)) as output:
            done = subprocess.run(
                [sys.executable, *("-P", "-m", "everstep.keeper", name_of(store), *options)],
                stdin=subprocess.DEVNULL,
                stdout=output.fileno(),
                stderr=output.fileno(),
                cwd="/",
                env={**os.environ, "PYTHONPATH": python_path()},
                start_new_session=True,
                timeout=START_S,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(cannot_start(store, error)) from error
    if done.returncode > 0:  # one that was killed is started again by the client
        raise Unavailable(cannot_start(store, f"it ended at once with status {done.returncode}"))


def cannot_start(store: Path | Url, reason: object) -> str:
    """The message for whoever needs a keeper, and where to look."""
    text = f"starting the keeper of {store}: {reason}"
    with contextlib.suppress(Unavailable):
        text += f". Its log is {endpoint(store).with_suffix('.log')}"
    return text


# ---- the keeper lives there ----------------------------------------------------------------------


class Home:
    """Lock and socket of this process, which is the store's keeper for as long as it has both."""

    def __init__(self, endpoint: Path, lock: int) -> None:
        """Listens; owns `lock`, of `take_lock`, from now on. Raises OSError."""
        self._lock_path = endpoint.with_suffix(".lock")
        self._path = endpoint.with_suffix(".sock")
        self._lock = lock
        self._touched = time.monotonic()
        self.listener: socket.socket = listen(self._path)
        self.listener.setblocking(False)
        self._socket = os.stat(self._path)

    def is_found(self) -> bool:
        """Whether clients find lock and socket under their names. Files that somebody has deleted
        may have been made anew, by a keeper that believes that it is the only one."""
        try:
            is_found = os.path.samestat(os.stat(self._path), self._socket)
            is_found &= os.path.samestat(os.stat(self._lock_path), os.fstat(self._lock))
        except FileNotFoundError:
            return False
        if is_found and time.monotonic() - self._touched > _TOUCH_S:  # cleaners of /tmp go by age
            self._touched = time.monotonic()
            for path in (self._lock_path, self._path):
                os.utime(path)
        return is_found

    def tidy(self) -> None:
        """Remove what keepers left behind that were killed long ago. There may be so many that no
        trainer is to wait for it."""
        with os.scandir(self._path.parent) as entries:
            for entry in entries:
                if entry.name.endswith(".lock"):
                    with contextlib.suppress(OSError):  # tidiness only
                        _sweep(Path(entry.path))

    def look_after_log(self) -> None:
        """Keep the end of a log that has grown too long."""
        found = os.fstat(2)
        if stat.S_ISREG(found.st_mode) and found.st_size > LOG_BYTES_MAX:
            with open("/proc/self/fd/2", "rb") as whole:
                whole.seek(-_LOG_BYTES_KEPT, os.SEEK_END)
                tail = whole.read(_LOG_BYTES_KEPT)
            os.ftruncate(2, 0)
            os.write(2, tail)

    def leave(self) -> None:
        """Listen no more, and remove the files, unless that was done: the lock last, as who has it
        may listen."""
        self.listener.close()
        with contextlib.suppress(OSError):
            if self.is_found():
                _remove_files(self._lock_path)
            os.close(self._lock)
        self._lock = -1


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


def _sweep(lock_path: Path) -> None:
    if time.time() - lock_path.stat().st_mtime < _LEFT_S:
        return
    lock = take_lock(lock_path)
    if lock is not None:
        _remove_files(lock_path)
        os.close(lock)


def _remove_files(lock_path: Path) -> None:
    """Remove what a keeper has left; the caller holds its lock, whose file goes last."""
    for suffix in (".sock", ".log", ".lock"):
        lock_path.with_suffix(suffix).unlink(missing_ok=True)
