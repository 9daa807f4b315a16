"""The pieces of a state that is copied over several steps: which of them when.

A piece is a parameter with all of its optimizer state, never a part of that: a parameter of one
step with moments of another replays to a wrong state.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from everstep.capture.copy_speed import Piece
from everstep.sharding.leaves import Leaf
from everstep.state.optimizers import OptimizerState
from everstep.state.view import Walk


@dataclass(slots=True)
class Pieces:
    """One state on its way. For the thread that trains; of several ranks each has the same pieces
    at the same steps, and of a piece what it writes, which may be nothing."""

    walk: Walk
    units: dict[str, "Unit"]
    """By the parameter's name."""
    groups: Sequence[Sequence[str]]
    """Names of parameters, by the step at which they are copied; the others come last."""
    steps: list[int] = field(default_factory=list)
    """At which something was copied."""
    copied: set[str] = field(default_factory=set)
    """Names of parameters."""
    _taken: set[str] = field(default_factory=set)
    _own: dict[str, list[Leaf]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        optimizers: list[OptimizerState],
        walk: Walk,
        steps: int,
        planned: Sequence[Sequence[str]] | None = None,
    ) -> "Pieces":
        """To be copied over so many steps: as planned, or in equal shares."""
        units = _units(optimizers, walk)
        found = cls(walk, units, _groups(units, steps) if planned is None else planned)
        for leaf in walk.leaves:
            if leaf.owner is not None:  # the others may be other tensors by then
                found._own.setdefault(leaf.name, []).append(leaf)
        return found

    def take(self, step: int, is_last: bool) -> list[Leaf]:
        """What is copied at this step; at the last, all that is left of what optimizers own."""
        index = len(self.steps)
        self.steps.append(step)
        if is_last:
            left = [name for name in self._own if name not in self._taken]
            return _all_of(left, self._own)
        group = self.groups[index] if index < len(self.groups) else ()
        self.copied.update(group)
        names = [leaf for name in group for leaf in self.units[name].leaves]
        self._taken.update(names)
        return _all_of(names, self._own)


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece: the names of its leaves, and its bytes on all ranks together."""

    leaves: tuple[str, ...]
    size: int


def measured(optimizers: list[OptimizerState], walk: Walk, ranks: int = 1) -> list[Piece]:
    """The pieces; what each of so many `ranks` has of them on average: the same on all."""
    items: dict[str, tuple[int, int]] = {}
    for optimizer in optimizers:
        for _, name, parameter, _ in optimizer.parameters():
            for each in optimizer.mapped.names(name, parameter):
                items[each] = parameter.numel(), gradient_item(parameter)
    return [
        Piece(name, unit.size // ranks, count * item // ranks)
        for name, unit in _units(optimizers, walk).items()
        for count, item in [items[name]]
    ]


def gradient_item(parameter: torch.Tensor) -> int:
    """Bytes of an element of the gradient that is there, or of one to come: it may be of another
    dtype. Of a sparse one, as if it were dense."""
    if not parameter.requires_grad:
        return 0
    found = parameter.grad
    dtype = getattr(parameter, "grad_dtype", None) if found is None else found.dtype
    return int((dtype or parameter.dtype).itemsize)


def why_undivided(optimizers: list[OptimizerState]) -> str | None:
    """Why not now. Numbers in an optimizer's state are stored once, with the last piece; and a
    tensor that parameters share would be of one step, and they of others."""
    for optimizer in optimizers:
        if optimizer.keeps_numbers:
            return f"{optimizer.name!r} keeps numbers that are no tensors in its state"
        if _shares_state(optimizer):
            return f"{optimizer.name!r} keeps one tensor for several parameters in its state"
    return None


def _shares_state(optimizer: OptimizerState) -> bool:
    """Whether a tensor is kept for several parameters."""
    tensors = [
        id(value)
        for _, _, parameter, _ in optimizer.parameters()
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, torch.Tensor)
    ]
    return len(set(tensors)) < len(tensors)


def _units(optimizers: list[OptimizerState], walk: Walk) -> dict[str, Unit]:
    """Each parameter with all its optimizer state, where nobody else writes to any of it."""
    eager = {leaf.name for leaf in walk.leaves if leaf.owner is None}
    units = {}
    for optimizer in optimizers:
        for _, name, parameter, _ in optimizer.parameters():
            state = optimizer.state.get(parameter, {})
            members = (parameter, *(v for v in state.values() if isinstance(v, torch.Tensor)))
            leaves = [walk.names.get(id(member)) for member in members]
            if all(leaf is not None and leaf not in eager for leaf in leaves):
                size = sum(member.numel() * member.element_size() for member in members)
                units[name] = Unit(tuple(leaf for leaf in leaves if leaf is not None), size)
    return units


def _all_of(names: Iterable[str], leaves: Mapping[str, list[Leaf]]) -> list[Leaf]:
    return [leaf for name in names for leaf in leaves.get(name, ())]


def _groups(units: Mapping[str, Unit], steps: int) -> list[list[str]]:
    """The parameters, the largest first, in as many groups of about equal bytes; without the last,
    which takes what is left."""
    sizes = {name: unit.size for name, unit in units.items()}
    share = sum(sizes.values()) / steps
    groups: list[list[str]] = [[]]
    taken = 0
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if taken >= share * len(groups):
            groups.append([])
        groups[-1].append(name)
        taken += sizes[name]
    return groups[: steps - 1]
