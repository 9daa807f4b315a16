"""The pieces of a state that is copied over several steps: which of them when.

A piece is a parameter with all of its optimizer state, never a part of that: a parameter of one
step with moments of another replays to a wrong state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from everstep.capture.pace import Piece
from everstep.state.leaves import Leaf
from everstep.state.optimizers import OptimizerState
from everstep.state.view import Walk

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Pieces:
    """One state on its way. For the thread that trains."""

    walk: Walk
    units: dict[str, list[Leaf]]
    """By the parameter's name."""
    groups: Sequence[Sequence[str]]
    """Names of parameters, by the step at which they are copied; the others come last."""
    steps: list[int] = field(default_factory=list)
    """At which something was copied."""
    copied: set[str] = field(default_factory=set)
    """Names of parameters."""
    _taken: set[int] = field(default_factory=set)

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
        return cls(walk, units, _groups(units, steps) if planned is None else planned)

    def take(self, step: int, is_last: bool) -> Iterator[Leaf]:
        """What is copied at this step; if it is the last, all that is left of what optimizers
        own."""
        index = len(self.steps)
        self.steps.append(step)
        if is_last:
            yield from (leaf for leaf in self.walk.leaves if id(leaf.tensor) not in self._taken)
            return
        for name in self.groups[index] if index < len(self.groups) else ():
            self.copied.add(name)
            self._taken.update(id(leaf.tensor) for leaf in self.units[name])
            yield from self.units[name]


def measured(optimizers: list[OptimizerState], walk: Walk) -> tuple[list[Piece], int]:
    """The pieces, and the bytes of the gradients of all parameters that the walk has (of several
    ranks: as far as this one writes them)."""
    items = {
        name: _gradient_item(parameter)
        for optimizer in optimizers
        for _, name, parameter, _ in optimizer.parameters()
    }
    gradients = dict.fromkeys(items, 0)
    for leaf in walk.leaves:
        if leaf.name in items:
            gradients[leaf.name] += leaf.tensor.numel() * items[leaf.name]
    pieces = [
        Piece(name, sum(leaf.tensor.nbytes for leaf in unit), gradients[name])
        for name, unit in _units(optimizers, walk).items()
    ]
    return pieces, sum(gradients.values())


def _gradient_item(parameter: torch.Tensor) -> int:
    """Bytes of an element of the gradient that is there, or of one to come: it may be of another
    dtype. Of a sparse one, as if it were dense."""
    if not parameter.requires_grad:
        return 0
    found = parameter.grad
    dtype = getattr(parameter, "grad_dtype", None) if found is None else found.dtype
    return int((dtype or parameter.dtype).itemsize)


def why_not(optimizers: list[OptimizerState]) -> str | None:
    """Why these must be copied at one step; None where parameters may be at several.

    Replay steps a part of the parameters. That is known to be exact for torch's own optimizers,
    which treat each parameter by itself, and not for a class that nobody knows.
    """
    if not optimizers:
        return "the state has no optimizer"
    seen: set[int] = set()
    for optimizer in optimizers:
        kind = type(optimizer.optimizer)
        if not kind.__module__.startswith("torch.optim.") or kind is torch.optim.LBFGS:
            return f"{optimizer.name!r} is a {kind.__qualname__}, which may couple parameters"
        kinds = {(type(p) in _PLAIN, p.device.type) for _, _, p, _ in optimizer.parameters()}
        if len(kinds) > 1:  # by which torch chooses between for-loop and foreach, for all together
            return f"{optimizer.name!r} has parameters of several kinds, or on several devices"
        for _, name, parameter, _ in optimizer.parameters():
            if id(parameter) in seen:
                return f"{name!r} has two optimizers"
            seen.add(id(parameter))
    return None


def plain_numbers(optimizers: list[OptimizerState]) -> str | None:
    """Why not now: numbers in an optimizer's state are stored once, with the last piece."""
    for optimizer in optimizers:
        if optimizer.plain() != "[]":
            return f"{optimizer.name!r} keeps numbers that are no tensors in its state"
    return None


def _units(optimizers: list[OptimizerState], walk: Walk) -> dict[str, list[Leaf]]:
    """Each parameter with all its optimizer state, where nobody else writes to any of it."""
    owned = {id(leaf.tensor): leaf for leaf in walk.leaves if leaf.owner is not None}
    units = {}
    for optimizer in optimizers:
        for _, name, parameter, _ in optimizer.parameters():
            state = optimizer.optimizer.state.get(parameter, {})
            members = (parameter, *(v for v in state.values() if isinstance(v, torch.Tensor)))
            if all(id(member) in owned for member in members):
                units[name] = [owned[id(member)] for member in members]
    return units


def _groups(units: dict[str, list[Leaf]], steps: int) -> list[list[str]]:
    """The parameters, the largest first, in as many groups of about equal bytes; without the last,
    which takes what is left."""
    sizes = {name: sum(leaf.tensor.nbytes for leaf in unit) for name, unit in units.items()}
    share = sum(sizes.values()) / steps
    groups: list[list[str]] = [[]]
    taken = 0
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if taken >= share * len(groups):
            groups.append([])
        groups[-1].append(name)
        taken += sizes[name]
    return groups[: steps - 1]
