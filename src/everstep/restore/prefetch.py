"""Reads that are begun before anybody waits for them, in their order, as far as there is memory."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")
Queued = Callable[[], None]
"""To be called when what one reads is queued: what others read may wait behind it."""


@dataclass(frozen=True, slots=True, eq=False)
class Read(Generic[T]):
    """`load` blocks; it runs in another thread. `step`: of the record for which it takes memory;
    None: it takes none, and nothing is to be replayed."""

    load: Callable[[Queued], T | None]
    step: int | None = None


class Ahead(Generic[T]):
    """Reads in the order in which they are wanted. Iterate once; what a read comes to is let go of
    before the next is asked for."""

    def __init__(self, reads: Sequence[Read[T]], steps: int, threads: int, *, is_on_cpu: bool):
        """`steps`: of how many there is memory, the one that is replayed among them. `is_on_cpu`:
        whether memory is free when it is let go of. A device may still compute with it."""
        self._waiting = deque(reads)
        self._steps = steps
        self._is_on_cpu = is_on_cpu
        self._pool = ThreadPoolExecutor(threads, "everstep-records")
        self._lock = threading.Lock()
        self._begun: deque[tuple[Read[T], Future[T | None]]] = deque()
        self._queueing: Read[T] | None = None
        self._replayed: int | None = None
        self._goes_on = False

    def begin(self) -> None:
        """The first, and no other before `put_between` or iterating."""
        with self._lock:
            self._begun.append(self._begin(self._waiting.popleft()))

    def put_between(self, loads: Sequence[Callable[[Queued], None]]) -> None:
        """Read these too, one before each of the first reads; the first was begun."""
        with self._lock:
            first = self._begun.popleft()
            more: list[Read[T]] = [Read(load) for load in loads]
            one, *others = more
            pairs = [(read, self._waiting.popleft()) for read in others]
            self._waiting.extendleft(reversed([read for pair in pairs for read in pair]))
            self._begun += self._begin(one), first
            self._goes_on = True

    def __iter__(self) -> Iterator[T]:
        while self._begun or self._waiting:
            found = self._next().result()
            if found is not None:
                yield found
            del found

    def close(self, *, is_failed: bool) -> None:
        """Begin no others. `is_failed`: wait for those that are begun."""
        with self._lock:
            self._goes_on = False
        self._pool.shutdown(wait=is_failed, cancel_futures=is_failed)

    def later(self, action: Callable[[], None]) -> None:
        """Do it in another thread."""
        self._pool.submit(action)

    def _next(self) -> Future[T | None]:
        """What is to be waited for; what comes after it is begun."""
        with self._lock:
            self._replayed, self._goes_on = None, True
        self._go_on()
        with self._lock:
            read, future = self._begun.popleft()
            self._replayed = read.step
        return future

    def _go_on(self) -> None:
        """Begin the next, if there is memory for it. On the CPU one after the other, as each has
        queued what it reads, so that all is queued in its order."""
        with self._lock:
            if not (self._goes_on and self._waiting) or self._queueing:
                return
            steps = {self._replayed, *(read.step for read, _ in self._begun)} - {None}
            step = self._waiting[0].step
            if step is not None and step not in steps:
                if len(steps) >= self._steps:
                    return
                if not self._is_on_cpu:  # what a device still computes with is not free yet
                    wait(future for read, future in self._begun if read.step is not None)
            self._begun.append(self._begin(self._waiting.popleft()))

    def _begin(self, read: Read[T]) -> tuple[Read[T], Future[T | None]]:
        self._queueing = read if self._is_on_cpu else None
        return read, self._pool.submit(self._run, read)

    def _run(self, read: Read[T]) -> T | None:
        queued = partial(self._queued, read)
        try:
            return read.load(queued)
        finally:
            queued()

    def _queued(self, read: Read[T]) -> None:
        if not self._is_on_cpu:  # begun by who iterates, who may hold the lock and wait for this
            return
        with self._lock:
            if self._queueing is not read:
                return
            self._queueing = None
        self._go_on()
