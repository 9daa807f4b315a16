"""The strategy `spread`: a state copied over several steps, and brought to the last one by what
the optimizers consumed meanwhile.

    step              117          118          119          120 (due)
    copied            pieces 1     pieces 2     pieces 3     the rest, and what no optimizer owns
    recorded                       of 1         of 1, 2      of 1 to 3
    committed                                                one checkpoint, of step 120

A piece is a parameter with all of its optimizer state, the largest last. A gradient is kept only
for pieces that are copied already. Each step copies what fits beside its forward and backward.
Where that is the whole state, or gradients would cost more than they save, the window is one step:
then it is `full`.
Source: GoCkpt (multi-step overlapped checkpoints); fuzzy checkpoints of ARIES.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from everstep.capture.strategy import (
    RECORD_OWNER,
    Captured,
    Chain,
    Last,
    Request,
    Run,
    part_of,
    unowned,
)
from everstep.capture.window import Figures, Piece, Window, equal_groups, pieces_of, schedule
from everstep.errors import Unsupported
from everstep.handle import SaveHandle
from everstep.redo.recorder import Taken
from everstep.redo.rolling_digest import Slice
from everstep.sharding.leaves import Leaf
from everstep.state.view import Collected, Walk

_AHEAD = 2
"""So many windows before one the first of several ranks tells what it has measured for it."""


class Spread:
    """Decides at each step what is copied. For the thread that trains."""

    def __init__(self, run: Run, every: int, window: int | None = None) -> None:
        """`every`: the steps that are due are its multiples. `window`: steps of one; None: chosen
        by what was measured, of several ranks by the first, up to two windows before."""
        self._run = run
        self._every = every
        self._fixed = window
        self._window: Window | None = None
        self._chain: Chain | None = None
        """What the window's records go on from."""
        self._last: Last | None = None
        """The last checkpoint that had a window."""
        self._walk: Walk | None = None
        self._pieces: list[Piece] = []
        """Of that walk."""
        self._groups: list[list[Piece]] = []
        """What each step copies of ..."""
        self._chosen_for: int | None = None
        """... the window that ends at this one, as it was chosen."""
        self._broken_due: int | None = None
        self._due = 0

    def wants(self, step: int) -> bool:
        """See Strategy."""
        due = self._note_due(step)
        if self._window and self._window.due != due:  # no step() came at the due step
            self._forget()
        if self._window:
            return True
        return due != self._broken_due and step > due - self._size()

    def current(self, step: int, collect: Callable[[], Collected]) -> SaveHandle | None:
        """See Strategy."""
        return self._last.current(step, collect) if self._last and not self._window else None

    def choose(self, request: Request, collected: Collected) -> Captured | None:
        """See Strategy."""
        step = request.step
        is_due = step == self._note_due(step)
        if self._walk is not collected.walk:
            self._walk = collected.walk
            self._pieces = pieces_of(self._run.optimizers, collected.walk)
            self._chosen_for = None
        if is_due and self._fixed is None and self._every > 1:
            number = step // self._every + _AHEAD
            self._run.ranks.tell("window", number, self._run.figures(self._walk, self._pieces))
        if request.is_asked or request.tag or (self._window is None and is_due):
            self._forget()
            return Captured(collected)
        if not is_due and not self.wants(step):
            return None
        return self._share(step, collected)

    def begun(self, captured: Captured, handle: SaveHandle) -> None:
        """See Strategy."""
        if self._window and not captured.ends:
            return
        self._forget()
        self._last = None
        if captured.ends:
            assert self._walk
            self._run.trust.note_interval(handle.call)
            owned = [leaf for leaf in self._walk.leaves if leaf.owner is not None]
            is_alone = self._run.ranks.world.is_alone
            self._last = Last(handle, self._walk, captured, owned, is_alone=is_alone)

    def break_off(self) -> None:
        """See Strategy."""
        if self._window:
            self._broken_due = self._window.due
        self._forget()
        self._last = None

    def describe(self) -> dict[str, Any]:
        """See Strategy."""
        size = self._size()
        chosen: dict[str, Any] = {"strategy": "spread" if size > 1 else "full", "window": size}
        if self._fixed != 1 and (why := self._run.why_undivided()):
            chosen["reason"] = why
        pace = self._run.pace
        chosen["copy_bytes_per_s"] = round(pace.bytes_per_s)
        return {**chosen, "overlap_s": round(pace.overlap_s, 6)}

    def _note_due(self, step: int) -> int:
        """The next step that is due."""
        self._due = -(-step // self._every) * self._every
        return self._due

    def _size(self) -> int:
        """Steps of the next window, which is chosen once."""
        if 1 in (self._every, self._fixed) or self._walk is None or self._run.why_undivided():
            return 1
        if self._fixed is not None:
            return min(self._fixed, self._every)
        if self._chosen_for != self._due:
            figures = self._figures(self._walk)
            if figures is None or not figures.bytes_per_s:
                return 1
            self._groups = schedule(self._pieces, figures, self._every)
            self._chosen_for = self._due
        return 1 + len(self._groups)

    def _figures(self, walk: Walk) -> Figures | None:
        """By which the next window is chosen; None where the first rank has told none yet."""
        if self._run.ranks.world.is_alone:
            return self._run.figures(walk, self._pieces)
        told = self._run.ranks.told("window", self._due // self._every)
        return Figures(*told) if told else None

    def _forget(self) -> None:
        self._window = self._chain = None
        self._run.recorder.stop()

    def _share(self, step: int, collected: Collected) -> Captured:
        """This step's part of the window, which begins here where none is open."""
        recorder, window = self._run.recorder, self._window
        record, slices, calls, taken = tuple[Leaf, ...](), list[Slice](), None, Taken({}, (), ())
        if window is None or self._chain is None:
            window = self._window = self._open(step, collected.walk)
            self._chain = Chain(collected)
            recorder.start()
        else:
            if not self._chain.goes_on(collected) or not window.steps[-1] < step <= window.due:
                raise Unsupported(f"it does not go on from step {window.steps[-1]} of its window")
            taken = recorder.take(collected.walk)
            record, calls = self._run.ranks.share(taken, RECORD_OWNER)
            if step == window.due:  # before that the pieces are of several steps
                recorder.roll(self._run.pace.overlap_s)
                slices = recorder.slices()
        leaves = window.take(step)
        recorder.only = window.copied
        share = window.share(calls)
        if share["ends"]:
            others = unowned(collected.walk.leaves)
            part = part_of(collected, (*leaves, *others, *record), collected.loose, slices)
        else:  # ranks number hyperparameters together, in each
            part = part_of(collected, (*leaves, *record), (), slices)
            part = replace(part, objects={}, own={}, digests={})
        return Captured(part, share=share, slices=slices, held=taken.held)

    def _open(self, step: int, walk: Walk) -> Window:
        steps = self._due - step + 1
        is_planned = self._chosen_for == self._due and len(self._groups) == steps - 1
        groups = self._groups if is_planned else equal_groups(self._pieces, steps)
        return Window(walk, self._due, groups)
