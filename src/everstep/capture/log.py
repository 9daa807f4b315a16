"""The strategy `log`: a base now and then, and for every step since then a durable record.

    step          100     101     102    ...    150     151
    on the disk   base ◀─ record ◀─ record ◀─ ... ◀─ record   base ◀─ ...

A base comes when the log since the last one has grown to as many bytes as four states: a recovery
then takes about three whole restores, and a log of which retention can delete nothing is bounded.
Or the user fixes it. It is copied at one step where forward and backward are long enough for it,
else piece by piece with the last records before it (window.py).

A crash loses at most the step in flight, at the cost of the gradients' bytes instead of the
state's. Source: LowDiff (SC 2025); the redo log of ARIES.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from everstep.capture.strategy import (
    RECORD_OWNER,
    Captured,
    Chain,
    Last,
    Request,
    Run,
    part_of,
    size_of,
    unowned,
    without,
)
from everstep.capture.unowned import Unowned
from everstep.capture.window import Window, equal_groups, pieces_of, steps_of_base
from everstep.handle import SaveHandle
from everstep.redo.derived import Derived
from everstep.sharding.leaves import Leaf
from everstep.state.view import Collected, Walk

EVERY_MIN, EVERY_MAX = 10, 1000
STATES = 4


class NextBase(NamedTuple):
    """At which step it comes, and over how many it is spread."""

    step: int
    window: int


class Log:
    """Decides for each step between base and record. For the thread that trains."""

    def __init__(self, run: Run, base_every: int | None, derived: Derived) -> None:
        """`base_every`: steps, fixed by the user; None: chosen. `derived`: what rules derive."""
        self._run = run
        self._base_every = base_every
        self._derived = derived
        self._chain: Chain | None = None
        """What records go on from; None: the next is a base."""
        self._base_bytes = 0
        self._base_step = self._base_call = 0
        self._next: NextBase | None = None
        """Decided by the first rank, once it knows how large records are."""
        self._unowned = Unowned((), 0)
        self._last: Last | None = None
        self._window: Window | None = None
        """Of the next base, where it is under way."""
        self._record_bytes = 0
        """How many bytes a record has on the disk, as far as that is known; ..."""
        self._told: SaveHandle | None = None
        """... and the handle that tells it next."""

    def wants(self, step: int) -> bool:
        """See Strategy."""
        del step
        return True

    def choose(self, request: Request, collected: Collected) -> Captured | None:
        """See Strategy."""
        step = request.step
        if problem := self._derived.watch(collected, step):
            self._run.recorder.refuse(problem)
        if self._goes_on(step, collected):
            self._decide(collected.walk)
        else:
            self.break_off()
        is_due = self._window is None and self._is_base_due(step)
        is_due |= self._run.trust.wants_base
        if self._chain is None or request.tag or is_due:
            is_awaited = self._last is not None and self.base_every > 1
            return Captured(collected, is_awaited=is_awaited)
        return self._record(step, collected)

    def begun(self, captured: Captured, handle: SaveHandle) -> None:
        """See Strategy."""
        is_whole = captured.record is None
        if is_whole or captured.ends:
            if self._chain and self._is_base_due(handle.step):
                self._run.trust.note_interval(handle.call)
            if is_whole:
                self._run.trust.wants_base = False
                self._chain = Chain(captured.collected, self._derived.shape(captured.collected))
                self._base_bytes = size_of(captured.collected)
                self._run.recorder.start()
            self._run.recorder.roll(self._run.pace.overlap_s)
            self._window = self._next = None
            others = self._others(captured.collected, captured.collected.walk.leaves)
            self._unowned = Unowned(others, handle.step)
            self._base_step, self._base_call = handle.step, handle.call
        elif captured.share is None:
            if self._told is None or self._told.error:
                self._record_bytes = self._record_bytes or size_of(captured.collected)
                self._told = handle
            elif self._told.bytes is not None:
                self._record_bytes, self._told = self._told.bytes, handle
        assert self._chain
        self._decide(self._chain.walk)
        is_alone = self._run.ranks.world.is_alone
        self._last = Last(handle, self._chain.walk, captured, is_alone=is_alone)

    def break_off(self) -> None:
        """See Strategy."""
        self._chain = self._last = self._window = self._next = self._told = None
        self._run.recorder.stop()

    def current(self, step: int, collect: Callable[[], Collected]) -> SaveHandle | None:
        """See Strategy."""
        found = self._last.current(step, collect) if self._last else None
        is_quiet = found and self._run.recorder.is_quiet and not self._derived.changed()
        return found if is_quiet else None

    def describe(self) -> dict[str, Any]:
        """See Strategy."""
        chosen: dict[str, Any] = {"strategy": "log", "base_every": self.base_every}
        if self._run.trust.by_replica:
            chosen["replica"] = True
        if self._base_every is None:
            sizes = {"base_bytes": self._base_bytes, "record_bytes": self._record_bytes}
            chosen["base_interval"] = sizes
        return chosen

    @property
    def base_every(self) -> int:
        """Steps from one base to the next."""
        if self._base_every is not None:
            return self._base_every
        if not self._record_bytes:
            return EVERY_MIN
        return max(EVERY_MIN, min(EVERY_MAX, STATES * self._base_bytes // self._record_bytes))

    def _decide(self, walk: Walk) -> None:
        """When the next base comes, once for each base: all ranks go by what the first decides."""
        ranks = self._run.ranks
        if self._next is not None or not self._run.trust.plans_bases:
            return
        if ranks.world.rank == 0 and (self._base_every or self._record_bytes):
            by_replica = self._run.trust.by_replica
            every = EVERY_MAX if by_replica else self.base_every
            window = 1 if by_replica else min(self._window_steps(walk), every)
            ranks.tell("base", self._base_call, NextBase(self._base_step + every, window))
        if told := ranks.told("base", self._base_call):
            self._next = NextBase(*told)

    def _window_steps(self, walk: Walk) -> int:
        if self._run.why_undivided():
            return 1
        pieces = pieces_of(self._run.optimizers, walk)
        return steps_of_base(pieces, self._run.figures(walk, pieces), EVERY_MIN)

    def _is_base_due(self, step: int) -> bool:
        return self._next is not None and step >= self._next.step

    def _goes_on(self, step: int, collected: Collected) -> bool:
        """Whether this step can be a record. Raises Unsupported where it is a surprise that it
        cannot."""
        if self._chain is None or self._last is None:
            return False
        goes_on = self._chain.goes_on(collected, self._derived.shape(collected))
        return goes_on and step > self._last.handle.step

    def _record(self, step: int, collected: Collected) -> Captured:
        assert self._last
        run, walk = self._run, collected.walk
        taken = run.recorder.take(walk)
        own, calls = run.ranks.share(taken, RECORD_OWNER)
        pieces, share = self._share(step, walk)
        slices = run.recorder.slices() + self._derived.slices(collected, run.pace.overlap_s)
        left_out: list[str] = []
        if share and share["ends"]:  # a base has all of it
            others, loose = unowned(walk.leaves), collected.loose
        else:
            others = list(self._unowned.changed(self._others(collected, walk.leaves)))
            left_out, collected = without(collected, run.in_bases_alone)
            loose = self._others(collected, collected.loose)
        leaves = (*pieces, *own, *others)  # updates wait for pieces, not for records
        part = part_of(collected, leaves, loose, slices)
        said = {
            "previous": self._last.handle.step,
            "calls": calls,
            "derived": {part: {"rule": True, "digest": None} for part in self._derived.parts},
            "left_out": left_out,
        }
        return Captured(part, said, share, slices, taken.held)

    def _share(self, step: int, walk: Walk) -> tuple[list[Leaf], dict[str, Any] | None]:
        """What of the next base is copied with this record. It is spread over the last steps before
        it is due: the records that bring its pieces to one step are there anyway."""
        if self._window is None:
            coming = self._next
            if coming is None or coming.window == 1 or step <= coming.step - coming.window:
                return [], None
            groups = equal_groups(pieces_of(self._run.optimizers, walk), coming.window)
            self._window = Window(walk, coming.step, groups)
        return self._window.take(step), self._window.share()

    def _others(self, collected: Collected, leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
        """Those that no optimizer owns, nor any rule derives."""
        derived = {id(leaf) for leaf in self._derived.leaves(collected)}
        return tuple(leaf for leaf in unowned(leaves) if id(leaf) not in derived)
