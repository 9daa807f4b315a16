"""Where a keeper lives in the file system: the lock that makes it the only one, socket and log."""

import os
import socket
import stat
import time
from pathlib import Path

from everstep.keeper import wire

LOG_BYTES_MAX = 1 << 20
_LOG_BYTES_KEPT = 64 << 10
_TOUCH_S = 3600.0


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
        """None where another keeper has it."""
        lock = wire.take_lock(endpoint.with_suffix(".lock"))
        return None if lock is None else cls(endpoint, lock)

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

    def trim_log(self) -> None:
        """Keep the end of a log that has grown too long."""
        if not stat.S_ISREG(os.fstat(2).st_mode) or os.fstat(2).st_size <= LOG_BYTES_MAX:
            return
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(-_LOG_BYTES_KEPT, os.SEEK_END)
            tail = log.read(_LOG_BYTES_KEPT)
        os.ftruncate(2, 0)
        os.write(2, tail)

    def move_in(self) -> None:
        """Say at the socket that it is this process that listens, after a fork."""
        self.listener.listen(wire.BACKLOG)

    def leave(self) -> None:
        """Give up socket and lock, in this order: who finds the lock free may listen."""
        if self.listens():
            self._path.unlink(missing_ok=True)
        self.listener.close()
        os.close(self._lock)

    def _listen(self) -> None:
        self.listener: socket.socket = wire.listen(self._path)
        self.listener.setblocking(False)
        self._socket_identity = _identity(os.stat(self._path))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
