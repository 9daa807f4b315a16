"""What the logs of several ranks have to have in common: who writes which gradients, and when.

A step is a record on all ranks or on none. What is decided by what was measured, the first rank
decides, and tells the others in good time: through the torch.distributed.Store, which is looked at
now and then and never waited for. Where ranks come apart all the same (a surprise on one of them),
the keeper refuses the step, and whole states follow until they are together again.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from everstep.format.manifest import FORMS
from everstep.format.tables import raw_name
from everstep.state import kept
from everstep.state.leaves import Leaf
from everstep.state.view import State

DECIDED_EVERY = 16
"""Calls from one common decision to the next; it takes effect that much later."""


class Ranks:
    """For the thread that trains; all ranks make the same calls."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._world = state.world
        self._calls = 0
        self._has_given_up = False
        self._base: tuple[int, int | None] = (-1, None)

    @property
    def rank(self) -> int:
        """This one's number."""
        return self._world.rank

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
        if not (kept.takes_parts() or self._has_given_up):
            self._has_given_up = True
            self._world.tell("no raw parts", True)
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

    def note_base(self, step: int, distance: int) -> None:
        """A base is made at this step; the first rank's `distance` says when the next one is."""
        self._base = (step, None)
        if self._world.heard("no raw parts"):  # this step's ranks have come apart over that
            kept.give_up_parts()
        if self._world.rank == 0:
            self._base = (step, step + distance)
            self._world.tell(f"base/{step}", step + distance)

    def next_base(self) -> int | None:
        """The step of the next base; None where it is not known yet."""
        step, following = self._base
        if following is None:
            following = self._world.heard(f"base/{step}")
            self._base = (step, following)
        return following

    def decide(self, wanted: Callable[[], bool], now: bool) -> bool:
        """What all ranks do from here on: `now`, or what the first rank `wanted` a while ago."""
        self._calls += 1
        turn, rest = divmod(self._calls, DECIDED_EVERY)
        if rest:
            return now
        if self._world.rank == 0:
            self._world.tell(f"decision/{turn}", wanted())
        heard = self._world.heard(f"decision/{turn - 1}")
        return now if heard is None else bool(heard)


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
