"""What the logs of several ranks have to have in common: who writes which gradients, and when.

A step is a record on all ranks or on none. What is decided by what was measured, the first rank
decides, and tells the others in good time: through the torch.distributed.Store, which is looked at
now and then and never waited for. Where ranks come apart all the same (a surprise on one of them),
the keeper refuses the step, and whole states follow until they are together again.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from everstep.capture.pace import Pace
from everstep.format.manifest import FORMS
from everstep.state.leaves import Leaf
from everstep.state.view import State

DECIDED_EVERY = 16
"""Calls from one common decision to the next; it takes effect that much later."""

_WINDOWS_MAX = 4


class Figures(NamedTuple):
    """By which windows are chosen. `rest`: bytes that are copied at the last step in any case."""

    rest: int
    bytes_per_s: float
    overlap_s: float
    call_s: float

    @property
    def pace(self) -> Pace:
        """As that of one process."""
        return Pace(self.bytes_per_s, self.overlap_s, self.call_s)


class Ranks:
    """For the thread that trains; all ranks make the same calls."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._world = state.world
        self._calls = 0
        self._base: tuple[int, tuple[int, int] | None] = (-1, None)
        self._window: tuple[int, Figures | None] = (-1, None)
        self._decided: dict[int, Figures] = {}
        """By the first rank: for windows to come."""

    @property
    def rank(self) -> int:
        """This one's number."""
        return self._world.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._world.size

    def why_whole(self) -> str | None:
        """Why these ranks must copy a state at one step; None where each can copy the same pieces
        at the same steps. The same on all of them, once the state was collected."""
        if len(self._world.local) < self._world.size:
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
        written = {leaf.name for leaf in leaves}
        return leaves, [_only(call, f"@{number}.", written) for number, call in enumerate(calls)]

    def note_base(self, step: int, distance: int, window: int) -> None:
        """A base is made at this step. The first rank says when the next one is (`distance` steps
        later), and over how many steps it is spread (`window`)."""
        self._base = (step, None)
        if self._world.rank == 0:
            self._base = (step, (step + distance, window))
            self._world.tell(f"base/{step}", [step + distance, window])

    def next_base(self) -> tuple[int, int] | None:
        """The step of the next base, and over how many steps it is spread; None where that is not
        known yet."""
        step, following = self._base
        if following is None and (told := self._world.heard(f"base/{step}")):
            following = (int(told[0]), int(told[1]))
            self._base = (step, following)
        return following

    def tell_window(self, due: int, figures: "Figures") -> None:
        """What the first rank has measured is what all go by, in the window that ends at `due`."""
        if self._world.rank == 0:
            self._decided = {at: known for at, known in self._decided.items() if at < due}
            self._decided[due] = figures
            for old in sorted(self._decided)[:-_WINDOWS_MAX]:
                del self._decided[old]
            self._world.tell(f"window/{due}", list(figures))

    def window(self, due: int) -> "Figures | None":
        """What was told for the window that ends at `due`; None where that is nothing yet."""
        if self._world.rank == 0:
            return self._decided.get(due)
        if self._window[0] != due or self._window[1] is None:
            told = self._world.heard(f"window/{due}")
            self._window = (due, Figures(*told) if told else None)
        return self._window[1]

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
