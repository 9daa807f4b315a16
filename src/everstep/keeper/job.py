"""A job: one slot on its way to the disk, and who writes it."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from everstep.keeper.arena import Arena
from everstep.keeper.arrival import Arrival
from everstep.keeper.pack import Speed
from everstep.keeper.ranks.place import ALONE, Place
from everstep.keeper.window import Window
from everstep.store import retain
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk

_HASHERS = min(4, len(os.sched_getaffinity(0)))


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


@dataclass(slots=True)
class Writer:
    """Who writes: one attachment of a trainer. `parent` is the newest checkpoint of its line."""

    disk: Disk
    keep: retain.Keep | None
    epoch: int | None = None
    parent: CheckpointName | None = None
    parent_digest: str | None = None
    run: str | None = None
    place: Place = ALONE
    is_awaited: Callable[[], bool] = lambda: True
    """Whether a trainer lives that wants to know what becomes of it."""
    orphaned: float | None = None
    """Since when there is none, as far as was noticed."""
    unclaimed: str | None = None
    """Why it could not claim an epoch (a full disk): what it saves is in memory only."""
    cache: retain.NeedsCache = field(default_factory=dict)
    speed: Speed = field(default_factory=Speed)
    window: Window = field(default_factory=Window)
    hasher: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_HASHERS, "everstep-digest")
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a commit cost: bytes written, seconds until durable. `squeezed`: which part of its
    gradients' bytes was not written, as they were packed; None where it wrote none. `warning`: what
    failed after it. `is_part`: durable, but committed by a later one. `takes_replay`: it is no
    whole state."""

    name: CheckpointName
    bytes: int
    seconds: float
    squeezed: float | None = None
    warning: str | None = None
    is_part: bool = False
    takes_replay: bool = False
