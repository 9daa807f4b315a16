"""Layouts: which boxes of a global tensor are in this rank's memory, and who else has them. Nothing
is gathered.

A plain tensor is whole; what a DTensor has here, its mesh and placements say. Another class of
sharded tensors goes into is_dtensor, local_of and shards_of; a wrapper of modules goes as fsdp1.py
does, which state/view.py (name_parameters) and state/modules.py ask. DTensor's package is
never imported here, which takes 0.7 s: where there is one, somebody else has imported it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
import torch.distributed as dist

from everstep.errors import Unsupported
from everstep.format.boxes import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Of which most are: an isinstance() of DTensor takes ten times as long as to look here."""

_Interval = tuple[int, int]
"""Start and length along one dim of the global tensor."""

Axis = tuple[int, int] | None
"""What one axis of a mesh does to a tensor: nothing (replicas); or it splits a dim, in each of so
many blocks (1: plainly; 0: after all other axes)."""


class LocalBox(NamedTuple):
    """A box of a global tensor, and the memory of it in this process: a plain tensor of the box's
    lengths, perhaps strided."""

    box: Box
    tensor: torch.Tensor

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> "LocalBox":
        """All of a tensor is there."""
        return cls(Box.whole(tuple(tensor.shape)), tensor)


Local = tuple[tuple[int, ...], list[LocalBox]]
"""The global shape of a tensor, and the boxes of it that are here."""


Split = tuple[int, int, int]
"""One mesh axis' share of a tensor's dim, (count, index, blocks): it is part number `index` of
`count`, of each of `blocks` (0: of all, and after all other splits)."""


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """A mesh: its ranks, row-major, its shape, and what each of its axes does."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]

    def splits(self, rank: int, ndim: int) -> tuple[tuple[Split, ...], ...] | None:
        """The share of a rank of a tensor of so many dims: by dim, in order. Equal ones are of
        equal boxes. None for a rank that has none."""
        if rank not in self.ranks:
            return None
        at = self.ranks.index(rank)
        found: list[list[Split]] = [[] for _ in range(ndim)]
        step = len(self.ranks)
        for count, axis in zip(self.shape, self.axes, strict=True):
            step //= count
            index, at = divmod(at, step)
            if axis is not None:
                dim, blocks = axis
                found[dim % ndim].append((count, index, blocks))
        return tuple(map(tuple, found))


def is_dtensor(tensor: object) -> "TypeGuard[DTensor]":
    """Whether it is one. Fast, where it is not."""
    if type(tensor) in _PLAIN:
        return False
    return isinstance(tensor, getattr(_package(), "DTensor", ()))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's plain memory of it, as one tensor: the same object for as long as that stays."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def shards_of(tensor: torch.Tensor, memory: torch.Tensor | None = None) -> Local:
    """The global shape, and the boxes that are here, each with its memory: views, perhaps strided;
    or with their parts of other `memory` of the local shape.

    Raises Unsupported for a layout that is not known.
    """
    local, shape = local_of(tensor), tuple(tensor.shape)
    memory = local if memory is None else memory
    if not is_dtensor(tensor):
        return shape, [LocalBox(Box.whole(shape), memory)]
    splits = _spec_of(tensor).splits(dist.get_rank(), len(shape))
    if splits is None:  # this rank is not in the mesh
        return shape, []
    if 0 in shape:  # a tensor all the same; what FSDP2 makes of it locally has other shapes
        return shape, [LocalBox(Box.whole(shape), local.new_empty(shape))]
    intervals = [_split_all(length, along) for length, along in zip(shape, splits, strict=True)]
    lengths = tuple(sum(length for _, length in along) for along in intervals)
    if lengths != tuple(local.shape):
        raise Unsupported(
            f"capturing a DTensor: its local shape is {list(local.shape)}, its placements "
            f"{tensor.placements} on a mesh of shape {list(tensor.device_mesh.shape)} would make "
            f"it {list(lengths)}"
        )
    return shape, _cut(memory, intervals)


def shards_like(parameter: torch.Tensor, local: torch.Tensor) -> Local:
    """The same of plain memory that belongs to a parameter (a gradient): cut as this rank's part of
    it is, where it has that part's shape, else whole."""
    is_part = local.shape == local_of(parameter).shape
    return shards_of(parameter, local) if is_part else shards_of(local)


