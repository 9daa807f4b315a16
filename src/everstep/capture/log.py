"""The strategy `log`: a base now and then, and for every step since then a durable record.

    step          100     101     102    ...    150     151
    on the disk   base ◀─ record ◀─ record ◀─ ... ◀─ record   base ◀─ ...

A base is copied at one step where forward and backward are long enough for it, else piece by piece
with the last records before it (window_partition.py).

A crash loses at most the step in flight, at the cost of the gradients' bytes instead of the
state's. Source: LowDiff (SC 2025); the redo log of ARIES.
"""

from collections.abc import Callable
from typing import Any

from everstep.capture.base_interval import EVERY_MIN, BaseInterval
from everstep.capture.captured import (
    RECORD_OWNER,
    Captured,
    Seen,
    moved,
    part_of,
    reserved,
    shape_of,
    size_of,
    unowned,
)
from everstep.capture.copy_speed import CopySpeed, choose_window
from everstep.capture.rank_agreement import NextBase, RankAgreement
from everstep.capture.trust import Trust
from everstep.capture.unowned import Unowned
from everstep.capture.window_partition import Pieces, why_undivided
from everstep.errors import Unsupported
from everstep.handle import SaveHandle
from everstep.redo.coupling import why_coupled
from everstep.redo.derived import Derived
from everstep.redo.recorder import Recorder
from everstep.sharding.leaves import Leaf
from everstep.state.optimizers import OptimizerState
from everstep.state.view import Collected, Walk


