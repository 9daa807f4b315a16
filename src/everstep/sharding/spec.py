"""How a tensor is spread over ranks, as data: what each rank can tell of any other's share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Axis = tuple[int, int] | None
"""What one axis of a mesh does to a tensor: nothing (replicas); or it splits a dim, in each of so
many blocks (1: plainly; 0: after all other axes)."""


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh axis' share of a tensor's dim: part number `index` of `count`, of each of `blocks`
    (0: of all, and after all other splits)."""

    count: int
    index: int
    blocks: int = 1


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
                found[dim % ndim].append(Split(count, index, blocks))
        return tuple(map(tuple, found))

    def to_json(self) -> list[Any]:
        """For other ranks."""
        return [self.ranks, self.shape, self.axes]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> "ShardingSpec":
        """Of another rank."""
        ranks, shape, axes = value
        return cls(
            tuple(ranks),
            tuple(shape),
            tuple(None if axis is None else tuple(axis) for axis in axes),
        )
