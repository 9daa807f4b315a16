"""What the logs of several ranks have to have in common: who writes which gradients, and when.

A step is a record on all ranks or on none. What is decided by what was measured, the first rank
decides, and tells the others in good time: through the torch.distributed.Store, which is looked at
now and then and never waited for. Where ranks come apart all the same (a surprise on one of them),
the keeper refuses the step, and whole states follow until they are together again (trust.py).
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from everstep.capture.copy_speed import CopySpeed
from everstep.format.manifest import FORMS
from everstep.format.tables import raw_name
from everstep.sharding.leaves import Leaf
from everstep.state.view import State

_WINDOWS_MAX = 8
"""For so many the first rank's figures are kept."""


class NextBase(NamedTuple):
    """At which step it comes, and over how many it is spread."""

    step: int
    window: int


class Figures(NamedTuple):
    """By which windows are chosen. `rest`: bytes that are copied at the last step in any case."""

    rest: int
    bytes_per_s: float
    overlap_s: float
    call_s: float

    @property
    def pace(self) -> CopySpeed:
        """As that of one process."""
        return CopySpeed(self.bytes_per_s, self.overlap_s, self.call_s)


class RankAgreement:
    """For the thread that trains; all ranks make the same calls."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._world = state.world
        self._base: tuple[int, NextBase | None] = (-1, None)
        self._window: tuple[int, Figures | None] = (-1, None)
        self._decided: dict[int, tuple[int, Figures]] = {}
        """By the first rank: for windows to come, as it has told."""

    @property
    def rank(self) -> int:
        """This one's number."""
        return self._world.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._world.size

    @property
    def is_on_nodes(self) -> bool:
        """Whether they are on more than one node."""
        return len(self._world.local) < self._world.size

    def why_whole(self) -> str | None:
        """Why these ranks must copy a state at one step; None where each can copy the same pieces
        at the same steps. The same on all of them, once the state was collected."""
        if self.is_on_nodes:
            return "the ranks are on several nodes"
        if not self._state.is_common:
            return "the ranks have different parameters"
        return None

    def share(
        self, tensors: Mapping[str, torch.Tensor], calls: Sequence[Mapping[str, Any]], owner: int
    ) -> tuple[tuple[Leaf, ...], list[dict[str, Any]]]:
        """A record's own tensors, as far as this rank writes them; and the calls, which say of no
        others how they are to be read: another rank may hold a gradient in another form."""
        special = {
            f"@{number}.{name}"
            for number, call in enumerate(calls)
            for key in FORMS
            for row in call.get(key, ())
            for name in row["names"]
        }
        leaves = self._state.record_leaves(tensors, special, owner)
        told = {leaf.name for leaf in leaves} | self._spoken_for(tensors, calls)
        said = [_only(call, f"@{number}.", told) for number, call in enumerate(calls)]
        unused = _coefficients(calls) - _coefficients(said)
        return tuple(leaf for leaf in leaves if leaf.name not in unused), said

    def _spoken_for(
        self, tensors: Mapping[str, torch.Tensor], calls: Sequence[Mapping[str, Any]]
    ) -> set[str]:
        """Gradients from before clipping of which several ranks write parts: the first of them says
        so for all, with the coefficient, which they have in common."""
        return {
            f"@{number}.{name}"
            for number, call in enumerate(calls)
            for row in call.get("clips", ())
            for name in row["names"]
            if raw_name(f"@{number}", name) in tensors and self._state.speaks_for(name)
        }

    def note_base(self, step: int, following: NextBase) -> None:
        """A base is made at this step. What the first rank says of the next one holds for all."""
        self._base = (step, None)
        if self._world.rank == 0:
            self._base = (step, following)
            self._world.tell(f"base/{step}", following)

    def next_base(self) -> NextBase | None:
        """None where it is not known yet."""
        step, following = self._base
        if following is None and (told := self._world.heard(f"base/{step}")):
            following = NextBase(int(told[0]), int(told[1]))
            self._base = (step, following)
        return following

    def tell_window(self, number: int, figures: "Figures") -> None:
        """What the first rank has measured is what all go by, in the window of that number."""
        if self._world.rank == 0:
            place = number % _WINDOWS_MAX
            self._decided[place] = number, figures
            self._world.tell(f"window/{place}", [number, figures])

    def window(self, number: int) -> "Figures | None":
        """What was told for the window of that number; None where that is nothing yet."""
        place = number % _WINDOWS_MAX
        if self._world.rank == 0:
            known, figures = self._decided.get(place, (-1, None))
            return figures if known == number else None
        if self._window[0] != number or self._window[1] is None:
            told = self._world.heard(f"window/{place}")
            is_known = told is not None and told[0] == number
            self._window = number, Figures(*told[1]) if is_known else None
        return self._window[1]


def _coefficients(calls: Sequence[Mapping[str, Any]]) -> set[str]:
    return {row["coefficient"] for call in calls for row in call.get("clips", ())}


def _only(call: Mapping[str, Any], at: str, written: Set[str]) -> dict[str, Any]:
    """What a call says of these tensors; all else as it is."""
    found = dict(call)
    for key in FORMS:
        rows = []
        for row in found.pop(key, ()):
            names = [name for name in row["names"] if f"{at}{name}" in written]
            kept = {**row, "names": names}
            if "strides" in row:
                kept["strides"] = {k: v for k, v in row["strides"].items() if k in names}
            rows += [kept] if names else []
        if rows:
            found[key] = rows
    return found