def part_of(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """Of a gradient what belongs to this rank's part of the parameter, where it is here: also where
    it is replicated and the optimizer uses a part (torch makes such ones of embeddings). None where
    it is not here without communication."""
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        return None if is_dtensor(gradient) or is_dtensor(parameter) else gradient
    is_same_mesh = gradient.device_mesh == parameter.device_mesh
    if is_same_mesh and gradient.placements == parameter.placements:
        return gradient._local_tensor  # as nearly always, and 50 times as fast to see
    if spread_of(gradient) == spread_of(parameter):
        return gradient._local_tensor
    is_here = is_same_mesh and all(
        has.is_replicate() or has == wants
        for has, wants in zip(gradient.placements, parameter.placements, strict=True)
    )
    if not is_here:
        return None
    with torch.no_grad():
        return gradient.redistribute(placements=parameter.placements)._local_tensor


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Plain memory of the same form as a tensor of the same kind: on the mesh of a DTensor, placed
    as it is. As FSDP2 makes them."""
    if not is_dtensor(tensor):
        return local
    spec = tensor._spec
    if local.dtype != tensor.dtype and spec.tensor_meta:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return cast(torch.Tensor, _package().DTensor(local, spec, requires_grad=False))


def spread_of(tensor: torch.Tensor) -> ShardingSpec | None:
    """How a DTensor is spread over ranks; None for a plain tensor, which is whole. Raises
    Unsupported."""
    return _spec_of(tensor) if is_dtensor(tensor) else None


def _package() -> Any:
    """None where nobody has imported it."""
    return sys.modules.get("torch.distributed.tensor")


def _spec_of(tensor: "DTensor") -> ShardingSpec:
    mesh = tensor.device_mesh
    axes = tuple(
        _axis(placement, tensor.placements[number + 1 :], tuple(mesh.shape)[number + 1 :])
        for number, placement in enumerate(tensor.placements)
    )
    return ShardingSpec(tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape), axes)


def _axis(placement: "Placement", later: "Sequence[Placement]", mesh_shape: Sequence[int]) -> Axis:
    dim: int = getattr(placement, "dim", 0)
    if factor := getattr(placement, "split_factor", 0):  # only _StridedShard has one
        return dim, _blocks(dim, int(factor), later, mesh_shape)
    if placement.is_shard():
        return dim, 1
    if placement.is_replicate():
        return None
    raise Unsupported(
        f"capturing a DTensor: by its placement {placement} its ranks have yet to be reduced; "
        f"redistribute it first"
    )


def _blocks(dim: int, factor: int, later: "Sequence[Placement]", mesh_shape: Sequence[int]) -> int:
    """FSDP after tensor parallelism: what later axes of the mesh split was split before this one
    (0), where these come to `factor`; else it is what its definition says: a part of each of
    so many blocks. They differ where the blocks are of different sizes."""
    counts = [
        count for placement, count in zip(later, mesh_shape, strict=True) if placement.is_shard(dim)
    ]
    return 0 if prod(counts) == factor else factor


def _split_all(length: int, splits: Sequence[Split]) -> list[_Interval]:
    found = [(0, length)]
    plain_first = sorted(splits, key=lambda split: split[2] == 0)
    for count, index, blocks in plain_first:
        total = sum(size for _, size in found)
        step = -(-total // max(1, blocks))
        parts: list[_Interval] = []
        for start in range(0, total, step) if total else ():
            end = min(total, start + step)
            share = -(-(end - start) // count)
            first = min(end, start + index * share)
            parts += _take(found, first, min(end, first + share))
        found = parts if count > 1 else found
    return found


def _take(intervals: Sequence[_Interval], start: int, end: int) -> list[_Interval]:
    """Elements [start, end) of the concatenation of intervals."""
    found, at = [], 0
    for first, length in intervals:
        low, high = max(start, at), min(end, at + length)
        if low < high:
            found.append((first + low - at, high - low))
        at += length
    return found


def _cut(local: torch.Tensor, intervals: Sequence[Sequence[_Interval]]) -> list[LocalBox]:
    """The local tensor as boxes; one, where it has no gaps."""
    found = []
    along = []
    for spans in intervals:
        places = accumulate((length for _, length in spans), initial=0)
        along.append([(*span, at) for span, at in zip(spans, places, strict=False)])
    for chosen in product(*along):
        view: Any = local.detach()
        for dim, (_, length, at) in enumerate(chosen):
            if length != view.shape[dim]:
                view = view.narrow(dim, at, length)
        box = Box(tuple(start for start, _, _ in chosen), tuple(size for _, size, _ in chosen))
        found.append(LocalBox(box, view))
    return found
