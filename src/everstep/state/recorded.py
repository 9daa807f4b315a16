"""A record's own tensors: gradients as what their parameters are globally; and of several ranks,
which of them, and what of each, this one writes."""

import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from everstep.format.boxes import Box
from everstep.format.tables import is_gradient
from everstep.sharding.layout import local_of, shards_like
from everstep.sharding.leaves import Leaf
from everstep.sharding.ranked import unowned
from everstep.sharding.writers import Held, Holders, assign_writers
from everstep.state.optimizers import OptimizerState


@dataclass(slots=True)
class _Share:
    """What this rank writes of a parameter, of which `memory` is here: of its global `shape` these
    boxes, which lie at those places of the memory. `writes_whole`: it is the one that writes what
    cannot be cut, of those that have the same; `is_first`: it is the first of all that have any
    part."""

    shape: tuple[int, ...]
    memory: torch.Tensor
    is_first: bool
    writes_whole: bool
    places: list[tuple[tuple[slice, ...], Box | None]] = field(default_factory=list)


class RecordShares:
    """Of gradients what a rank writes of their parameters; the same at each step, for as long as
    `holders` knows the same."""

    def __init__(self, optimizers: Iterable[OptimizerState], holders: Holders, rank: int) -> None:
        self._rank = rank
        self._shares: dict[str, _Share] = {}
        boxes: list[Held] = []
        for optimizer in optimizers:
            for _, name, parameter, _ in optimizer.parameters():
                ranks, memory = holders.of(name), local_of(parameter)
                shape, shards = shards_like(parameter, memory)
                writer = ranks[zlib.crc32(name.encode()) % len(ranks)]
                is_first = holders.of_any(name)[0] == rank
                self._shares[name] = _Share(shape, memory, is_first, writer == rank)
                boxes += [
                    (Leaf(name, view, None, box, shape), ranks)
                    for box, view in shards
                    if view.numel() or 0 in shape
                ]
        for leaf in assign_writers(boxes, rank)[0]:
            share = self._shares[leaf.name]
            assert leaf.box is not None
            # Of one that is whole the strides are kept, too.
            box = None if leaf.box == Box.whole(share.shape) else leaf.box
            share.places.append((_inside(leaf.tensor, share.memory), box))

    def leaves(
        self, tensors: Mapping[str, torch.Tensor], special: Container[str], owner: int
    ) -> tuple[Leaf, ...]:
        """The own tensors of a record as far as this rank writes them: of gradients what it writes
        of their parameters; what each rank has for itself; and of the rest all, if it is the first.

        `special`: names of gradients that are not as their parameter is (compressed, or from before
        clipping and no DTensor's), which one rank writes whole: it alone says how they are to be
        read.
        """
        found: list[Leaf] = []
        for name, tensor in tensors.items():
            head, _, rest = name.partition(".")
            is_shared = is_gradient(name) or "!indices" in head
            share = self._shares.get(rest) if is_shared else None
            if share is None:
                if self._rank == 0 or unowned(name) != name:
                    found.append(Leaf(name, tensor, owner))
            elif name in special or tensor.shape != share.memory.shape:
                if share.writes_whole:
                    found.append(Leaf(name, tensor, owner))
            else:
                for inside, box in share.places:
                    part, shape = tensor[inside] if inside else tensor, share.shape if box else None
                    found.append(Leaf(name, part, owner, box, shape))
        return tuple(found)

    def speaks_for(self, name: str) -> bool:
        """Whether it is this rank that tells of a parameter what all that have a part of it have in
        common."""
        return self._shares[name].is_first


def _inside(view: torch.Tensor, whole: torch.Tensor) -> tuple[slice, ...]:
    """Where in a tensor a box of it lies; nothing where it is all of it."""
    if view.shape == whole.shape:
        return ()
    at = int(view.storage_offset() - whole.storage_offset())
    starts = {}
    for dim in sorted(range(whole.ndim), key=whole.stride, reverse=True):
        starts[dim], at = divmod(at, whole.stride(dim))
    return tuple(slice(starts[dim], starts[dim] + view.shape[dim]) for dim in range(whole.ndim))
