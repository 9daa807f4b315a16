"""Meshes: which boxes of a DTensor lie here, and who else has them. Nothing is gathered.

Imported where there is a DTensor (layout.py), as the import of its package takes 0.7 s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from everstep.errors import Unsupported
from everstep.format.boxes import Box

Interval = tuple[int, int]
"""Start and length along one dim of the global tensor."""


def shards_of(tensor: DTensor) -> list[tuple[Box, torch.Tensor]]:
    """The boxes that are here, each with its local memory (views).

    Raises Unsupported for a layout that is not known.
    """
    mesh, local = tensor.device_mesh, tensor._local_tensor
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return []
    intervals = _intervals(tuple(tensor.shape), tuple(mesh.shape), coordinate, tensor.placements)
    lengths = tuple(sum(length for _, length in along) for along in intervals)
    if lengths != tuple(local.shape):
        raise Unsupported(
            f"capturing a DTensor: its local shape is {list(local.shape)}, its placements "
            f"{tensor.placements} on a mesh of shape {list(mesh.shape)} would make it "
            f"{list(lengths)}"
        )
    return _cut(local, intervals)


def holders_of(tensor: DTensor) -> tuple[int, ...]:
    """The ranks that hold the same boxes, rising."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    at = tuple(
        slice(None) if isinstance(placement, Replicate) else own
        for placement, own in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(sorted(mesh.mesh[at].flatten().tolist()))


@dataclass(frozen=True, slots=True)
class _Split:
    """One mesh axis' share of a tensor's dim: part number `index` of `count`, of each of `blocks`
    (0: of all, and after all other splits)."""

    count: int
    index: int
    blocks: int = 1


def _intervals(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[list[Interval]]:
    """For each dim of the tensor what of it is here, in the order in which it lies."""
    splits: list[list[_Split]] = [[] for _ in shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, _StridedShard)):
            blocks = 1
            if isinstance(placement, _StridedShard):
                blocks = _blocks(placement, placements[axis + 1 :], mesh_shape[axis + 1 :])
            split = _Split(mesh_shape[axis], coordinate[axis], blocks)
            splits[placement.dim % len(shape)].append(split)
        elif not isinstance(placement, Replicate):
            raise Unsupported(
                f"capturing a DTensor: by its placement {placement} its ranks have yet to be "
                f"reduced; redistribute it first"
            )
    return [_split_all(length, along) for length, along in zip(shape, splits, strict=True)]


def _blocks(strided: _StridedShard, later: Sequence[Placement], mesh_shape: Sequence[int]) -> int:
    """FSDP after tensor parallelism: what later axes of the mesh split was split before this one
    (0), where these come to `split_factor`; else it is what its definition says: a part of each of
    so many blocks. They differ where the blocks are of different sizes."""
    factor = int(strided.split_factor)
    counts = [
        count
        for placement, count in zip(later, mesh_shape, strict=True)
        if isinstance(placement, Shard) and placement.dim == strided.dim
    ]
    return 0 if prod(counts) == factor else factor


def _split_all(length: int, splits: Sequence[_Split]) -> list[Interval]:
    found = [(0, length)]
    plain = [split for split in splits if split.blocks]
    late = [split for split in splits if not split.blocks]
    for split in (*plain, *late):
        total = sum(size for _, size in found)
        step = -(-total // max(1, split.blocks))
        parts: list[Interval] = []
        for start in range(0, total, step) if total else ():
            end = min(total, start + step)
            share = -(-(end - start) // split.count)
            first = min(end, start + split.index * share)
            parts += _take(found, first, min(end, first + share))
        found = _merged(parts)
    return found


def _take(intervals: Sequence[Interval], start: int, end: int) -> list[Interval]:
    """Elements [start, end) of the concatenation of intervals."""
    found, at = [], 0
    for first, length in intervals:
        low, high = max(start, at), min(end, at + length)
        if low < high:
            found.append((first + low - at, high - low))
        at += length
    return found


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, length in intervals:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def _cut(
    local: torch.Tensor, intervals: Sequence[Sequence[Interval]]
) -> list[tuple[Box, torch.Tensor]]:
    """The local tensor as boxes; one, where it has no gaps."""
    found = []
    along: list[list[tuple[int, int, int]]] = []
    for spans in intervals:
        at, rows = 0, []
        for start, length in spans:
            rows.append((start, length, at))
            at += length
        along.append(rows)
    for chosen in product(*along):
        view: Any = local.detach()
        for dim, (_, length, at) in enumerate(chosen):
            if length != view.shape[dim]:
                view = view.narrow(dim, at, length)
        box = Box(tuple(start for start, _, _ in chosen), tuple(size for _, size, _ in chosen))
        found.append((box, view))
    return found
