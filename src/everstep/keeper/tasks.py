"""What a session's thread has to do, in order; and which of the jobs are committed as a group."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from everstep.keeper.persist import is_plain
from everstep.keeper.ranks.node_save import Joint

Task = Joint | Callable[[], None]


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a group of records is committed: when it has so many bytes; or so many seconds after its
    first was written, up to which others are waited for (0: only what is there anyway is taken)."""

    bytes: int
    seconds: float

    @classmethod
    def of(cls, said: Any) -> "Bounds":
        """From a greeting: bytes and milliseconds; WHAT_WAITS where it has none. Raises ValueError,
        TypeError."""
        if said is None:
            return WHAT_WAITS
        size, milliseconds = said
        if type(size) is not int or not 0 < milliseconds <= MILLISECONDS_MAX:
            raise ValueError(f"no bounds of a group: {said!r}")
        return cls(size, milliseconds / 1000)


WHAT_WAITS = Bounds(bytes=256 << 20, seconds=0.0)
MILLISECONDS_MAX = 3_600_000


class Tasks:
    """A queue for one thread that takes, and any that put."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._is_busy = self._is_closed = False
        self._changed = threading.Condition()
        self._changes = 0

    def __len__(self) -> int:
        """How many are waiting or in work: what was taken together counts as one."""
        return len(self._tasks) + self._is_busy

    def put(self, task: Task) -> None:
        """At the end."""
        with self._changed:
            self._tasks.append(task)
            self._note_change()

    def close(self) -> None:
        """There will be no more: `take` ends."""
        with self._changed:
            self._is_closed = True
            self._note_change()

    def nudge(self) -> None:
        """Something has changed that `gather` looks at."""
        with self._changed:
            self._note_change()

    def take(self) -> Task | None:
        """The next one; blocks. None where there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._is_closed)
            self._is_busy = bool(self._tasks)
            return self._tasks.popleft() if self._tasks else None

    def finish(self) -> bool:
        """What was taken is done. Whether nothing is left."""
        with self._changed:
            self._is_busy = False
            return not self._tasks

    def gather(
        self, first: Joint, bounds: Bounds, may_wait: Callable[[Joint], bool]
    ) -> Iterator[Joint]:
        """The jobs of a group, `first` being its first. Only records are taken together, and only
        sealed ones are added. For the thread that takes, which asks for the next when it has
        written the one before it.

        `may_wait(first)`: whether there is time until more records come; asked again after each
        `nudge`.
        """
        yield first
        deadline = time.monotonic() + bounds.seconds
        size = first.size
        while is_plain(first) and size < bounds.bytes:
            seen, job = self._changes, self._tasks[0] if self._tasks else None
            if isinstance(job, Joint) and job.is_complete and is_plain(job):
                self._tasks.popleft()
                size += job.size
                yield job
            elif not (_may_become_one(job) and may_wait(first) and self._wait(seen, deadline)):
                return

    def _wait(self, seen: int, deadline: float) -> bool:
        """Wait until something has changed since. False after the deadline."""
        with self._changed:
            left = deadline - time.monotonic()
            return left > 0 and self._changed.wait_for(lambda: self._changes != seen, left)

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.notify_all()


def _may_become_one(task: Task | None) -> bool:
    """Whether what comes next may be a record that can be taken along; None: nothing is there."""
    return task is None or (isinstance(task, Joint) and not task.is_over and is_plain(task))
