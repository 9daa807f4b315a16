"""A capture: one state on its way into a slot, and whether its copy is clean.

Its lazily copied tensors have a fingerprint each owner. torch counts a write when it ends, so that
whether somebody else than the owner wrote to them while they were copied is known when the
operation has ended that the trainer's thread was in then. A frame of Python is in one operation at
a time: it has ended when the innermost frame has moved on, but for what runs Python in its midst (a
TorchDispatchMode, the user's own autograd.Function).
"""

import math
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.capture.copies import Batch, Landing
from everstep.capture.plan import Plan
from everstep.capture.pool import Slot
from everstep.format.document import seal
from everstep.handle import SaveHandle
from everstep.keeper.arena import Row
from everstep.redo.rolling_digest import Slice
from everstep.state.fingerprint import Fingerprint, describe
from everstep.state.view import Collected

OPERATION_S = 1.0
"""So long after the copy no operation is still on that had begun before."""
_LOOK_S, _LOOK_MAX_S = 0.0005, 0.02
"""From one look at the frames to the next: each interrupts what runs Python."""


@dataclass(slots=True)
class Owned:
    """One optimizer's tensors in one capture."""

    batch: Batch
    """Emptied when it is copied, as the fingerprint when it was looked at: tensors that nobody else
    needs (gradients) are not held up to the next capture."""
    fingerprint: Fingerprint | None
    slices: list[Slice] = field(default_factory=list)
    """Of its tensors, to be digested before it may update them."""
    ready: threading.Event = field(default_factory=threading.Event)
    ends: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    checked: bool = False
    is_torn: bool = False

    @property
    def devices(self) -> set[torch.device]:
        """The GPUs off which something is copied, or on which it is digested."""
        found: set[torch.device] = set(self.batch.on_device)
        return found.union(*(each.devices for each in self.slices))


@dataclass(slots=True)
class Capture:
    """One state on its way into a slot."""

    handle: SaveHandle
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
    _frame: tuple[int, int] | None = None
    """The innermost of the trainer's thread then, by id(), and its instruction."""
    _descriptor: bytes = b""

    @property
    def step(self) -> int:
        """Whose state it is."""
        return self.handle.step

    @property
    def descriptor(self) -> bytes:
        """The description as a sealed document; made by who asks first, which is no trainer."""
        self._descriptor = self._descriptor or seal(self.description)
        return self._descriptor

    def note_copied(self) -> None:
        """All of it has arrived, or it is given up. Copying thread."""
        self._copied_at = time.monotonic()
        if frame := sys._current_frames().get(self.trainer):
            self._frame = id(frame), frame.f_lasti
        self.copied.set()

    def check(self, owner: int | None = None) -> str | None:
        """Whether the copy of this owner's tensors, or all of it, is clean; remembers a torn one.
        When that is copied, in the thread that trains, or is about to update them."""
        return self._look(owner, is_sure=True)

    def is_checked(self) -> bool:
        """Whether all of it has been found clean or torn."""
        return all(owned.checked for owned in self.owned.values())

    def await_check(self) -> str | None:
        """The same from any thread; blocks until what was going on in the trainer's thread when the
        copy was made has ended."""
        self.copied.wait()
        if threading.get_ident() != self.trainer and not self.is_checked():
            self._look(None, is_sure=False)  # what is torn is known at once
            pause, until = _LOOK_S, self._copied_at + OPERATION_S
            while not self.is_checked() and self._is_in_operation() and time.monotonic() < until:
                time.sleep(pause)
                pause = min(2 * pause, _LOOK_MAX_S)
        return self.check()

    def _is_in_operation(self) -> bool:
        """Whether the trainer's thread may still be in what it was in when all had been copied."""
        frame = sys._current_frames().get(self.trainer) if self._frame else None
        while frame and id(frame) != (self._frame or (0,))[0]:
            frame = frame.f_back
        return frame is not None and (id(frame), frame.f_lasti) == self._frame

    def _look(self, owner: int | None, *, is_sure: bool) -> str | None:
        """A thread that comes after the update had been allowed finds `checked` set and changed
        tensors: that is as it should be, hence the order of the two looks."""
        for index, owned in self.owned.items():
            fingerprint = owned.fingerprint
            if owner not in (None, index) or owned.checked:
                continue
            changed = fingerprint.changed() if fingerprint else []
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