class Log:
    """Decides for each step between base and record. For the thread that trains."""

    def __init__(
        self,
        optimizers: list[OptimizerState],
        recorder: Recorder,
        trust: Trust,
        interval: BaseInterval,
        pace: CopySpeed,
        derived: Derived | None = None,
        ranks: RankAgreement | None = None,
    ) -> None:
        """`interval`: from one base to the next; it gets its figures here. `pace`: by which a base
        is spread over steps. `derived`: what rules derive. `ranks`: of several."""
        self.interval = interval
        self._optimizers = optimizers
        self._recorder = recorder
        self._trust = trust
        self._pace = pace
        self._derived = derived
        self._ranks = ranks
        self._is_whole_only = why_coupled(optimizers) is not None
        self._base: Walk | None = None
        """Of the base that records go on from; None: the next is one."""
        self._is_undivided = False
        """Whether the optimizers' state of this walk cannot be copied piece by piece."""
        self._shape: tuple[Any, ...] = ()
        self._base_aliases: dict[str, list[str]] = {}
        self._base_derived: Any = None
        self._unowned = Unowned((), 0)
        self._last: SaveHandle | None = None
        self._seen: Seen | None = None
        self._pieces: Pieces | None = None
        self._keeper = trust.keeper
        self._base_due = 0

    def wants(self, step: int) -> bool:
        """See Strategy."""
        del step
        return True

    def choose(
        self, step: int, collected: Collected, *, asked: bool, tagged: bool
    ) -> Captured | None:
        """See Strategy."""
        del asked
        if self._derived and (problem := self._derived.watch(collected, step)):
            self._recorder.refuse(problem)
        if self._ranks is None and self._keeper != self._trust.keeper:
            self._pieces = None  # they were with the one that died
        self._keeper = self._trust.keeper
        if self._base:
            self._check(step, collected)
        is_due = self._pieces is None and self._is_base_due(step)
        if self._base is None or tagged or is_due:
            is_awaited = self._last is not None and self.interval.steps > 1
            return Captured(collected, is_awaited=is_awaited)
        return self._record(step, collected)

    def begun(self, captured: Captured, handle: SaveHandle) -> None:
        """See Strategy."""
        self._last = handle
        self._seen = Seen.of(captured.collected)
        share = captured.share
        if captured.record is not None and share is None:
            leaves = (*captured.collected.walk.leaves, *captured.collected.loose)
            self.interval.note_record(handle, sum(leaf.tensor.nbytes for leaf in leaves))
        if captured.record is None or (share and share["ends"]):
            if self._base and self._is_base_due(handle.step):
                self._trust.note_interval(handle.call)
            if captured.record is None:
                self._begin_base(captured.collected)
            self._pieces = None
            self._recorder.roll(self._pace.overlap_s)
            self._unowned = Unowned(self._others(captured.collected), handle.step)
            self.interval.note_base(handle.step)
            self._tell_base(handle.step)

    def break_off(self) -> None:
        """See Strategy."""
        self._base = self._last = self._pieces = None
        self._recorder.stop()

    def current(self, step: int, collect: Callable[[], Collected]) -> SaveHandle | None:
        """See Strategy."""
        last = self._last
        if self._base is None or last is None or last.step != step or last.error is not None:
            return None
        collected = collect()
        if self._derived and self._derived.changed():
            return None
        is_same = self._base is collected.walk and self._recorder.is_quiet and self._seen
        return last if is_same and is_same.is_still(collected, is_alone=not self._ranks) else None

    def describe(self) -> dict[str, Any]:
        """See Strategy."""
        return {"strategy": "log", **self.interval.describe()}

    def _begin_base(self, collected: Collected) -> None:
        self._shape = shape_of(collected.walk)
        self._follow(collected.walk)
        self.interval.base_bytes = size_of(collected)
        self._base_aliases = _owned_aliases(collected)
        self._base_derived = self._derived and self._derived.shape(collected)
        self._recorder.start()

    def _follow(self, walk: Walk) -> None:
        """Records go on from the base by this walk."""
        self._base = walk
        self._is_undivided = self._is_whole_only or why_undivided(self._optimizers) is not None

    def _check(self, step: int, collected: Collected) -> None:
        """Whether records may go on from the base; else there is none from here on. Raises
        Unsupported where that is a surprise."""
        assert self._base
        assert self._last
        is_next = step > self._last.step and self._base_aliases == _owned_aliases(collected)
        is_next &= self._base_derived == (self._derived and self._derived.shape(collected))
        if self._base is not collected.walk:
            shape, before = shape_of(collected.walk), self._shape
            if shape == before:
                self._follow(collected.walk)
            elif found := moved(before, shape):
                raise Unsupported(
                    f"{', '.join(map(repr, found[:5]))} {'are' if len(found) > 1 else 'is'} "
                    f"another tensor, or in other memory, than before (by `.data = ...` or "
                    f"load_state_dict(), perhaps), which no record tells. Write into what is there"
                )
            elif not _grows(before, shape):
                raise Unsupported("the state has other tensors than at the base")
            else:
                is_next = False
        if not is_next:
            self.break_off()

    def _record(self, step: int, collected: Collected) -> Captured:
        if taken := reserved((*collected.walk.leaves, *collected.loose)):
            raise Unsupported(f"{taken[0]!r} is a name that records use. Rename it")
        assert self._last
        tensors, calls = self._recorder.take()
        pieces, share = self._share(step, collected.walk)
        derived: dict[str, Any] = {}
        slices = self._recorder.slices()
        if self._derived:
            derived = self._derived.describe()
            slices += self._derived.slices(collected, self._pace.overlap_s)
        recorded: tuple[Leaf, ...]
        if self._ranks:
            recorded, calls = self._ranks.share(tensors, calls, RECORD_OWNER)
        else:
            recorded = tuple(Leaf(name, each, RECORD_OWNER) for name, each in tensors.items())
        if share and share["ends"]:  # a base has all of it
            others, loose = tuple(unowned(collected.walk.leaves)), collected.loose
        else:
            others = self._unowned.changed(self._others(collected))
            loose = self._without_derived(collected, collected.loose)
        digests = (leaf for each in slices for leaf in each.leaves)
        leaves = (*pieces, *recorded, *others, *digests)  # updates wait for pieces, not for records
        said = {"previous": self._last.step, "calls": calls, "derived": derived}
        return Captured(part_of(collected, leaves, loose), said, share, slices)

    def _others(self, collected: Collected) -> tuple[Leaf, ...]:
        """What no optimizer owns, nor any rule derives."""
        return self._without_derived(collected, collected.walk.leaves)

    def _without_derived(self, collected: Collected, leaves: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        derived = {id(leaf) for leaf in self._derived.leaves(collected)} if self._derived else ()
        return tuple(leaf for leaf in unowned(leaves) if id(leaf) not in derived)

    def _is_base_due(self, step: int) -> bool:
        if self._pieces is not None:
            return step >= self._base_due
        known = self._next_base()
        return known is not None and step >= known.step

    def _share(self, step: int, walk: Walk) -> tuple[list[Leaf], dict[str, Any] | None]:
        """What of the next base is copied with this record. It is spread over the last steps before
        it is due: the records that bring its pieces to one step are there anyway."""
        if self._pieces is None:
            known = self._next_base()
            if known is None or known.window == 1 or step <= known.step - known.window:
                return [], None
            self._base_due = known.step
            self._pieces = Pieces.of(self._optimizers, walk, known.window)
        ends = step >= self._base_due
        own = self._pieces.take(step, ends)
        return own, {"steps": list(self._pieces.steps), "calls": None, "ends": ends}

    def _next_base(self) -> NextBase | None:
        """None where it is not known yet."""
        if self._ranks:
            return self._ranks.next_base()
        steps = self.interval.steps
        return NextBase(self.interval.origin + steps, min(self._window_size(), steps))

    def _tell_base(self, step: int) -> None:
        if self._ranks:
            steps = self.interval.steps
            window = min(self._window_size(), steps)
            self._ranks.note_base(step, NextBase(step + steps, window))

    def _window_size(self) -> int:
        if self._is_undivided or (self._ranks and self._ranks.why_whole()):
            return 1
        return choose_window(self.interval.base_bytes, self._pace, EVERY_MIN)


def _grows(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Of two shapes: whether all that differs is that optimizers have more, or less: as they do
    after their first update, or for parameters that are added."""
    rows = [[row for row in shape[0] if row[3] is None] for shape in (before, now)]
    return rows[0] == rows[1] or before[2] != now[2]


def _owned_aliases(collected: Collected) -> dict[str, list[str]]:
    """More names of what optimizers own: a record has none of it, so that only a base can say."""
    if not collected.aliases:
        return {}
    owned = {leaf.name for leaf in collected.walk.leaves if leaf.owner is not None}
    return {name: found for name, found in collected.aliases.items() if name in owned}
