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


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which pieces are copied at each step of a window but the last, which takes what is left."""

    groups: tuple[tuple[str, ...], ...] = ()
    stall_s: float = 0.0
    """For which updates and calls are expected to wait for copies, in all."""
    cost_s: float = 0.0
    """The same, with what the window's steps take where nothing waits."""

    @property
    def steps(self) -> int:
        """Of the window; 1: it is the full copy at once."""
        return len(self.groups) + 1


class Window:
    """One state on its way. For the thread that trains; of several ranks each has the same pieces
    at the same steps, and of a piece what it writes, which may be nothing."""

    def __init__(
        self, walk: Walk, due: int, pieces: Iterable[Piece], groups: Sequence[Sequence[str]]
    ) -> None:
        """`due`: its last step. `groups`: names of pieces, by the step at which they are copied;
        the others come last."""
        self.due = due
        self.steps: list[int] = []
        """At which something was copied."""
        self.copied: set[str] = set()
        """Names of parameters."""
        self._leaves_of = {piece.name: piece.leaves for piece in pieces}
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
            self.copied.update(group)
            names = [leaf for name in group for leaf in self._leaves_of[name]]
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
    for optimizer in optimizers:
        if optimizer.keeps_numbers:
            return f"{optimizer.name!r} keeps numbers that are no tensors in its state"
    return None


def equal_groups(pieces: Iterable[Piece], steps: int) -> list[list[str]]:
    """The largest pieces first, in as many groups of about equal bytes; without the last, which
    takes what is left."""
    ordered = _largest_first(pieces)
    share = sum(piece.size for piece in ordered) / steps
    groups: list[list[str]] = [[]]
    taken = 0
    for piece in ordered:
        if taken >= share * len(groups):
            groups.append([])
        groups[-1].append(piece.name)
        taken += piece.size
    return groups[: steps - 1]


def steps_of_base(pieces: Iterable[Piece], figures: Figures, most: int) -> int:
    """The steps over which a base of a log is spread. Its records are there anyway, so that neither
    gradients nor calls cost anything."""
    free = [replace(piece, gradient=0) for piece in pieces]
    return schedule(free, figures, most, call_s=0.0).steps


def schedule(
    pieces: Iterable[Piece], figures: Figures, every: int, call_s: float = CALL_S
) -> Schedule:
    """The window that costs training least, of at most `every` steps; of one while nothing is
    measured.

    A step copies what fits beside its forward and backward: the gradients of what is copied
    already, and more pieces, the largest first. What is left at the due step is waited for there.
    The last gradients are copied after that update, and no update waits for them. With a window of
    one step this is the lazy full copy, (T − 1) steps for a copy that takes T of them. GoCkpt
    copies equal shares over N = T steps and waits for all gradients, N(N−1)/14 steps where they are
    2 of a parameter's 14 bytes.
    """
    if not figures.bytes_per_s or not figures.overlap_s:
        return Schedule()
    ordered = _largest_first(pieces)
    full = _fill(ordered, figures, 1, call_s, False)
    found = [_fill(ordered, figures, every, call_s, overfull) for overfull in (False, True)]
    best = min(found, key=lambda one: (one.cost_s, one.steps))
    return best if best.cost_s + GAIN_MIN * figures.overlap_s < full.cost_s else full


def _largest_first(pieces: Iterable[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (-piece.size, piece.name))


def _fill(
    left: Sequence[Piece], figures: Figures, every: int, call_s: float, overfull: bool
) -> Schedule:
    """The best of the windows that are begun in this way. `overfull`: a step takes one piece more
    than fits, which is waited for; pieces may be larger than what fits."""
    rest, bytes_per_s, overlap_s = figures
    remaining = rest + sum(piece.size for piece in left)
    state, room = remaining, FILL * bytes_per_s * overlap_s
    groups: list[tuple[str, ...]] = []
    late, gradients, recorded = 0.0, 0, 0

    def late_with(size: float) -> float:
        return max(0.0, size / bytes_per_s - overlap_s)

    best = Schedule((), late_with(remaining), late_with(remaining))
    for _ in range(min(every, WINDOW_MAX) - 1):
        if remaining <= room or recorded + gradients > RECORDS_MAX * state:
            break
        chosen, left = _take(left, room - gradients, overfull)
        size = sum(piece.size for piece in chosen)
        late += late_with(size + gradients)
        recorded += gradients
        gradients += sum(piece.gradient for piece in chosen)
        remaining -= size
        groups.append(tuple(piece.name for piece in chosen))
        stall = late + late_with(remaining)
        cost = stall + len(groups) * call_s
        if cost < best.cost_s:
            best = Schedule(tuple(groups), stall, cost)
    return best


def _take(left: Sequence[Piece], room: float, overfull: bool) -> tuple[list[Piece], list[Piece]]:
    """Those that fit, the largest first, and the others."""
    chosen: list[Piece] = []
    others: list[Piece] = []
    for index, piece in enumerate(left):
        if room < left[-1].size:
            others += left[index:]
            break
        if piece.size <= room:
            chosen.append(piece)
            room -= piece.size
        else:
            others.append(piece)
    if overfull and others and room > 0:
        chosen.append(others.pop())
    return chosen, others
