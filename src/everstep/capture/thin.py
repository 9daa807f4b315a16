"""Thinned whole states: of some layers a checkpoint has the newest that was saved of them, and not
that of its own step.

    save               1 (all)   2     3     4     5
    block 0, block 2   new       new   ·     new   ·        {"model.blocks.*": 2}
    block 1, block 3   new       ·     new   ·     new
    all else           new       new   new   new   new

A *turn* is what is saved at the same one of a factor's saves: its tensors lie in packs of their
own, and the keeper names those of the checkpoint before where they are not due (keeper/data.py). A
parameter's optimizer state is of its parameter's turn.
Source: LLMTailor (layer-wise tailoring of checkpoints).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from zlib import crc32

from everstep.capture.spread import Spread
from everstep.capture.strategy import Captured, Request, Run
from everstep.capture.window import why_undivided
from everstep.format.tables import state_names
from everstep.handle import SaveHandle
from everstep.state.view import Collected


class Thin(Spread):
    """Whole states, copied at one step each, without what is not due. For the thread that trains.
    Several ranks count saves alike; where a failure made them differ, the keepers refuse the save,
    and all begin again with all (keeper/ranks)."""

    def __init__(self, run: Run, every: int, factors: Mapping[str, int]) -> None:
        super().__init__(run, every, window=1)
        self._factors = factors
        self._slots = [(n, slot) for n in sorted(set(factors.values())) for slot in range(n)]
        """What each turn is of, from 1 on: a factor, and which of its saves."""
        self._turns: dict[str, int] = {}
        """Of the walk's tensors, by their names, those that have one."""
        self._saves: int | None = None
        """Since the last one that had all; None: the next has."""

    def choose(self, request: Request, collected: Collected) -> Captured | None:
        """See Strategy: what has a name, and the last before the end, has all."""
        if self._walk is not collected.walk:
            self._deal(collected)
        captured = super().choose(request, collected)
        if captured is None:
            return None
        saves = self._saves
        if saves is None or request.tag or request.must_wait:
            return replace(captured, turns=self._turns)
        numbered = enumerate(self._slots, 1)
        kept = frozenset(turn for turn, (factor, slot) in numbered if saves % factor != slot)
        return replace(captured, turns=self._turns, kept=kept)

    def begun(self, captured: Captured, handle: SaveHandle) -> None:
        """See Strategy."""
        super().begun(captured, handle)
        self._saves = (self._saves or 0) + 1 if captured.kept else 0

    def break_off(self) -> None:
        """See Strategy."""
        super().break_off()
        self._saves = None

    def describe(self) -> dict[str, Any]:
        """See Strategy."""
        return {**super().describe(), "thin": dict(self._factors)}

    def _deal(self, collected: Collected) -> None:
        """At the first save ranks agree that there is something to each pattern. Raises
        ValueError."""
        walk, matched, turns = collected.walk, set[str](), dict[str, int]()
        of_optimizers = dict(state_names(walk.optimizers))
        for name in {leaf.name for leaf in walk.leaves}.difference(of_optimizers):
            called = (name, *collected.aliases.get(name, ()))
            if match := next(filter(None, map(self._match, called)), None):
                matched.add(match[0])
                turns |= dict.fromkeys(called, match[1])
        turns |= {name: turns[p] for name, p in of_optimizers.items() if p in turns}
        if self._walk is None:
            self._check(matched, [leaf.name for leaf in walk.leaves])
        self._turns = turns

    def _check(self, matched: set[str], names: Sequence[str]) -> None:
        said = sorted(matched), why_undivided(self._run.optimizers)
        each = self._run.ranks.world.gather("looking for what is to be thinned", said)
        if why := next((why for _, why in each if why), None):
            raise ValueError(f"everstep.Full(thin=...): {why}. Leave thin= out")
        found = {pattern for patterns, _ in each for pattern in patterns}
        if missing := [pattern for pattern in self._factors if pattern not in found]:
            raise ValueError(
                f"everstep.Full(thin=...): no parameter or buffer of the state is called, or in a "
                f"module called, {' or '.join(map(repr, missing))} (optimizer state goes with its "
                f"parameter). Names here are like {', '.join(map(repr, names[:4]))}"
            )

    def _match(self, name: str) -> tuple[str, int] | None:
        """The first pattern that has it, and the turn. That follows from the name, as ranks have
        different ones: modules in a row are numbered."""
        for pattern, factor in self._factors.items():
            if match := _compiled(str(pattern)).match(name):
                module = match[0].split(".")
                numbered = [int(part) for part in module if part.isdecimal()]
                place = sum(numbered) if numbered else crc32(match[0].encode())
                return pattern, self._slots.index((factor, place % factor)) + 1
        return None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A star is one name between dots; what is below a match is matched."""
    parts = (r"[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
    return re.compile(r"\.".join(parts) + r"(?=\.|$)")
