"""A job: one slot on its way to the disk, and how much of its image has arrived."""

import threading
from dataclasses import dataclass, field
from typing import Any

from everstep.errors import Corrupt, EverstepError, Unsupported
from everstep.format.document import unseal
from everstep.keeper.arena import Arena, Row, SlotState

ALL = 1 << 62


@dataclass(slots=True, eq=False)
class Job:
    """One slot on its way. Its bytes arrive from the start on, and do not change any more then;
    the trainer's `answer` comes last, and its death is one too.

    Thread-safe: the trainer's messages advance it, the threads that write and digest wait.
    """

    arena: Arena
    slot: int
    sequence: int
    written: bool = False
    answered: threading.Event = field(default_factory=threading.Event)
    problem: str | None = None
    is_taken: bool = False
    """Whether somebody works on the image: it stays where it is, then."""
    _bytes: int = 0
    _given_up: str | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return self._bytes == ALL

    @property
    def over(self) -> bool:
        """Whether the trainer has let go of the slot: all is there, or will never be."""
        return self.complete or self._given_up is not None

    def advance(self, count: int) -> None:
        """`count` bytes are there; ALL for the whole image. Fewer than before change nothing."""
        with self._changed:
            self._bytes = max(self._bytes, count)
            self._changed.notify_all()

    def give_up(self, problem: str) -> None:
        """The rest will never come, and what is there is worth nothing."""
        with self._changed:
            self._given_up = None if self.complete else problem
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Block until `count` bytes are there. Raises Unsupported where they never will be."""
        if self._bytes >= count and self._given_up is None:  # as mostly, and for each small tensor
            return
        with self._changed:
            self._changed.wait_for(lambda: self._bytes >= count or self._given_up is not None)
            if self._given_up is not None:
                raise Unsupported(self._given_up)

    def wait_until_over(self) -> None:
        """Block until the trainer has let go of the slot."""
        with self._changed:
            self._changed.wait_for(lambda: self.over)

    def take(self) -> None:
        """The image stays where it is from now on. Whoever reads it calls this first."""
        with self._changed:
            self.is_taken = True

    def move(self, arena: Arena, slot: int) -> bool:
        """All of it lies in another slot as well, and is read from there from now on. False where
        it is taken already."""
        with self._changed:
            if not self.is_taken:
                self.arena, self.slot = arena, slot
            return not self.is_taken

    @property
    def state(self) -> SlotState:
        """The slot's."""
        return self.arena.state(self.slot)

    @property
    def row(self) -> Row:
        """The slot's. Raises Corrupt."""
        with self._changed:
            row = self.arena.row(self.slot)
        if row:
            return row
        raise Corrupt(f"reading slot {self.slot} of the arena: its row is not whole")

    @property
    def step(self) -> int:
        """The step. One whose row is not whole counts as older than all: it fails alone."""
        with self._changed:
            row = self.arena.row(self.slot)
        return row.step if row else -1

    @property
    def said(self) -> dict[str, Any]:
        """What the trainer says of the step. Raises Corrupt."""
        with self._changed:
            return unseal(self.arena.descriptor(self.slot, self.row), "a descriptor in the arena")

    @property
    def call(self) -> int:
        """Which of the trainer's calls that save it is of; 0 where that cannot be read."""
        try:
            return int(self.said.get("call", 0))
        except EverstepError:
            return 0

    @property
    def table(self) -> bytes:
        """The piece table. Raises Corrupt."""
        return bytes(self.arena.table(self.slot, self.row))

    @property
    def image(self) -> memoryview:
        """The packs. Raises Corrupt."""
        return self.arena.image(self.slot)[: self.row.image_size]

    def answer(self, problem: str | None) -> None:
        """What the trainer says of the copy, from any thread: None, or how it was torn."""
        self.problem = problem
        self.answered.set()


@dataclass(frozen=True, slots=True)
class Gap:
    """A step that a rank has left out."""

    step: int
    call: int
    reason: str
