"""Boxes: rectangles of a global tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

_TEXTS_MAX = 1 << 14


@dataclass(frozen=True, slots=True)
class Box:
    """The elements with offsets[d] <= index[d] < offsets[d] + lengths[d] in each dim d."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """The box that is all of a tensor of that shape."""
        return cls((0,) * len(shape), shape)

    @property
    def count(self) -> int:
        """How many elements it holds."""
        return prod(self.lengths)

    def intersect(self, other: "Box") -> "Box | None":
        """What both hold; None where that is nothing. Equal boxes, also empty ones, meet."""
        if self == other:
            return self
        starts, lengths = [], []
        for at, length, other_at, other_length in zip(
            self.offsets, self.lengths, other.offsets, other.lengths, strict=True
        ):
            start = at if at > other_at else other_at  # max() takes three times as long
            end, other_end = at + length, other_at + other_length
            end = end if end < other_end else other_end
            if end <= start:
                return None
            starts.append(start)
            lengths.append(end - start)
        return Box(tuple(starts), tuple(lengths))

    def shifted(self, offsets: Sequence[int]) -> "Box":
        """The same box, so much further in each dim."""
        return Box(tuple(a + b for a, b in zip(self.offsets, offsets, strict=True)), self.lengths)

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """What to index an array that has the elements of `outer` with, to get those of this."""
        return tuple(
            slice(at - start, at - start + length)
            for at, start, length in zip(self.offsets, outer.offsets, self.lengths, strict=True)
        )

    def __str__(self) -> str:
        """Where it begins and ends in each dim: "[0:2,0:4]"."""
        return _text(self)


@lru_cache(maxsize=_TEXTS_MAX)  # for each box of a record, at each step
def _text(box: Box) -> str:
    ends = [f"{at}:{at + n}" for at, n in zip(box.offsets, box.lengths, strict=True)]
    return f"[{','.join(ends)}]"


def flat_boxes(lengths: Sequence[int], start: int, end: int) -> list[Box]:
    """The row-major elements from `start` up to `end` of an array, as boxes in their order, each of
    which is a range of its own: at most twice as many as it has dims, less one."""
    if start >= end:
        return []
    if not lengths:
        return [Box((), ())]
    inner = tuple(lengths[1:])
    row = prod(inner)
    (first, head), (last, tail) = divmod(start, row), divmod(end, row)
    if first == last:
        return _in_row(first, inner, head, tail)
    found = []
    if head:
        found += _in_row(first, inner, head, row)
        first += 1
    if first < last:
        found.append(Box((first, *(0 for _ in inner)), (last - first, *inner)))
    return found + _in_row(last, inner, 0, tail)


def _in_row(index: int, inner: Sequence[int], start: int, end: int) -> list[Box]:
    return [Box((index, *box.offsets), (1, *box.lengths)) for box in flat_boxes(inner, start, end)]
