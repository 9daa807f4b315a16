"""The copier: what is captured at a step is copied while the next forward and backward run.

    trainer's thread   step(t): eager copies ─┐            ┌─ optimizer pre-hook: wait, check
    copying thread                            └─ lazy copies ─ seal ─▶ keeper: digest, write
    thread of answers                                        keeper: "written" ─ check ─▶ commit

Only tensors that an optimizer owns are copied lazily; its update is held until they are.
Source: DataStates-LLM (arXiv 2406.10707), with the tripwire and the eager copies that it lacks.
"""

import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch

from everstep.capture.copies import MOVERS, Batch, Devices, Landing, Progress
from everstep.capture.copy_speed import CopySpeed, Span, mark
from everstep.capture.layerwise import Early
from everstep.capture.plan import Plan
from everstep.capture.pool import Slot
from everstep.capture.strategy import RECORD_OWNER, Captured
from everstep.errors import EverstepError, Unavailable, Unsupported
from everstep.format.document import seal
from everstep.format.manifest import Stream
from everstep.handle import SaveHandle
from everstep.keeper.arena import Row, SlotState
from everstep.redo.rolling_digest import DIGEST_OWNER, Slice
from everstep.sharding.leaves import Leaf
from everstep.state.fingerprint import Fingerprint, describe
from everstep.state.view import Collected, Walk

log = logging.getLogger("everstep")

_SEAL_S = 5.0
_JOIN_S = 5.0
COPIES_S = 60.0
"""How long the capture of a CUDA graph may be held up."""
OPERATION_S = 1.0
"""So long after the copy no operation is still on that had begun before."""
_OWN_MEMORY = frozenset({RECORD_OWNER, DIGEST_OWNER})
_NOT_WATCHED = _OWN_MEMORY | {None}
"""Whose leaves get no fingerprint here: they are copied at the call; their recorder has one of what
it holds, and the rest is its own; they are written to while they wait to be copied."""
_LOOK_S, _LOOK_MAX_S = 0.0005, 0.004
"""From one look at the frames to the next: each interrupts what runs Python."""


_Bound = dict[int | None, tuple[Batch, Sequence[Leaf], Fingerprint | None]]
"""By owner: how its leaves are copied, those for which that is still to be found out, and how all
are watched."""


Torn = tuple[SaveHandle, list[str], str]
"""A save, what of it was written to while it was copied, and what the user is told."""


@dataclass(slots=True)
class Owned:
    """One optimizer's tensors in one capture."""

    batch: Batch
    """Emptied when it is copied, as the fingerprints when they were looked at: tensors that nobody
    else needs (gradients) are not held up to the next capture."""
    leaves: Sequence[Leaf] = ()
    """Of a record: they keep their memory, so that they are sorted into the batch after the call.
    """
    fingerprints: Sequence[Fingerprint] = ()
    slices: list[Slice] = field(default_factory=list)
    """Of its tensors, to be digested before it may update them."""
    ready: threading.Event = field(default_factory=threading.Event)
    ends: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    checked: bool = False

    @property
    def devices(self) -> set[torch.device]:
        """The GPUs off which something is copied, or on which it is digested."""
        found: set[torch.device] = set(self.batch.on_device)
        found |= {leaf.tensor.device for leaf in self.leaves if leaf.tensor.is_cuda}
        return found.union(*(each.devices for each in self.slices))

    def digest(self) -> None:
        """Digest what is left of its slices: then its update may come. Copying thread."""
        while self.slices:
            self.slices.pop().digest()
        self.ready.set()


