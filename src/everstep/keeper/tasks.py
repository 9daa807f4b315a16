"""What a session's thread has to do, in order; and which of the jobs are committed as a group."""

import threading
from collections import deque
from collections.abc import Callable, Iterator

from everstep.keeper.persist import is_plain
from everstep.keeper.ranks.node_save import Joint

Task = Joint | Callable[[], None]


GROUP_BYTES_MAX = 256 << 20
"""Of records that are committed together."""


class Tasks:
    """A queue for one thread that takes, and any that put."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._is_busy = self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """How many are waiting or in work: what was taken together counts as one."""
        return len(self._tasks) + self._is_busy

    def put(self, task: Task) -> None:
        """At the end."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def close(self) -> None:
        """There will be no more: `take` ends."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

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

    def gather(self, first: Joint) -> Iterator[Joint]:
        """The jobs of a group: `first`, and the records that wait behind it. Only records are taken
        together, and only sealed ones are added. For the thread that takes, which asks for the next
        when it has written the one before it."""
        yield first
        size = first.size
        while is_plain(first) and size < GROUP_BYTES_MAX:
            job = self._tasks[0] if self._tasks else None
            if not (isinstance(job, Joint) and job.is_complete and is_plain(job)):
                return
            self._tasks.popleft()
            size += job.size
            yield job
