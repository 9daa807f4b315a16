"""The strategy `log`: a base now and then, and for every step since then a durable record.

    step          100     101     102    ...    150     151
    on the disk   base ◀─ record ◀─ record ◀─ ... ◀─ record   base ◀─ ...

A base is copied at one step where forward and backward are long enough for it, else piece by piece
with the last records before it (pieces.py).

A crash loses at most the step in flight, at the cost of the gradients' bytes instead of the
state's. The chain ends, and a base begins another, where a record failed, where the state has other
tensors than at the base, and where somebody else than an optimizer changed its tensors.
Source: LowDiff (SC 2025); the redo log of ARIES.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any

from everstep.capture.base_interval import EVERY_MIN, BaseInterval
from everstep.capture.captured import (
    RECORD_OWNER,
    Captured,
    Seen,
    moved,
    others_of,
    part_of,
    shape_of,
    size_of,
    unowned,
)
from everstep.capture.copy_speed import Pace, choose_window
from everstep.capture.failures import Failures
from everstep.capture.rank_agreement import NextBase, Ranks
from everstep.capture.raw import Raw
from everstep.capture.window_partition import Pieces, why_undivided
from everstep.errors import EverstepError, Unsupported
from everstep.handle import SaveHandle
from everstep.redo.clipping import Recording
from everstep.redo.coupling import why_not
from everstep.redo.derived import Derived
from everstep.redo.recorder import Recorder
from everstep.redo.refusals import (
    Held,
    Lasting,
    Overwritten,
    Refused,
    check_gradients,
    check_graphs,
)
from everstep.sharding.leaves import Leaf
from everstep.state.optimizers import OptimizerState
from everstep.state.recorded import leaves_of
from everstep.state.view import Collected, Walk

log = logging.getLogger("everstep")

BREAKS_MAX = 3
"""Surprises, after which whole states are saved for good."""
RENEWALS_MAX = 50
"""Steps in a row at which a state has other tensors than at the last: that goes by, or never."""
PARTINGS_MAX = 8
"""So often several ranks may come apart; ..."""
FORGIVEN_AFTER = 100
"""... unless so many records came between."""


class Log:
    """Decides for each step between base and record. For the thread that trains."""

    def __init__(
        self,
        optimizers: list[OptimizerState],
        interval: BaseInterval,
        pace: Pace,
        audit: bool = False,
        derived: Derived | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`interval`: from one base to the next; it gets its figures here. `pace`: by which a base
        is spread over steps. `audit`: see Recorder. `derived`: what rules derive. `ranks`: of
        several. Raises Unsupported where there is no optimizer."""
        if not optimizers:
            raise Unsupported(
                "strategy='log' records what optimizers consume, and the state has none. "
                "Use strategy='full'"
            )
        self._recorder = Recorder(optimizers, audit, ranks.rank if ranks else None)
        self._ranks = ranks
        self._optimizers = optimizers
        self._derived = derived
        self.interval = interval
        self._pace = pace
        self._base: Walk | None = None
        self._shape: tuple[Any, ...] = ()
        self._base_step = self._base_call = 0
        self._whole_step = 0
        self._base_aliases: dict[str, list[str]] = {}
        self._base_derived: Any = None
        self._last: SaveHandle | None = None
        self._seen: Seen | None = None
        self._breaks = self._recorded = 0
        self._partings = self._together = 0
        self._renewals = 0
        """Bases, one after the other, that had other tensors than the one before."""
        self._moved: set[str] = set()
        """What was told to lie in other memory."""
        self._failures = Failures(is_alone=ranks is None)
        self._held = Held()
        self._refused: str | None = None
        self.lasting: str | None = None
        """Why no log of this run is exact from here on, nor any window."""
        self._pieces: Pieces | None = None
        self._base_due = 0
        self._is_whole_only = why_not(optimizers) is not None
        self._recording = Recording()
        self._raw = Raw()

    @property
    def is_on(self) -> bool:
        """Whether steps are recorded. Not where this run has shown that a log does not fit it."""
        return self._breaks < BREAKS_MAX

    @property
    def is_recording(self) -> bool:
        """Whether optimizer calls are to be noted."""
        return self._base is not None and self.is_on and self._refused is None

    def before_step(
        self, optimizer: OptimizerState, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """See Recorder. Only while recording."""
        self._recorder.before_step(optimizer, args, kwargs)

    def after_step(self, optimizer: OptimizerState) -> None:
        """See Recorder. Only while recording."""
        self._recorder.after_step(optimizer)

    def refuse(self, problem: str) -> None:
        """See Recorder."""
        self._recorder.refuse(problem)

    def check(self, collected: Collected) -> None:
        """Raises Refused where records of this state would hold too much."""
        self._others(collected, size_of(collected))

    def _others(self, collected: Collected, size: int) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
        derived = self._derived.leaves(collected) if self._derived else ()
        return others_of(collected, derived, size)

    def _check(self) -> None:
        """Before a base. Raises Refused where nothing can follow it."""
        if self._refused is None and self.is_on:
            try:
                check_graphs(self._optimizers)
                check_gradients(self._optimizers)
            except Refused as error:
                self._refused = str(error)
        if self._refused:
            raise Refused(self._refused)

    def note_whole(self, step: int) -> None:
        """The state at this step is whole by now: no recovery goes back farther. Any thread."""
        self._whole_step = max(self._whole_step, step)

    def note_failure(self, call: int, error: EverstepError) -> None:
        """What was to be saved at this call was not. Any thread."""
        self._failures.note(call, error)

    def awaits(self, call: int) -> bool:
        """Whether a whole state of this call is worth waiting for memory, as a record is: all
        that came before is there, and records follow it; or other ranks count on it."""
        is_whole = self._last is not None and self._failures.may_follow(self._base_call)
        is_followed = self.is_on and self.interval.steps > 1
        return is_followed and (is_whole or self._failures.joins_at(call))

    def current(self, step: int, collect: Callable[[], Collected]) -> SaveHandle | None:
        """The handle of the last save, if it is of this step and of just this state."""
        last = self._last
        if not self.is_recording or last is None or last.step != step or last.error is not None:
            return None
        collected = collect()
        if self._derived and self._derived.changed():
            return None
        is_same = self._base is collected.walk and self._recorder.is_quiet and self._seen
        return last if is_same and is_same.is_still(collected, is_alone=not self._ranks) else None

    def wants(self, step: int) -> bool:
        """Whether this step, which is not due, is recorded all the same."""
        del step
        return self.is_on

    def choose(
        self, step: int, collected: Collected, *, asked: bool = False, tagged: bool = False
    ) -> Captured:
        """What to capture for `step`. `asked`: by save(), not by step(). `tagged`: what has a name
        is a whole state. Raises Unsupported where a log does not fit the state, Refused where it
        does not fit the run: then at each call."""
        del asked
        if self._derived and self.is_on and (problem := self._derived.watch(collected, step)):
            self._recorder.refuse(problem)
        self._note_setbacks(step)
        self._note_walk(collected.walk, step)
        if self._refused or not self.is_on or not self._is_record(step, collected, tagged):
            self._check()
            return Captured(collected)
        try:
            tensors, calls = self._recorder.take()
        except Unsupported as error:
            self._break(error, step)
            self._check()
            return Captured(collected)
        pieces, share = self._share(step, collected.walk)
        derived: dict[str, Any] = {}
        slices = self._recorder.slices()
        if self._derived:
            derived = self._derived.describe()
            slices += self._derived.slices(collected, self._pace.overlap_s)
        if self._ranks:
            recorded, calls = self._ranks.share(tensors, calls, RECORD_OWNER)
        else:
            recorded = leaves_of(tensors, self._optimizers, RECORD_OWNER)
        others, met = self._others(collected, self.interval.base_bytes)
        if share and share["ends"]:  # a base has what is derived, too
            others = tuple(unowned(collected.walk.leaves))
            met = collected.loose
        digests = (leaf for each in slices for leaf in each.leaves)
        leaves = (*pieces, *recorded, *others, *digests)  # updates wait for pieces, not for records
        record = part_of(collected, leaves, met)
        said = {"previous": self._last_step, "calls": calls, "derived": derived}
        return Captured(record, said, share, slices)

    def begun(self, captured: Captured, handle: SaveHandle) -> None:
        """This is being captured."""
        self._last = handle
        self._seen = Seen.of(captured.collected)
        if captured.record is not None:
            self._note_record(captured, handle)
            if captured.share and captured.share["ends"]:
                self._base_step, self._pieces = handle.step, None
                self._recorder.roll(self._pace.overlap_s)
                self._tell_base()
            self._recording.set(self.is_on)
            self._recorded += 1
            self._together += 1
            self._renewals = 0
            self._held.note_success()
            if self._recorded >= FORGIVEN_AFTER:
                self._breaks = 0
            return
        walk = captured.collected.walk
        self._recorder.reset()
        self._base = self._pieces = None
        if not self.is_on:
            self._recording.set(False)
            return
        self._base, self._base_step, self._whole_step = walk, handle.step, handle.step
        self._base_call, self._shape = handle.call, shape_of(walk)
        self.interval.base_bytes = size_of(captured.collected)
        self._base_aliases = _owned_aliases(captured.collected)
        self._base_derived = self._derived and self._derived.shape(captured.collected)
        self._recorder.watch()
        self._recorder.roll(self._pace.overlap_s)
        self._tell_base()
        self._recording.set(True)

    def _tell_base(self) -> None:
        if self._ranks:
            steps = self.interval.steps
            window = min(self._window_size(), steps)
            following = NextBase(self._base_step + steps, window, self._raw.is_wanted)
            self._ranks.note_base(self._base_step, following)

    def _note_record(self, captured: Captured, handle: SaveHandle) -> None:
        if captured.share is None and captured.record:
            leaves = (*captured.collected.walk.leaves, *captured.collected.loose)
            self.interval.note_record(handle, sum(leaf.tensor.nbytes for leaf in leaves))
            self._raw.note(captured.record["calls"], handle)

    def describe(self) -> dict[str, Any]:
        """What `everstep show` prints of the choice."""
        return (
            {"strategy": "log"} | self.interval.describe() if self.is_on else {"strategy": "full"}
        )

    def end(self) -> None:
        """Record nothing any more, on any rank: the others hear of it where they come apart."""
        self._breaks = BREAKS_MAX
        if self._ranks:
            self._ranks.end()

    def close(self) -> None:
        """Record nothing any more."""
        self._breaks = BREAKS_MAX
        self.pause()

    def pause(self) -> None:
        """Another strategy takes over for a while."""
        self.end_chain()
        self._recording.set(False)

    def distrust(self, names: Collection[str]) -> None:
        """See Recorder."""
        self._recorder.distrust(names)

    def change_keeper(self) -> None:
        """The one that had the pieces of the next base is gone: they are copied again. Of several
        ranks each notices it at another step: there the new one says that there is no base."""
        if self._ranks is None:
            self._pieces = None

    def end_chain(self) -> None:
        """Nothing can follow what was captured last: the next is a base."""
        self._base = self._last = self._pieces = None
        self._recorder.reset()

    @property
    def _last_step(self) -> int:
        assert self._last is not None
        return self._last.step

    def _note_setbacks(self, step: int) -> None:
        """Whether the ranks came apart. Each counts its own surprises, as one alone does; where one
        has given up all do, and where they do not come together."""
        setbacks, partings = self._failures.take()
        if not (self._ranks and setbacks and self._base and self.is_on):
            return
        if self._together >= FORGIVEN_AFTER:
            self._partings = 0
        self._together = 0
        self._partings += partings
        if self._ranks.has_ended() or self._partings >= PARTINGS_MAX:
            self.end()
            log.warning(
                "the log ends before step %s: another rank records nothing any more, or has other "
                "things to save again and again. Whole states are saved from now on",
                step,
            )

    def _note_walk(self, walk: Walk, step: int) -> None:
        """Whether the state has the tensors that it had at the base, as far as records go."""
        if self._base is None or self._base is walk or not self.is_on:
            return
        if (shape := shape_of(walk)) == self._shape:
            self._base = walk
            return
        self._renewals += 1
        if found := [name for name in moved(self._shape, shape) if name not in self._moved]:
            self._moved.update(found)
            log.warning(
                "the log begins anew at step %s, with a whole state: %s another tensor, or in "
                "other memory, than before (by `.data = ...` or load_state_dict(), perhaps), which "
                "no record tells. Write into what is there",
                step,
                ", ".join(map(repr, found[:5])) + (" are" if len(found) > 1 else " is"),
            )
        if self._renewals == RENEWALS_MAX:
            names = [leaf[0].name for leaf in shape[0] if leaf not in self._shape[0]]
            self._break(
                Lasting(
                    f"the state had other tensors at each of the last {RENEWALS_MAX} steps (now "
                    f"{', '.join(map(repr, names[:3])) or 'fewer'}), and nothing can be recorded. "
                    f"Write into those that are there"
                ),
                step,
            )

    def _is_record(self, step: int, collected: Collected, wants_base: bool) -> bool:
        last = self._last
        return (
            not wants_base
            and last is not None
            and self._failures.may_follow(self._base_call)
            and step > last.step
            and self._base is collected.walk
            and self._base_aliases == _owned_aliases(collected)
            and (self._pieces is not None or not self._is_base_due(step))
            and self._base_derived == (self._derived and self._derived.shape(collected))
        )

    def _is_base_due(self, step: int) -> bool:
        if self._ranks:
            following = self._ranks.next_base()
            return following is not None and step >= following.step
        return step - self._origin() >= self.interval.steps

    def _share(self, step: int, walk: Walk) -> tuple[list[Leaf], dict[str, Any] | None]:
        """What of the next base is copied with this record. It is spread over the last steps before
        it is due: the records that bring its pieces to one step are there anyway."""
        if self._pieces is None:
            known = self._next_base()
            if known is None or known[1] == 1 or step <= known[0] - known[1]:
                return [], None
            self._base_due, size = known
            self._pieces = Pieces.of(self._optimizers, walk, size)
        ends = step >= self._base_due
        own = self._pieces.take(step, ends)
        share = {"steps": list(self._pieces.steps), "calls": None, "ends": ends}
        return own, share

    def _next_base(self) -> tuple[int, int] | None:
        """When it is due, and over how many steps it is spread."""
        if self._ranks:
            following = self._ranks.next_base()
            return following and (following.step, following.window)
        steps = self.interval.steps
        return self._origin() + steps, min(self._window_size(), steps)

    def _origin(self) -> int:
        return self.interval.origin(self._base_step, self._whole_step)

    def _window_size(self) -> int:
        if self._is_whole_only or why_undivided(self._optimizers):
            return 1
        if self._ranks and self._ranks.why_whole():
            return 1
        return choose_window(self.interval.base_bytes, self._pace, EVERY_MIN)

    def _break(self, error: Unsupported, step: int) -> None:
        try:
            self._held.note(error)
        except Refused as refusal:
            error = refusal
        if isinstance(error, Refused):
            self._refused = str(error)
            return
        self._breaks += not isinstance(error, Overwritten)
        if isinstance(error, Lasting):
            self._breaks, self.lasting = BREAKS_MAX, str(error)
        self._recorded = 0
        if not self.is_on:
            self.end()
        log.warning(
            "the log ends before step %s: %s. A whole state is saved instead%s",
            step,
            error,
            "" if self._breaks < BREAKS_MAX else ", and from now on",
        )


def _owned_aliases(collected: Collected) -> dict[str, list[str]]:
    """More names of what optimizers own: a record has none of it, so that only a base can say."""
    if not collected.aliases:
        return {}
    owned = {leaf.name for leaf in collected.walk.leaves if leaf.owner is not None}
    return {name: found for name, found in collected.aliases.items() if name in owned}
