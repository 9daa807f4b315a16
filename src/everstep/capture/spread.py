"""The strategy `spread`: a state copied over several steps, and brought to the last one by what
the optimizers consumed meanwhile.

    step              117          118          119          120 (due)
    copied            pieces 1     pieces 2     pieces 3     the rest, and what no optimizer owns
    recorded                       of 1         of 1, 2      of 1 to 3
    committed                                                one checkpoint, of step 120

A piece is a parameter with all of its optimizer state, the largest first. A gradient is kept only
for pieces that are copied already. Each step copies what fits beside its forward and backward.
Where that is the whole state, or gradients would cost more than they save, the window is one step:
then it is `full`.
Source: GoCkpt (multi-step overlapped checkpoints); fuzzy checkpoints of ARIES.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from everstep.capture.captured import (
    RECORD_OWNER,
    Captured,
    Seen,
    moved,
    part_of,
    reserved,
    shape_of,
    unowned,
)
from everstep.capture.copy_speed import CopySpeed, Piece, Schedule, schedule
from everstep.capture.rank_agreement import Figures, RankAgreement
from everstep.capture.trust import Trust
from everstep.capture.window_partition import Pieces, measured, why_undivided
from everstep.errors import Unsupported
from everstep.handle import SaveHandle
from everstep.redo.recorder import Recorder
from everstep.redo.rolling_digest import Slice
from everstep.sharding.leaves import Leaf
from everstep.state.optimizers import OptimizerState
from everstep.state.view import Collected, Walk

_AHEAD = 2
"""So many windows before one the first of several ranks tells what it has measured for it."""


@dataclass(slots=True)
class _Window:
    """One checkpoint on its way. `keeper`: see Trust."""

    due: int
    keeper: int
    shape: tuple[Any, ...]
    pieces: Pieces
    handles: list[SaveHandle] = field(default_factory=list)


class Spread:
    """Decides at each step what is copied. For the thread that trains."""

    def __init__(
        self,
        optimizers: list[OptimizerState],
        recorder: Recorder,
        trust: Trust,
        every: int,
        pace: CopySpeed,
        window: int | None = None,
        ranks: RankAgreement | None = None,
        why_whole: str | None = None,
    ) -> None:
        """`every`: the steps that are due are its multiples. `window`: steps of one; None: chosen
        by `pace`. `ranks`: of several, which go by what the first of them has measured up to two
        windows before. `why_whole`: why windows have one step in this run."""
        self._optimizers = optimizers
        self._recorder = recorder
        self._trust = trust
        self._every = every
        self._pace = pace
        self._fixed = window
        self._ranks = ranks
        self._why_whole = why_whole
        self._window: _Window | None = None
        self._last: SaveHandle | None = None
        self._last_walk: Walk | None = None
        self._seen: Seen | None = None
        self._rolled: Walk | None = None
        """Of whose tensors the due records have digests."""
        self._sizes: tuple[Walk, int] | None = None
        self._measured: list[Piece] = []
        self._schedule = Schedule()
        self._planned: tuple[Walk, CopySpeed] | None = None
        """For which the schedule was made."""
        self._broken_due: int | None = None
        self._due = 0
        self._first_due: int | None = None

    def wants(self, step: int) -> bool:
        """See Strategy."""
        due = self._note_due(step)
        if self._window and self._window.due != due:  # no step() came at the due step
            self._forget()
        if self._window:
            return True
        return due != self._broken_due and step > due - self.size()

    def size(self) -> int:
        """Steps of the next window."""
        if self._every == 1 or self._why_whole or self._sizes is None:
            return 1
        if self._ranks and self._ranks.why_whole():
            return 1
        if self._fixed is not None:
            return min(self._fixed, self._every)
        walk, pace, known = self._sizes[0], self._pace, self._planned
        told = self._told() if self._ranks else None
        if told:
            pace = told.pace
        elif self._ranks:
            return 1
        has_moved = known and (pace != known[1] if told else pace.has_moved(known[1]))
        if known is None or known[0] is not walk or has_moved:
            rest = (told or self._figures()).rest
            self._schedule = schedule(self._measured, rest, pace, self._every)
            self._planned = walk, replace(pace)
        return self._schedule.steps

    def _figures(self) -> Figures:
        """As this process has measured them."""
        assert self._sizes
        rest = max(0, self._sizes[1] - sum(piece.size for piece in self._measured))
        return Figures(rest, self._pace.bytes_per_s, self._pace.overlap_s, self._pace.call_s)

    def _told(self) -> Figures | None:
        """What the first rank has told for the next window; it does not for the first two."""
        assert self._ranks
        if self._first_due is None or self._due < self._first_due + _AHEAD * self._every:
            return None
        return self._ranks.window(self._due // self._every)

    def _note_due(self, step: int) -> int:
        """The next step that is due."""
        self._due = -(-step // self._every) * self._every
        if self._first_due is None:
            self._first_due = self._due
        return self._due

    def current(self, step: int, collect: Callable[[], Collected]) -> SaveHandle | None:
        """The handle of the last checkpoint, if it is of this step and of just this state."""
        last = self._last
        if self._window or last is None or last.step != step or last.error is not None:
            return None
        collected = collect()
        is_same = self._last_walk is collected.walk and self._recorder.is_quiet and self._seen
        return last if is_same and is_same.is_still(collected, is_alone=not self._ranks) else None

    def choose(
        self, step: int, collected: Collected, *, asked: bool, tagged: bool
    ) -> Captured | None:
        """See Strategy."""
        self._note_due(step)
        self._measure(collected.walk)
        is_due = step % self._every == 0
        if self._ranks and is_due:
            self._ranks.tell_window(step // self._every + _AHEAD, self._figures())
        if asked or tagged or (self._window is None and is_due):
            self._forget()
            return Captured(collected)
        if not is_due and not self.wants(step):
            return None
        if self._window and self._window.keeper != self._trust.keeper:
            raise Unsupported("the keeper died within its window, with the parts that it had")
        return self._share(step, collected, is_due)

    def begun(self, captured: Captured, handle: SaveHandle) -> None:
        """See Strategy."""
        window, share = self._window, captured.share
        if window and not (share and share["ends"]):
            window.handles.append(handle)
            return
        self._forget()
        self._last = handle if share else None
        self._last_walk = self._sizes[0] if self._sizes else None
        self._seen = Seen.of(captured.collected)
        if share:
            self._trust.note_interval(handle.call)
            self._recorder.start(notes=False)

    def break_off(self) -> None:
        """See Strategy."""
        if self._window:
            self._broken_due = self._window.due
        self._forget()
        self._last = None

    def describe(self) -> dict[str, Any]:
        """See Strategy."""
        size = self.size()
        chosen: dict[str, Any] = {"strategy": "spread" if size > 1 else "full", "window": size}
        if why := self._why_whole or (self._ranks and self._ranks.why_whole()):
            chosen["reason"] = why
        return {**chosen, **self._pace.describe()}

    def _forget(self) -> None:
        self._window = None
        self._recorder.stop()

    def _measure(self, walk: Walk) -> None:
        """Bytes of a state, and of the gradients of all parameters; once for each walk."""
        if self._sizes is None or self._sizes[0] is not walk:
            ranks = self._ranks.size if self._ranks else 1
            self._measured = measured(self._optimizers, walk, ranks)
            self._sizes = walk, sum(leaf.tensor.nbytes for leaf in walk.leaves)

    def _share(self, step: int, collected: Collected, is_due: bool) -> Captured:
        """This step's part of the window, which begins here where none is open."""
        window = self._window or self._open(step, collected)
        pieces = window.pieces
        calls: list[Any] | None = None
        tensors: dict[str, torch.Tensor] = {}
        if pieces.steps:
            self._check(window, step, collected)
            tensors, calls = self._recorder.take()
        slices: list[Slice] = []
        if calls is not None and is_due:  # before that the pieces are of several steps
            if self._rolled is not collected.walk:
                self._rolled = collected.walk
                self._recorder.roll(self._pace.overlap_s)
            slices = self._recorder.slices()
        self._window = window
        leaves = pieces.take(step, is_due)
        if is_due:
            leaves += unowned(collected.walk.leaves)
        record = tuple(Leaf(name, tensor, RECORD_OWNER) for name, tensor in tensors.items())
        if self._ranks and calls is not None:
            record, calls = self._ranks.share(tensors, calls, RECORD_OWNER)
        share = {"steps": list(pieces.steps), "calls": calls, "ends": is_due}
        if calls is None:
            self._recorder.start()
        self._recorder.only = pieces.copied
        digests = (leaf for each in slices for leaf in each.leaves)
        part = part_of(collected, (*leaves, *record, *digests), collected.loose if is_due else ())
        if not is_due:  # ranks number hyperparameters together, in each
            part = Collected(part.walk, (), part.aliases, {}, part.hyperparameters)
        return Captured(part, share=share, slices=slices)

    def _open(self, step: int, collected: Collected) -> _Window:
        if taken := reserved((*collected.walk.leaves, *collected.loose)):
            raise Unsupported(f"{taken[0]!r} is a name that records use")
        if problem := why_undivided(self._optimizers):
            raise Unsupported(problem)
        due, walk = self._due, collected.walk
        steps = due - step + 1
        known = self._planned
        is_planned = known and known[0] is walk and self._schedule.steps == steps
        planned = self._schedule.groups if is_planned and self._fixed is None else None
        return _Window(
            due,
            self._trust.keeper,
            shape_of(walk),
            Pieces.of(self._optimizers, walk, steps, planned),
        )

    def _check(self, window: _Window, step: int, collected: Collected) -> None:
        for handle in window.handles:
            if handle.error is not None:
                raise Unsupported(f"what was copied at step {handle.step} was not saved")
        walk = collected.walk
        if walk is not window.pieces.walk and shape_of(walk) != window.shape:
            names = ", ".join(map(repr, moved(window.shape, shape_of(walk))[:3]))
            problem = "the state has other tensors than at the window's begin"
            raise Unsupported(f"{problem} ({names})" if names else problem)
        if step <= window.pieces.steps[-1] or step > window.due:
            raise Unsupported(f"step {step} came after step {window.pieces.steps[-1]}")
