"""How long a trainer's calls wait for its keeper and the disk: while anything is saved.

A disk that hangs, or a keeper that keeps dying, must not hold up training for ever: other ranks
wait in a collective, whose watchdog would end the run. So a call that has waited for STALL_S
without any progress fails, and none waits after it until something is committed again.
"""

import threading
import time

STALL_S = 120.0


class Patience:
    """Of one client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progressed = time.monotonic()
        self._is_spent = False
        self._bytes_before = 0
        """That this keeper had written by the last commit."""
        self._bytes = 0
        self._bytes_most = 0
        """That any keeper has written since the last commit: one that keeps dying at the same byte
        makes no progress."""
        self._lost_since: float | None = None

    def lasts(self, since: float) -> bool:
        """Whether one who waits since then (time.monotonic()) may go on. Where not, nobody waits
        any more until something is committed."""
        with self._lock:
            self._is_spent |= time.monotonic() - max(since, self._progressed) >= STALL_S
            return not self._is_spent

    def lasts_without_keeper(self) -> bool:
        """The same for what waits for another keeper since there was none for the first time, after
        the last commit."""
        with self._lock:
            self._lost_since = self._lost_since or time.monotonic()
            since = self._lost_since
        return self.lasts(since)

    def note_commit(self) -> None:
        """Something of this trainer has become durable."""
        with self._lock:
            self._progressed = time.monotonic()
            self._is_spent, self._lost_since = False, None
            self._bytes_before, self._bytes_most = self._bytes, 0

    def note_bytes(self, count: int) -> None:
        """The keeper has written so many bytes since it began."""
        with self._lock:
            self._bytes = count
            if count - self._bytes_before > self._bytes_most:
                self._bytes_most = count - self._bytes_before
                self._progressed = time.monotonic()

    def note_keeper(self) -> None:
        """There is another keeper."""
        with self._lock:
            self._bytes = self._bytes_before = 0