@dataclass(slots=True)
class Capture:
    """One state on its way into a slot, and whether its copy is clean.

    Its lazily copied tensors have fingerprints by owner. torch counts a write when it ends, so
    that whether somebody else than the owner wrote to them while they were copied is known when the
    operation has ended that the trainer's thread was in then. A frame of Python is in one operation
    at a time: it has ended when the innermost frame has moved on, but for what runs Python in its
    midst (a TorchDispatchMode, the user's own autograd.Function).
    """

    handle: SaveHandle
    slot: Slot
    plan: Plan
    description: dict[str, Any]
    owned: dict[int, Owned]
    begins: dict[torch.device, torch.cuda.Event]
    eager: list[Landing]
    devices: set[torch.device]
    keep_alive: Collected | None
    torn: "queue.SimpleQueue[Torn]"
    """Gets what was written to while it was copied."""
    streams: Mapping[str, Future[Stream]] = field(default_factory=dict)
    """What its descriptor names when it is sealed."""
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

    @property
    def row(self) -> Row:
        """Its row in the job table."""
        sizes = self.plan.layout.size, len(self.plan.table), len(self.descriptor)
        return Row(self.slot.sequence, self.step, *sizes)

    def note_copied(self) -> None:
        """All of it has arrived, or it is given up. Copying thread."""
        self._copied_at = time.monotonic()
        if frame := sys._current_frames().get(self.trainer):
            self._frame = id(frame), frame.f_lasti
        self.copied.set()

    def check(self, owner: int | None = None, *, is_sure: bool = True) -> str | None:
        """Whether the copy of this owner's tensors, or all of it, is clean; remembers a torn one.
        `is_sure`: what is clean stays that: it is copied, and no operation of before is still on.

        A thread that comes after the update had been allowed finds `checked` set and changed
        tensors: that is as it should be, hence the order of the two looks."""
        for index, owned in self.owned.items():
            fingerprints = owned.fingerprints
            if owner not in (None, index) or owned.checked:
                continue
            changed = [name for each in fingerprints for name in each.changed()]
            if changed and not owned.checked and not self.problem:
                self.problem = describe(self.step, changed)
                self.torn.put((self.handle, changed, self.problem))
            if changed or is_sure:
                owned.checked = True
                owned.fingerprints = ()
        return self.problem

    def is_checked(self) -> bool:
        """Whether all of it has been found clean or torn."""
        return all(owned.checked for owned in self.owned.values())

    def await_check(self) -> str | None:
        """The same from any thread; blocks until what was going on in the trainer's thread when the
        copy was made has ended."""
        self.copied.wait()
        if threading.get_ident() != self.trainer and not self.is_checked():
            self.check(is_sure=False)  # what is torn is known at once
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


