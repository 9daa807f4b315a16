"""Writers: which rank captures which boxes. Each is written once, though many ranks may hold it.

Pure but for `Holders.ask`: every rank comes to the same answer by itself, from what it holds and
who else holds the same. What a group of ranks shares is spread evenly over them, by bytes.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep.format.boxes import Box
from everstep.format.document import digest_of
from everstep.state.leaves import Leaf
from everstep.state.spread import Spread
from everstep.state.world import World

_LARGE_BYTES = 1 << 20
"""A rank's share of a tensor that is split: what is smaller costs more to place than it evens."""

_EXCHANGE_S = 60.0


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


@dataclass(frozen=True, slots=True)
class Shape:
    """What ranks compare of a tensor: dtype and global shape, and how it is spread (None: it is
    whole)."""

    dtype: str
    shape: tuple[int, ...]
    spread: Spread | None


class Holders:
    """Which ranks hold which tensors: asked once, and again when names change.

    Tensors that are spread alike are one class; ranks exchange a digest of the names of each, and
    the names themselves only where these differ (stages of a pipeline): little, however many
    tensors and ranks there are.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._version = 0
        self._told: list[Any] | None = None
        self._known: list[Any] | None = None
        self.digest = ""
        """Of how all ranks' tensors are spread; the same on all of them."""
        self._of_name: dict[str, list[tuple[int, Spread | None]]] = {}
        self._shapes: Mapping[str, Shape] = {}

    def ask(self, shapes: Mapping[str, Shape]) -> None:
        """What this rank holds. Where that is not known yet, all ranks have to ask, in whatever
        order, and each waits until the others have told as often as it has. Raises Unavailable;
        who asks again then goes on waiting."""
        classes: dict[Spread | None, list[str]] = {}
        for name in sorted(shapes):
            classes.setdefault(shapes[name].spread, []).append(name)
        said: list[list[Any]] = [
            [spread and spread.to_json(), _digest(names, shapes)]
            for spread, names in classes.items()
        ]
        self._shapes = shapes
        if said == self._known:
            return
        if said != self._told:
            self._told, self._version = said, self._version + 1
            for (_, digest), names in zip(said, classes.values(), strict=True):
                self._world.tell(f"names/{digest}", names)  # before who refers to it
            self._world.tell(f"layout/{self._world.rank}", [self._version, said])
        everything = self._world.hear_all(
            "layout", lambda told: told[0] >= self._version, _EXCHANGE_S
        )
        own = {digest: names for (_, digest), names in zip(said, classes.values(), strict=True)}
        self._learn([rows for _, rows in everything], own)
        self._known = said

    def _learn(self, everything: Sequence[Sequence[Any]], names: dict[str, list[str]]) -> None:
        """What all ranks told. `names`: by digest, as far as they are known here."""
        self.digest = digest_of(json.dumps(everything).encode())
        self._of_name = {}
        for rank, found in enumerate(everything):
            for spread, digest in found:
                if digest not in names:
                    names[digest] = self._world.heard(f"names/{digest}") or []
                known = None if spread is None else Spread.from_json(spread)
                for name in names[digest]:
                    self._of_name.setdefault(name, []).append((rank, known))

    def of(self, name: str) -> tuple[int, ...]:
        """The ranks that have just the boxes of this tensor that this rank has."""
        ndim, mine = len(self._shapes[name].shape), self._shapes[name].spread
        own = _splits(mine, self._world.rank, ndim)
        return tuple(
            rank for rank, spread in self._of_name[name] if _splits(spread, rank, ndim) == own
        )

    def of_any(self, name: str) -> tuple[int, ...]:
        """The ranks that have any part of this tensor."""
        return tuple(rank for rank, _ in self._of_name[name])


def _splits(spread: Spread | None, rank: int, ndim: int) -> Any:
    return ((),) * ndim if spread is None else spread.splits(rank, ndim)


def _digest(names: Sequence[str], shapes: Mapping[str, Shape]) -> str:
    rows = [(name, shapes[name].dtype, *shapes[name].shape) for name in names]
    return digest_of(json.dumps(rows).encode())


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
