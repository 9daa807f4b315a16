"""Writers: which rank captures which boxes. Each is written once, though many ranks may hold it.

Pure but for `Holders.of`: every rank comes to the same answer by itself, from what it holds and who
else holds the same. What a group of ranks shares is spread evenly over them, by bytes.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.format.boxes import Box
from everstep.format.document import digest_of
from everstep.state.leaves import Leaf
from everstep.state.world import World

_LARGE_BYTES = 1 << 20
"""A rank's share of a tensor that is split: what is smaller costs more to place than it evens."""


@dataclass(frozen=True, slots=True)
class Held:
    """A leaf of this rank, and the ranks that hold the same."""

    leaf: Leaf
    ranks: tuple[int, ...]


def chosen(held: Iterable[Held], rank: int) -> tuple[list[Leaf], list[Leaf]]:
    """What this rank writes of what it holds, and what others write of it. Large tensors are split
    by rows between all that hold them, the others go to one each."""
    groups: dict[tuple[int, ...], list[Leaf]] = {}
    for item in held:
        groups.setdefault(item.ranks, []).append(item.leaf)
    own: list[Leaf] = []
    others: list[Leaf] = []
    for ranks, leaves in groups.items():
        if ranks == (rank,):
            own += leaves
            continue
        loads = dict.fromkeys(ranks, 0)
        for leaf in sorted(leaves, key=lambda leaf: (-leaf.tensor.nbytes, leaf.entry)):
            if rows := _rows(leaf, len(ranks)):
                for other, (start, end) in zip(ranks, rows, strict=True):
                    (own if other == rank else others).append(_part(leaf, start, end))
                continue
            writer = min(ranks, key=loads.__getitem__)
            loads[writer] += leaf.tensor.nbytes
            (own if writer == rank else others).append(leaf)
    return own, others


class Holders:
    """Which ranks hold the plain tensors of a name: asked once, and again when names change."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._digest: str | None = None
        self._ranks: Mapping[str, tuple[int, ...]] = {}

    def of(self, shapes: Mapping[str, Sequence[object]]) -> Mapping[str, tuple[int, ...]]:
        """The ranks by name. `shapes`: of this rank's plain tensors, with their dtypes. Where it is
        not known yet, all ranks have to ask. Raises Unavailable."""
        said = json.dumps(sorted((name, *shape) for name, shape in shapes.items()))
        digest = digest_of(said.encode())
        if digest != self._digest:
            digests = self._world.gather("comparing the ranks' tensors", digest)
            is_first = digests.index(digest) == self._world.rank
            differ = len(set(digests)) > 1
            mine = list(shapes) if is_first and differ else None
            lists = self._world.gather("exchanging names", mine) if differ else []
            self._ranks = _holders(shapes, digests, lists)
            self._digest = digest
        return self._ranks


def _holders(
    shapes: Iterable[str], digests: Sequence[str], lists: Sequence[list[str] | None]
) -> dict[str, tuple[int, ...]]:
    if not lists:
        return dict.fromkeys(shapes, tuple(range(len(digests))))
    names = {
        digest: set(said) for digest, said in zip(digests, lists, strict=True) if said is not None
    }
    return {
        name: tuple(rank for rank, digest in enumerate(digests) if name in names[digest])
        for name in shapes
    }


def _rows(leaf: Leaf, count: int) -> list[tuple[int, int]] | None:
    """The rows of each of so many ranks; None where it is not worth it."""
    if leaf.tensor.ndim == 0 or leaf.tensor.nbytes < count * _LARGE_BYTES:
        return None
    length = leaf.tensor.shape[0]
    if length < count or not leaf.tensor.is_contiguous():
        return None
    return [(length * index // count, length * (index + 1) // count) for index in range(count)]


def _part(leaf: Leaf, start: int, end: int) -> Leaf:
    whole = leaf.box or Box.whole(tuple(leaf.tensor.shape))
    box = Box((whole.offsets[0] + start, *whole.offsets[1:]), (end - start, *whole.lengths[1:]))
    shape = leaf.shape or tuple(leaf.tensor.shape)
    return replace(leaf, tensor=leaf.tensor[start:end], box=box, shape=shape)