class Copier:
    """Copies what is captured. `begin` and `hold` are for the trainer's thread."""

    def __init__(
        self,
        announce: Callable[[Capture], Callable[[int], None] | None],
        seal: Callable[[Capture], None],
        fail: Callable[[Capture, EverstepError, bool], None],
        pace: CopySpeed,
    ) -> None:
        """`announce` is called in the copying thread when the copies begin; it returns whom to tell
        how much of the image has arrived, or None where nobody is to be told. `seal` when all is
        copied; `fail` where that went wrong, and whether the keeper has to free the slot. `pace` is
        told how fast all this goes."""
        self._announce = announce
        self._seal = seal
        self._fail = fail
        self._pace = pace
        self._queue: queue.SimpleQueue[Capture | Callable[[], None] | None] = queue.SimpleQueue()
        self._open: list[Capture] = []
        self._is_sealing = True
        self._bound: tuple[Walk, Plan, _Bound] | None = None
        self.devices = Devices()
        self._movers = ThreadPoolExecutor(MOVERS, "everstep-move")
        self._copied: queue.SimpleQueue[Capture | Callable[[], None] | None] = queue.SimpleQueue()
        self._last: Capture | None = None
        self._torn: queue.SimpleQueue[Torn] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._copy_all, name="everstep-copy", daemon=True),
            threading.Thread(target=self._seal_all, name="everstep-seal", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def begin(
        self,
        handle: SaveHandle,
        captured: Captured,
        plan: Plan,
        slot: Slot,
        description: dict[str, Any],
        early: Early | None = None,
    ) -> Capture:
        """Copy what must be copied at the call; the rest is for `go_on`, and so are digests. What
        was copied `early` into the slot is left out.

        On CUDA the eager copies are enqueued on the current stream of each device, after the work
        that is there, before all that comes; the host does not wait.
        """
        collected = captured.collected
        left_out = early.entries if early else plan.entries_of(captured.kept)
        bound = self._bind(collected.walk, plan, left_out)
        eager = Batch.of(collected.loose, plan)
        owned = {
            owner: Owned(batch, leaves, [seen.again(handle.step)] if seen else [])
            for owner, (batch, leaves, seen) in bound.items()
            if owner is not None
        }
        if RECORD_OWNER in owned:
            owned[RECORD_OWNER].fingerprints = captured.held
        for slice_ in captured.slices:
            owned.setdefault(slice_.owner, Owned(Batch())).slices.append(slice_)
        # Updates wait for what optimizers own; digests lie at the image's end, and take a while.
        last = {RECORD_OWNER: 1, DIGEST_OWNER: 2}
        owned = dict(sorted(owned.items(), key=lambda row: last.get(row[0], 0)))
        batches = [eager, *(batch for owner, (batch, *_) in bound.items() if owner is None)]
        lazy = {device for part in owned.values() for device in part.devices}
        devices = {device for batch in batches for device in batch.on_device} | lazy
        self.devices.use(devices)
        eager_landings = self._copy_eagerly(batches, slot) + (early.landings if early else [])
        begins = {device: mark(device) for device in lazy}
        return Capture(
            handle,
            slot,
            plan,
            description,
            owned,
            begins,
            eager_landings,
            devices,
            collected,
            self._torn,
        )

    def settle(self) -> None:
        """Before the state is looked at again, and memory for it is waited for.

        The step before is sealed before this one's call returns: so a death now loses one step,
        and not two. That is long done, but where steps take milliseconds or the keeper hangs; then
        training goes on after a while, without waiting again until a seal has worked."""
        last, patience = self._last, _SEAL_S if self._is_sealing else 0
        self._is_sealing = last is None or last.sealed.wait(patience)
        self._look()

    def take_torn(self) -> list[Torn]:
        """The captures that were found torn since this was asked last: mostly the last one, but
        also older ones, where no update was held for them. Trainer's thread."""
        return [self._torn.get() for _ in range(self._torn.qsize())]

    def go_on(self, capture: Capture) -> None:
        """Let the copying thread make the lazy copies."""
        self._last = capture
        self._pace.called(capture.begins)
        self._open = [older for older in self._open if not older.is_checked()]
        self._open.append(capture)
        self._queue.put(capture)

    def was_given(self, slot: Slot) -> bool:
        """Whether the capture in this slot came so far as `go_on`."""
        return self._last is not None and self._last.slot is slot

    def give_up(self, capture: Capture, problem: str) -> None:
        """An interrupt (Ctrl-C) came, perhaps in `go_on`: nothing is to come of this one."""
        capture.problem = capture.problem or problem
        self._last = capture
        self._queue.put(capture)  # again, perhaps

    def hold(self, owner: int) -> None:
        """Before an optimizer's update: wait for the copies of its tensors, and check that they are
        clean.

        The host waits only until they are enqueued (CPU: made); the device's current stream waits
        for the rest.
        """
        self._pace.updating()
        for capture in self._open:
            owned = capture.owned.get(owner)
            if owned and not owned.checked:
                owned.ready.wait()
                for device, end in owned.ends.items():
                    torch.cuda.current_stream(device).wait_event(end)
                capture.check(owner)
        self._look()

    def _look(self) -> None:
        """Whether what is copied by now is clean: nothing is committed before that is known."""
        for capture in self._open:
            if capture.copied.is_set() and not capture.is_checked():
                capture.check()

    def await_copies(self) -> None:
        """Before updates that nobody can hold: block until what was begun is copied, up to
        COPIES_S. What is not by then is given up, as nobody could tell what it is of."""
        deadline = time.monotonic() + COPIES_S
        for capture in self._open:
            if not capture.copied.wait(max(0.0, deadline - time.monotonic())):
                capture.problem = capture.problem or (
                    f"saving step {capture.step}: it was not copied within {COPIES_S:.0f} s when "
                    f"updates came that no copy can hold (those of a CUDA graph, or of "
                    f"overlap=True). Call checkpointer.wait('captured') before"
                )
        self._look()

    def in_order(self, task: Callable[[], None]) -> None:
        """Do it, in another thread, when all that was begun is sealed or given up. Any thread."""
        (self._copied if threading.current_thread() in self._threads else self._queue).put(task)

    def close(self) -> None:
        """End the copying thread when its queue is empty; hold nothing any more."""
        self._open, self._last = [], None
        self._queue.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _bind(self, walk: Walk, plan: Plan, left_out: Set[str]) -> _Bound:
        if self._bound and self._bound[0] is walk and self._bound[1] is plan and not left_out:
            return self._bound[2]
        sharded = _by_owner(walk.sharded)
        leaves: Iterable[Leaf] = walk.leaves
        if left_out:
            leaves = (leaf for leaf in leaves if leaf.entry not in left_out)
        found = _by_owner(leaves)
        parts: _Bound = {}
        for owner, own in found.items():
            watched = () if owner in _NOT_WATCHED else (*own, *sharded.get(owner, ()))
            now, later = ((), own) if owner in _OWN_MEMORY else (own, ())
            parts[owner] = Batch.of(now, plan), later, Fingerprint(watched) if watched else None
        if not left_out and RECORD_OWNER not in parts:  # a record's do not come again
            self._bound = (walk, plan, parts)
        return parts

    def _copy_eagerly(self, batches: list[Batch], slot: Slot) -> list[Landing]:
        landings = []
        for batch in batches:
            batch.copy_from_cpu(slot.arena, slot.index)
            for device in batch.on_device:
                with torch.cuda.device(device):
                    landings += batch.enqueue_from(device, slot.arena, slot.index)
        return landings

    def _copy_all(self) -> None:
        while capture := self._queue.get():
            if not isinstance(capture, Capture):
                self._copied.put(capture)
                continue
            if capture.copied.is_set():  # see give_up
                continue
            try:
                self._copy_one(capture)
            except Exception as error:  # noqa: BLE001 - reaches the handle; training goes on
                self._give_up(capture, error)
            else:
                self._copied.put(capture)
        self._movers.shutdown()
        self._copied.put(None)

    def _seal_all(self) -> None:
        """A thread of its own: sealing may wait for the keeper, which copies must not do."""
        while capture := self._copied.get():
            if not isinstance(capture, Capture):
                capture()
                continue
            try:
                self._seal(capture)
            except Exception as error:  # noqa: BLE001 - reaches the handle; training goes on
                self._give_up(capture, error)
            capture.sealed.set()

    def _give_up(self, capture: Capture, error: Exception) -> None:
        if not isinstance(error, EverstepError):
            log.error("capturing step %s", capture.step, exc_info=error)
            error = Unavailable(f"capturing step {capture.step}: {error!r}")
        arena, index = capture.slot.arena, capture.slot.index
        is_announced = arena.state(index) is SlotState.ANNOUNCED
        arena.set_state(index, SlotState.TORN if is_announced else SlotState.FREE)
        self._fail(capture, error, is_announced)
        capture.sealed.set()

    def _copy_one(self, capture: Capture) -> None:
        """Whatever happens, no update waits for ever."""
        try:
            self._copy(capture)
        except Exception:
            self.devices.synchronize()  # nothing may arrive in a slot that is free
            raise
        finally:
            for owned in capture.owned.values():
                owned.ready.set()
                owned.batch, owned.leaves, owned.slices = Batch(), (), []
            capture.keep_alive = None
            capture.note_copied()

    def _copy(self, capture: Capture) -> None:
        began, slot = time.monotonic(), capture.slot
        tell = self._announce(capture) or (lambda count: None)
        for owned in capture.owned.values():
            if owned.leaves:
                owned.batch = Batch.of(owned.leaves, capture.plan)
        starts = [start for owned in capture.owned.values() for start in owned.batch.starts()]
        starts += [start for _, start in capture.eager]
        progress = Progress(starts, capture.plan.layout.size, tell)
        for device in capture.devices:
            self.devices.pin(slot.arena, device)
        landings, spans = list(capture.eager), list[Span]()
        for owner, owned in capture.owned.items():
            landings += self._enqueue(capture, owned, spans)
            if owner == DIGEST_OWNER:  # the last one: the keeper works on the record meanwhile
                for other in capture.owned.values():
                    other.digest()
            owned.batch.copy_from_cpu(slot.arena, slot.index, self._movers, progress.arrived)
            if owned.batch or not owned.slices:  # its update waits for no record
                owned.digest()
        for event, start in landings:
            event.synchronize()
            progress.arrived(start)
        self._pace.copied(spans, capture.plan.layout.size, time.monotonic() - began)
        if problem := capture.problem:
            raise Unsupported(problem)

    def _enqueue(self, capture: Capture, owned: Owned, spans: list[Span]) -> list[Landing]:
        """The copies of one owner's tensors off CUDA devices; `spans` gets when each device makes
        them."""
        landings: list[Landing] = []
        for device in owned.devices:
            stream = self.devices.stream(device)
            with torch.cuda.device(device), torch.cuda.stream(stream):
                stream.wait_event(capture.begins[device])
                for slice_ in owned.slices:
                    slice_.enqueue_on(device)
                begin = mark(device)
                landings += owned.batch.enqueue_from(device, capture.slot.arena, capture.slot.index)
                if size := owned.batch.size_on(device):
                    spans.append(Span(device, begin, mark(device), size))
                owned.ends[device] = end = torch.cuda.Event(blocking=True)
                end.record(stream)
        return landings


def _by_owner(leaves: Iterable[Leaf]) -> dict[int | None, list[Leaf]]:
    owners: dict[int | None, list[Leaf]] = {}
    for owner, members in groupby(leaves, attrgetter("owner")):
        owners.setdefault(owner, []).extend(members)
    return owners
