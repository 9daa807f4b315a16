"""Where a keeper lives in the file system: the lock that makes it the only one, socket and log."""

import contextlib
import os
import socket
import stat
import time
from pathlib import Path

from everstep.errors import Unavailable
from everstep.keeper import wire

LOG_BYTES_MAX = 1 << 20
_LOG_BYTES_KEPT = 64 << 10
_TOUCH_S = 3600.0
_LEFT_S = 86_400.0
"""How long the files of a keeper that was killed are kept: its log may be wanted."""


class Home:
    """Lock and socket of this process, which is the store's keeper for as long as it has both."""

    def __init__(self, endpoint: Path, lock: int) -> None:
        """Listens; owns `lock` from now on. Raises OSError."""
        self._lock_path = endpoint.with_suffix(".lock")
        self._path = endpoint.with_suffix(".sock")
        self._lock = lock
        self._touched = time.monotonic()
        self._listen()

    @classmethod
    def take(cls, endpoint: Path) -> "Home | None":
        """None where another keeper has it. Removes what keepers left behind that were killed."""
        lock = wire.take_lock(endpoint.with_suffix(".lock"))
        if lock is None:
            return None
        home = cls(endpoint, lock)
        for path in endpoint.parent.glob("*.lock"):
            with contextlib.suppress(OSError):  # tidiness only
                _sweep(path)
        return home

    def holds_lock(self) -> bool:
        """Whether it is still the only one; mends what a cleaner of temporary files took away.

        A lock file that was deleted may have been made anew, by a keeper that believes that it is
        the only one: then this one has been replaced.
        """
        try:
            wire.runtime_directory()
            if _identity(os.stat(self._lock_path)) != _identity(os.fstat(self._lock)):
                return False
        except FileNotFoundError:
            lock = wire.take_lock(self._lock_path)
            if lock is None:
                return False
            os.close(self._lock)
            self._lock = lock
        if time.monotonic() - self._touched > _TOUCH_S:  # cleaners go by age
            self._touched = time.monotonic()
            for path in (self._lock_path, self._path):
                os.utime(path)
        return True

    def listens(self) -> bool:
        """Whether a client finds the socket under its name."""
        try:
            return _identity(os.stat(self._path)) == self._socket_identity
        except FileNotFoundError:
            return False

    def listen_again(self) -> None:
        """Replace the socket, whose name is gone. Raises OSError."""
        self.listener.close()
        self._listen()

    def look_after_log(self) -> None:
        """Keep the end of a log that has grown too long; begin another where it was removed."""
        found = os.fstat(2)
        if not stat.S_ISREG(found.st_mode):
            return
        if not found.st_nlink:
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
            log = os.open(self._path.with_suffix(".log"), flags, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
        elif found.st_size > LOG_BYTES_MAX:
            with open("/proc/self/fd/2", "rb") as whole:
                whole.seek(-_LOG_BYTES_KEPT, os.SEEK_END)
                tail = whole.read(_LOG_BYTES_KEPT)
            os.ftruncate(2, 0)
            os.write(2, tail)

    def move_in(self) -> None:
        """Say at the socket that it is this process that listens, after a fork."""
        self.listener.listen(wire.BACKLOG)

    def leave(self) -> None:
        """Listen no more, and remove the files: the lock last, as who has it may listen."""
        self.listener.close()
        with contextlib.suppress(OSError, Unavailable):
            if self.holds_lock():
                _remove_files(self._lock_path)
        os.close(self._lock)

    def _listen(self) -> None:
        self.listener: socket.socket = wire.listen(self._path)
        self.listener.setblocking(False)
        self._socket_identity = _identity(os.stat(self._path))


def _sweep(lock_path: Path) -> None:
    """Remove a keeper's files, if it has ended long ago."""
    if time.time() - lock_path.stat().st_mtime < _LEFT_S:
        return
    lock = wire.take_lock(lock_path)
    if lock is not None:
        _remove_files(lock_path)
        os.close(lock)


def _remove_files(lock_path: Path) -> None:
    """Remove what a keeper has left; the caller holds its lock, whose file goes last."""
    for suffix in (".sock", ".log", ".lock"):
        lock_path.with_suffix(suffix).unlink(missing_ok=True)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
