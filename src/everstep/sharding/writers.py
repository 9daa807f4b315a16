"""Writers: which rank captures which boxes. Each is written once, though many ranks may hold it.

Pure but for `Holders.ask`: every rank comes to the same answer by itself, from what it holds and
who else holds the same. What a group of ranks shares is spread evenly over them, by bytes.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.errors import Unsupported
from everstep.format.boxes import Box
from everstep.format.document import digest_of
from everstep.sharding.layout import ShardingSpec, spread_of
from everstep.sharding.leaves import Leaf, dtype_name
from everstep.sharding.mapped import Mapped, Place
from everstep.sharding.redundancy import updating_ranks
from everstep.sharding.topology import PADDED
from everstep.sharding.world import World

_GROUPING = "grouping"
LARGE_BYTES = 1 << 20
"""A rank's share of a tensor that is split: what is smaller costs more to place than it evens."""

_EXCHANGE_S = 60.0


Held = tuple[Leaf, tuple[int, ...]]
"""A leaf of this rank, and the ranks that hold the same."""


def assign_writers(held: Iterable[Held], rank: int) -> tuple[list[Leaf], list[Leaf]]:
    """What this rank writes of what it holds, and what others write of it. Large tensors are split
    by rows between all that hold them, the others go to one each."""
    groups: dict[tuple[int, ...], list[Leaf]] = {}
    for leaf, ranks in held:
        groups.setdefault(ranks, []).append(leaf)
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
            writer = min(loads, key=loads.__getitem__)
            loads[writer] += leaf.tensor.nbytes
            (own if writer == rank else others).append(leaf)
    return own, others


Holding = ShardingSpec | tuple[Box, ...] | None
"""How a tensor is spread (None: it is whole), or, where only one rank can tell, the boxes that it
has."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What ranks compare of a tensor: dtype and global shape, and how it is spread."""

    dtype: str
    shape: tuple[int, ...]
    spread: Holding


class Holders:
    """Which ranks hold which tensors: asked once, and again when names change.

    Tensors that are spread alike are one class; ranks exchange a digest of the names of each, and
    the names themselves only where these differ (stages of a pipeline): little, however many
    tensors and ranks there are.
    """

    def __init__(self, world: World, what: str = "layout") -> None:
        """`what`: is asked for, where several ask for something each."""
        self._world = world
        self._what = what
        self._version = 0
        self._told: list[Any] | None = None
        self._known: list[Any] | None = None
        self.digest = ""
        """Of how all ranks' tensors are spread; the same on all of them."""
        self._of_name: dict[str, list[tuple[int, Holding]]] = {}
        self._shapes: Mapping[str, Shape] = {}
        self.is_common = False
        """Whether each rank has something of each tensor, and none has boxes of them in parameters
        of its own."""

    def ask(self, shapes: Mapping[str, Shape], boxes: str = "") -> None:
        """What this rank holds; `boxes`: how its parameters consist of boxes (mapped.described), as
        a digest, if they do. Where that is not known yet, all ranks have to ask, in whatever
        order, and each waits until the others have told as often as it has. Raises Unavailable;
        who asks again then goes on waiting."""
        classes: dict[Holding, list[str]] = {}
        for name in sorted(shapes):
            classes.setdefault(shapes[name].spread, []).append(name)
        said = [[_to_json(each), _digest(names, shapes)] for each, names in classes.items()]
        known = list(classes.values())
        if boxes:
            said.append([_GROUPING, boxes])
        self._shapes = shapes
        if said == self._known:
            return
        if said != self._told:
            self._told, self._version = said, self._version + 1
            for (_, digest), names in zip(said, known, strict=False):
                self._world.tell(f"names/{digest}", names)  # before who refers to it
            self._world.tell(f"{self._what}/{self._world.rank}", [self._version, said])
        everything = self._world.hear_all(
            self._what, lambda told: told[0] >= self._version, _EXCHANGE_S
        )
        own = {digest: names for (_, digest), names in zip(said, known, strict=False)}
        self._learn([rows for _, rows in everything], own)
        self._known = said

    def _learn(self, everything: Sequence[Sequence[Any]], names: dict[str, list[str]]) -> None:
        """What all ranks told. `names`: by digest, as far as they are known here."""
        self.digest = digest_of(json.dumps(everything).encode())
        if any(digest.endswith(PADDED) for found in everything for _, digest in found):
            self.digest += PADDED
        self._of_name = {}
        for rank, found in enumerate(everything):
            for spread, digest in found:
                if spread == _GROUPING:
                    continue
                if digest not in names:
                    names[digest] = self._world.heard(f"names/{digest}") or []
                held = _from_json(spread)
                for name in names[digest]:
                    self._of_name.setdefault(name, []).append((rank, held))
        has_boxes = any(spread == _GROUPING for found in everything for spread, _ in found)
        self.is_common = not has_boxes and all(
            len({rank for rank, _ in found}) == self._world.size for found in self._of_name.values()
        )

    def of(self, name: str, box: Box | None = None) -> tuple[int, ...]:
        """The ranks that have this box of this tensor, or, where all can tell of each other what
        they have, just the boxes that this rank has."""
        shape, mine = self._shapes[name].shape, self._shapes[name].spread
        ndim, rank = len(shape), self._world.rank
        own = None if isinstance(mine, tuple) else _splits(mine, rank, ndim)
        box = box or Box.whole(shape)
        return tuple(
            rank
            for rank, spread in self._of_name[name]
            if (
                box in _boxes(spread, shape)
                if isinstance(mine, tuple) or isinstance(spread, tuple)
                else _splits(spread, rank, ndim) == own
            )
        )

    def of_any(self, name: str) -> tuple[int, ...]:
        """The ranks that have any part of this tensor."""
        return tuple(
            rank
            for rank, spread in self._of_name[name]
            if not isinstance(spread, tuple)
            or any(box.count for box in spread)
            or 0 in self._shapes[name].shape
        )


