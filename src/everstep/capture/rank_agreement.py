"""What the logs of several ranks have to have in common: who writes which gradients, and when.

A step is a record on all ranks or on none. What is decided by what was measured, the first rank
decides, and tells the others in good time: through the torch.distributed.Store, which is looked at
now and then and never waited for. Where ranks come apart all the same (a surprise on one of them),
the keeper refuses the step, and whole states follow until they are together again (trust.py).
"""

from collections.abc import Mapping, Sequence, Set
from itertools import repeat
from typing import Any

import torch

from everstep.format.manifest import FORMS
from everstep.format.tables import raw_name
from everstep.redo.recorder import Taken
from everstep.sharding.leaves import Leaf
from everstep.state.recorded import RecordShares
from everstep.state.view import State

_KEPT = 8
"""Of so many bases, and windows, the first rank's figures are kept."""


class RankAgreement:
    """For the thread that trains; all ranks make the same calls. One process agrees with itself."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.world = state.world
        self._known: dict[str, tuple[int, Sequence[Any]]] = {}
        """What the first rank has told, by where that is kept."""

    @property
    def is_on_nodes(self) -> bool:
        """Whether they are on more than one node."""
        return len(self.world.local) < self.world.size

    def why_whole(self) -> str | None:
        """Why these ranks must copy a state at one step; None where each can copy the same pieces
        at the same steps. The same on all of them, once the state was collected."""
        if self.is_on_nodes:
            return "the ranks are on several nodes"
        if not self._state.is_common:
            return "the ranks have different parameters"
        return None

    def share(self, taken: Taken, owner: int) -> tuple[tuple[Leaf, ...], Sequence[dict[str, Any]]]:
        """A record's own tensors, as far as this rank writes them; and the calls, which say of no
        others how they are to be read: another rank may hold a gradient in another form."""
        tensors, calls = taken.tensors, taken.calls
        if self.world.is_alone:
            return tuple(map(Leaf, tensors, tensors.values(), repeat(owner))), calls
        special = {
            f"@{number}.{name}"
            for number, call in enumerate(calls)
            for key in FORMS
            for row in call.get(key, ())
            for name in row["names"]
        }
        shares = self._state.record_shares()
        leaves = shares.leaves(tensors, special, owner)
        told = {leaf.name for leaf in leaves} | _spoken_for(tensors, calls, shares)
        said = [_only(call, f"@{number}.", told) for number, call in enumerate(calls)]
        unused = _coefficients(calls) - _coefficients(said)
        return tuple(leaf for leaf in leaves if leaf.name not in unused), said

    def tell(self, what: str, number: int, figures: Sequence[Any]) -> None:
        """What the first rank has measured is what all go by, for the base or window of that
        number."""
        if self.world.rank == 0:
            place = f"{what}/{number % _KEPT}"
            self._known[place] = number, figures
            self.world.tell(place, [number, figures])

    def told(self, what: str, number: int) -> Sequence[Any] | None:
        """The figures for that one; None where that is nothing yet."""
        place = f"{what}/{number % _KEPT}"
        known = self._known.get(place)
        if self.world.rank and (known is None or known[0] != number):
            known = self._known[place] = tuple(self.world.heard(place) or (-1, ()))
        return known[1] if known and known[0] == number else None


def _coefficients(calls: Sequence[Mapping[str, Any]]) -> set[str]:
    return {row["coefficient"] for call in calls for row in call.get("clips", ())}


def _spoken_for(
    tensors: Mapping[str, torch.Tensor], calls: Sequence[Mapping[str, Any]], shares: RecordShares
) -> set[str]:
    """Gradients from before clipping of which several ranks write parts: the first of them says
    so for all, with the coefficient, which they have in common."""
    return {
        f"@{number}.{name}"
        for number, call in enumerate(calls)
        for row in call.get("clips", ())
        for name in row["names"]
        if raw_name(f"@{number}", name) in tensors and shares.speaks_for(name)
    }


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
