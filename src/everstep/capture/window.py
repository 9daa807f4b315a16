"""A window: a state that is copied over several steps. Which of its pieces at which step.

A piece is a parameter with all of its optimizer state, never a part of that: a parameter of one
step with moments of another replays to a wrong state.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from everstep.sharding.leaves import Leaf
from everstep.state.optimizers import OptimizerState
from everstep.state.view import Walk

WINDOW_MAX = 64
FILL = 0.95
"""Of what fits beside forward and backward, the part that is planned for: both vary."""
RECORDS_MAX = 1.0
"""Of the state's bytes, those of the gradients that a window may record."""
GAIN_MIN = 0.1
"""Of a step's forward and backward: by so much a window must be better than a full copy."""
CALL_S = 0.004
"""What a step of a window takes from training even where all is copied in time, about: the call
itself, and as much around the update."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is copied together, and the gradient that brings it one step further. In bytes, of all
    ranks together. `leaves`: their names."""

    name: str
    size: int
    gradient: int
    leaves: tuple[str, ...] = ()


class Figures(NamedTuple):
    """By which windows are chosen, of all ranks together. `rest`: bytes that are copied at the last
    step in any case. The others: see CopySpeed."""

    rest: int
    bytes_per_s: float
    overlap_s: float


class Window:
    """One state on its way. For the thread that trains; of several ranks each has the same pieces
    at the same steps, and of a piece what it writes, which may be nothing."""

    def __init__(self, walk: Walk, due: int, groups: Sequence[Sequence[Piece]]) -> None:
        """`due`: its last step. `groups`: what is copied at each of the others; the rest comes
        last."""
        self.due = due
        self.steps: list[int] = []
        """At which something was copied."""
        self.copied: set[str] = set()
        """Names of parameters."""
        self._groups = groups
        self._left: dict[str, list[Leaf]] = {}
        for leaf in walk.leaves:
            if leaf.owner is not None:  # the others may be other tensors by then
                self._left.setdefault(leaf.name, []).append(leaf)

    def take(self, step: int) -> list[Leaf]:
        """What is copied at this step; at the last, all that is left of what optimizers own."""
        index = len(self.steps)
        self.steps.append(step)
        names = list(self._left)
        if step < self.due:
            group = self._groups[index] if index < len(self._groups) else ()
            self.copied.update(piece.name for piece in group)
            names = [name for piece in group for name in piece.leaves]
        return [leaf for name in names for leaf in self._left.pop(name, ())]

    def share(self, calls: Sequence[Any] | None = None) -> dict[str, Any]:
        """What a descriptor says of the step that was taken last. `calls`: of the optimizers, for
        the pieces before it; None at the first, and where a record says them."""
        return {"steps": list(self.steps), "calls": calls, "ends": self.steps[-1] >= self.due}


def pieces_of(optimizers: Iterable[OptimizerState], walk: Walk) -> list[Piece]:
    """Each parameter with all its optimizer state, where nobody else writes to any of it."""
    eager = {leaf.name for leaf in walk.leaves if leaf.owner is None}
    found = []
    for optimizer in optimizers:
        for _, name, parameter, _ in optimizer.parameters():
            state = optimizer.state.get(parameter, {})
            members = [parameter, *(v for v in state.values() if isinstance(v, torch.Tensor))]
            leaves = [walk.names[id(member)] for member in members if id(member) in walk.names]
            if len(leaves) == len(members) and eager.isdisjoint(leaves):
                size = sum(member.numel() * member.element_size() for member in members)
                gradient = parameter.numel() * gradient_item(parameter)
                found.append(Piece(name, size, gradient, tuple(leaves)))
    return found


def gradient_item(parameter: torch.Tensor) -> int:
    """Bytes of an element of the gradient that is there, or of one to come: it may be of another
    dtype. Of a sparse one, as if it were dense."""
    if not parameter.requires_grad:
        return 0
    found = parameter.grad
    dtype = getattr(parameter, "grad_dtype", None) if found is None else found.dtype
    return int((dtype or parameter.dtype).itemsize)


def why_undivided(optimizers: list[OptimizerState]) -> str | None:
    """Why not now: numbers in an optimizer's state are stored once, with the last piece."""
    names = (optimizer.name for optimizer in optimizers if optimizer.keeps_numbers)
    why = (f"{name!r} keeps numbers that are no tensors in its state" for name in names)
    return next(why, None)


def equal_groups(pieces: Iterable[Piece], steps: int) -> list[list[Piece]]:
    """What is copied at each step of a window of so many, in about equal bytes; without the last,
    which takes what is left."""
    free = [replace(piece, gradient=0) for piece in pieces]
    return _grouped(free, sum(piece.size for piece in free) / steps)[: steps - 1]


def steps_of_base(pieces: Iterable[Piece], figures: Figures, most: int) -> int:
    """The steps over which a base of a log is spread. Its records are there anyway, so that neither
    gradients nor calls cost anything."""
    free = [replace(piece, gradient=0) for piece in pieces]
    return 1 + len(schedule(free, figures, most, call_s=0.0))


def schedule(
    pieces: Sequence[Piece], figures: Figures, every: int, call_s: float = CALL_S
) -> list[list[Piece]]:
    """What is copied at each step but the last of the window that costs training least, of at most
    `every` steps; nothing where that is the full copy at once, or nothing is measured.

    A step copies what fits beside its forward and backward: the gradients of what is copied
    already, and more pieces. What is left at the due step is waited for there. The last gradients
    are copied after that update, and no update waits for them. With a window of one step this is
    the lazy full copy, (T − 1) steps for a copy that takes T of them. GoCkpt copies equal shares
    over N = T steps and waits for all gradients, N(N−1)/14 steps where they are 2 of a parameter's
    14 bytes.
    """
    rest, bytes_per_s, overlap_s = figures
    if not bytes_per_s or not overlap_s:
        return []

    def late_with(size: int) -> float:
        return max(0.0, size / bytes_per_s - overlap_s)

    state = remaining = rest + sum(piece.size for piece in pieces)
    best, best_s = 0, late_with(state) - GAIN_MIN * overlap_s
    late_s, gradients, recorded = 0.0, 0, 0
    groups = _grouped(pieces, FILL * bytes_per_s * overlap_s)[: min(every, WINDOW_MAX) - 1]
    for count, group in enumerate(groups, 1):
        size = sum(piece.size for piece in group)
        late_s += late_with(size + gradients)
        recorded += gradients
        gradients += sum(piece.gradient for piece in group)
        remaining -= size
        cost_s = late_s + late_with(remaining) + count * call_s
        if cost_s < best_s and recorded <= RECORDS_MAX * state:
            best, best_s = count, cost_s
    return groups[:best]


def _grouped(pieces: Iterable[Piece], room: float) -> list[list[Piece]]:
    """In groups of about `room` bytes, in which are the gradients of those before. The largest come
    last: the gradients of what is copied late are recorded seldom."""
    groups: list[list[Piece]] = []
    used, gradients = room, 0.0
    for piece in sorted(pieces, key=lambda piece: (piece.size, piece.name)):
        if not groups or used + piece.size / 2 > room:
            groups.append([])
            used = gradients
        groups[-1].append(piece)
        used += piece.size
        gradients += piece.gradient
    return groups
