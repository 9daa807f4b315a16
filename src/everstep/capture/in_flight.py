"""A capture: one state on its way into a slot, and whether its copy is clean.

Its lazily copied tensors have a fingerprint each owner. Whether somebody else than the owner wrote
to them while they were copied is known when the trainer's thread has been in no operation since:
torch counts a write when it ends.
"""

import math
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.capture.between import Moment
from everstep.capture.copies import Batch, Landing
from everstep.capture.plan import Plan
from everstep.capture.pool import Slot
from everstep.format.document import seal
from everstep.keeper.arena import Row
from everstep.state.fingerprint import Fingerprint, describe
from everstep.state.view import Collected

OPERATION_S = 1.0
"""So long after the copy no operation is still on that had begun before."""


@dataclass(slots=True)
class Owned:
    """One optimizer's tensors in one capture."""

    batch: Batch
    """Emptied when it is copied, as the fingerprint when it was looked at: tensors that nobody else
    needs (gradients) are not held up to the next capture."""
    fingerprint: Fingerprint | None
    ready: threading.Event = field(default_factory=threading.Event)
    ends: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    checked: bool = False
    is_torn: bool = False


@dataclass(slots=True)
class Capture:
    """One state on its way into a slot."""

    step: int
    sequence: int
    slot: Slot
    plan: Plan
    description: dict[str, Any]
    owned: dict[int, Owned]
    begins: dict[torch.device, torch.cuda.Event]
    eager: list[Landing]
    devices: set[torch.device]
    keep_alive: Collected | None
    torn: "queue.SimpleQueue[list[str]]"
    """Gets the names of what was written to while it was copied."""
    trainer: int = field(default_factory=threading.get_ident)
    """The thread that called."""
    problem: str | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when all of it has arrived in the slot, or it has been given up."""
    sealed: threading.Event = field(default_factory=threading.Event)
    """Set when it has been sealed, or given up."""
    _copied_at: float = math.inf
    _was_between: Moment = field(default_factory=Moment)
    """At which the trainer's thread was in no operation since."""
    _descriptor: bytes = b""

    @property
    def descriptor(self) -> bytes:
        """The description as a sealed document; made by who asks first, which is no trainer."""
        self._descriptor = self._descriptor or seal(self.description)
        return self._descriptor

    def note_copied(self) -> None:
        """All of it has arrived, or it is given up. Copying thread."""
        self._copied_at = time.monotonic()
        self.copied.set()
        if self.trainer == threading.main_thread().ident:
            self._was_between.ask_main_thread()

    def check(self, owner: int | None = None) -> str | None:
        """Whether the copy of this owner's tensors, or all of it, is clean; remembers a torn one.
        When that is copied, in the thread that trains, or is about to update them."""
        problem = self._look(owner, is_sure=True)
        if self.is_checked():
            self._was_between.come()
        return problem

    def is_checked(self) -> bool:
        """Whether all of it has been found clean or torn."""
        return all(owned.checked for owned in self.owned.values())

    def await_check(self) -> str | None:
        """The same from any thread; blocks until what was going on in the trainer's thread when the
        copy was made has ended."""
        self.copied.wait()
        if threading.get_ident() != self.trainer and not self.is_checked():
            self._look(None, is_sure=False)  # what is torn is known at once
            if not self.is_checked():
                self._was_between.wait(self._copied_at + OPERATION_S)
        return self.check()

    def _look(self, owner: int | None, *, is_sure: bool) -> str | None:
        """A thread that comes after the update had been allowed finds `checked` set and changed
        tensors: that is as it should be, hence the order of the two looks."""
        for index, owned in self.owned.items():
            fingerprint = owned.fingerprint
            if owner not in (None, index) or owned.checked or fingerprint is None:
                continue
            changed = fingerprint.changed()
            if changed and not owned.checked and not self.problem:
                self.torn.put(changed)
                self.problem = describe(self.step, changed)
            if changed or is_sure:
                owned.is_torn |= bool(changed)
                owned.checked = True
                owned.fingerprint = None
        return self.problem


def row_of(capture: Capture) -> Row:
    """The capture's row in the job table."""
    return Row(
        capture.sequence,
        capture.step,
        capture.plan.layout.size,
        len(capture.plan.table),
        len(capture.descriptor),
    )
