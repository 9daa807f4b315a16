"""Sharing out: the leaves of a state as boxes, and which of them this rank writes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from everstep.errors import Unsupported
from everstep.format.boxes import Box
from everstep.sharding.layout import is_dtensor, shards_of, spread_of
from everstep.sharding.leaves import Leaf, dtype_name, has_elements
from everstep.sharding.mapped import Mapped, Place
from everstep.sharding.redundancy import ranks_of, redundancy_free
from everstep.sharding.writers import LARGE_BYTES, Held, Holders, Shape, assign_writers
from everstep.state.optimizers import OptimizerState


class Of(NamedTuple):
    """Of what a tensor is the state."""

    optimizer: OptimizerState
    name: str
    parameter: torch.Tensor
    key: str


class Parts:
    """What several parameters have in common, though it is one number of one tensor: `step` of q, k
    and v which are one matrix globally. It is written once, and has to be the same."""

    def __init__(self) -> None:
        self._twins: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def once(self, places: Iterable[tuple[Place, Of | None]]) -> list[tuple[Place, Of | None]]:
        """Without what is there twice."""
        found: list[tuple[Place, Of | None]] = []
        first: dict[str, torch.Tensor] = {}
        for place, state in places:
            leaf = place.leaf
            if state and not place.alike and leaf.box is None:
                known = first.setdefault(leaf.name, leaf.tensor)
                if known is not leaf.tensor:
                    self._twins.append((leaf.name, known, leaf.tensor))
                    continue
            found.append((place, state))
        return found

    def check(self) -> None:
        """Raises Unsupported. Waits for a device, if they are on one."""
        for name, one, other in self._twins:
            if not torch.equal(one, other):
                raise Unsupported(
                    f"capturing {name!r}: it is {one} and {other}, in different parameters that "
                    f"are parts of one tensor. Give parts that are not updated together names of "
                    f"their own"
                )


def places_of(
    leaves: Sequence[Leaf], states: Mapping[int, Of], mapped: Mapped
) -> list[tuple[Place, Of | None]]:
    """What is to be written of leaves, box by box. `states`: by id() of a tensor."""
    found: list[tuple[Place, Of | None]] = []
    for leaf in leaves:
        state = states.get(id(leaf.tensor))
        told = state and (state.optimizer.name, state.name, state.parameter, state.key)
        places = mapped.places(leaf, told)
        if places is None:
            base = leaf.tensor if state is None else state.parameter
            alike = spread_of(base) == spread_of(leaf.tensor)
            name = leaf.name if state is None else state.name
            places = [Place(piece, name, alike) for piece in pieces_of(leaf)]
        found += [(place, state) for place in places if has_elements(place.leaf)]
    return found


def shared_out(
    places: Sequence[tuple[Place, Of | None]], holders: Holders, rank: int
) -> tuple[list[Leaf], list[Leaf]]:
    """What of them this rank writes, and what others do. Raises Unsupported."""
    held = []
    for place, state in places:
        name, box = place.parameter, place.leaf.box
        ranks = holders.of(name, box) if place.alike else holders.of_any(name)
        if state and (owner := ranks_of(state.optimizer.optimizer, state.parameter)):
            ranks = redundancy_free(place.leaf.name, ranks, *owner)
        if state is None and _is_buffer(place.leaf):
            ranks = ranks[:1]
        held.append(Held(place.leaf, ranks))
    return assign_writers(held, rank)


def _is_buffer(leaf: Leaf) -> bool:
    """Whether it may be another on each rank, as BatchNorm's statistics: the first rank's count, as
    DDP has it, and all of them, so that what comes back is what one rank had."""
    is_parameter = leaf.owner is not None or isinstance(leaf.tensor, torch.nn.Parameter)
    is_small = leaf.tensor.nbytes < LARGE_BYTES  # else it is some value, which all write together
    return is_small and leaf.box is None and not is_parameter


def shapes_of(leaves: Iterable[Leaf], mapped: Mapped) -> dict[str, Shape]:
    """What other ranks are told of parameters and buffers."""
    shapes: dict[str, Shape] = {}
    boxes: dict[str, list[Box]] = {}
    for leaf in leaves:
        dtype = dtype_name(leaf.tensor.dtype)
        pieces = mapped.split(leaf.tensor)
        if pieces is None:
            spread = spread_of(leaf.tensor)
            shapes[leaf.name] = Shape(dtype, tuple(leaf.tensor.shape), spread)
        for piece in pieces or ():
            found = boxes.setdefault(piece.name, [])
            found.append(piece.box)
            listed = tuple(sorted(found, key=lambda box: (box.offsets, box.lengths)))
            shapes[piece.name] = Shape(dtype, piece.shape, listed)
    return shapes


def pieces_of(leaf: Leaf) -> list[Leaf]:
    """The leaf itself, or the boxes of a DTensor that are here."""
    if not is_dtensor(leaf.tensor):
        return [leaf]
    shape, shards = shards_of(leaf.tensor)
    return [Leaf(leaf.name, tensor, leaf.owner, box, shape) for box, tensor in shards]