Twins = list[tuple[str, torch.Tensor, torch.Tensor]]
"""What several parameters have in common, though it is one number of one tensor: `step` of q, k and
v which are one matrix globally. It is written once, and has to be the same."""


def without_twins(places: Iterable[Place]) -> tuple[list[Place], Twins]:
    """The places without what is there twice, and that."""
    found: list[Place] = []
    twins: Twins = []
    first: dict[str, torch.Tensor] = {}
    for place in places:
        leaf = place.leaf
        if place.state and not place.is_alike and leaf.box is None:
            known = first.setdefault(leaf.name, leaf.tensor)
            if known is not leaf.tensor:
                twins.append((leaf.name, known, leaf.tensor))
                continue
        found.append(place)
    return found, twins


def check_twins(twins: Twins) -> None:
    """Raises Unsupported. Waits for a device, if they are on one."""
    for name, one, other in twins:
        if not torch.equal(one, other):
            raise Unsupported(
                f"capturing {name!r}: it is {one} and {other}, in different parameters that are "
                f"parts of one tensor. Give parts that are not updated together names of their own"
            )


def shared_out(
    places: Iterable[Place], holders: Holders, rank: int
) -> tuple[list[Leaf], list[Leaf]]:
    """What of them this rank writes, and what others do. Raises Unsupported."""
    held: list[Held] = []
    for leaf, name, is_alike, state in places:
        ranks = holders.of(name, leaf.box) if is_alike else holders.of_any(name)
        if state:
            ranks = updating_ranks(state.optimizer, state.parameter, leaf.name, ranks)
        elif _is_buffer(leaf):
            ranks = ranks[:1]
        held.append((leaf, ranks))
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


def _to_json(spread: Holding) -> Any:
    if isinstance(spread, tuple):
        return {"boxes": [(box.offsets, box.lengths) for box in spread]}
    return spread and [spread.ranks, spread.shape, spread.axes]


def _from_json(value: Any) -> Holding:
    if isinstance(value, dict):
        return tuple(Box(tuple(at), tuple(lengths)) for at, lengths in value["boxes"])
    if value is None:
        return None
    ranks, shape, axes = value
    axes = tuple(axis and tuple(axis) for axis in axes)
    return ShardingSpec(tuple(ranks), tuple(shape), axes)


def _splits(spread: ShardingSpec | None, rank: int, ndim: int) -> Any:
    return ((),) * ndim if spread is None else spread.splits(rank, ndim)


def _boxes(spread: Holding, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Beside boxes that are listed: what is a DTensor on another rank is not compared with them."""
    if isinstance(spread, ShardingSpec):
        return ()
    return (Box.whole(shape),) if spread is None else spread


def _digest(names: Sequence[str], shapes: Mapping[str, Shape]) -> str:
    described = [(*shapes[name].shape, shapes[name].dtype) for name in names]
    return digest_of(json.dumps([names, described]).encode())


def _rows(leaf: Leaf, count: int) -> list[tuple[int, int]] | None:
    """The rows of each of so many ranks; None where it is not worth it."""
    if leaf.tensor.ndim == 0 or leaf.tensor.nbytes < count * LARGE_BYTES:
        return None
    length = leaf.tensor.shape[0]
    if length < count or not leaf.tensor.is_contiguous():
        return None
    return [(length * index // count, length * (index + 1) // count) for index in range(count)]


def _part(leaf: Leaf, start: int, end: int) -> Leaf:
    whole = leaf.box or Box.whole(tuple(leaf.tensor.shape))
    box = Box((whole.offsets[0] + start, *whole.offsets[1:]), (end - start, *whole.lengths[1:]))
    return leaf._replace(tensor=leaf.tensor[start:end], box=box, shape=leaf.whole_shape)
