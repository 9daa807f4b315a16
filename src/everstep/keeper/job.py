"""A job: one slot on its way to the disk, how much of its image has arrived."""

import threading
from dataclasses import dataclass, field

from everstep.errors import Unsupported
from everstep.keeper.arena import Arena

ALL = 1 << 62


class Arrival:
    """The bytes of one slot's image, from its start on, that will not change any more.

    Thread-safe: the trainer's messages advance it, the threads that write and digest wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bytes = 0
        self._problem: str | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return self._bytes == ALL

    @property
    def over(self) -> bool:
        """Whether the trainer has let go of the slot: all is there, or will never be."""
        return self.complete or self._problem is not None

    def advance(self, count: int) -> None:
        """`count` bytes are there; ALL for the whole image. Fewer than before change nothing."""
        with self._changed:
            self._bytes = max(self._bytes, count)
            self._changed.notify_all()

    def give_up(self, problem: str) -> None:
        """The rest will never come, and what is there is worth nothing."""
        with self._changed:
            self._problem = None if self.complete else problem
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Block until `count` bytes are there. Raises Unsupported where they never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes >= count or self._problem is not None)
            if self._problem is not None:
                raise Unsupported(self._problem)

    def wait_until_over(self) -> None:
        """Block until the trainer has let go of the slot."""
        with self._changed:
            self._changed.wait_for(lambda: self.over)


@dataclass(slots=True)
class Job:
    """One slot on its way. The trainer's `answer` comes last; its death is one too."""

    arena: Arena
    slot: int
    sequence: int
    arrival: Arrival = field(default_factory=Arrival)
    written: bool = False
    answered: threading.Event = field(default_factory=threading.Event)
    problem: str | None = None

    @property
    def size(self) -> int:
        """Bytes of its image; 0 where its row is not whole."""
        row = self.arena.row(self.slot)
        return row.image_size if row else 0

    def answer(self, problem: str | None) -> None:
        """What the trainer says of the copy, from any thread: None, or how it was torn."""
        self.problem = problem
        self.answered.set()
