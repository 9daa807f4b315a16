"""Boxes: rectangles of a global tensor."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod


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
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(
                self.offsets, self.lengths, other.offsets, other.lengths, strict=True
            )
        )
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

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
        pairs = zip(self.offsets, self.lengths, strict=True)
        return f"[{', '.join(f'{offset}:{offset + length}' for offset, length in pairs)}]"


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


def overlap_of(boxes: Iterable[Box]) -> Box | None:
    """Elements that two of the boxes hold; None where none do.

    Cuts the boxes along one dim after another into groups that cannot meet. Grids and flat ranges
    come apart that way, in n log n; only what no cut divides is compared pair by pair.
    """
    groups = [[box for box in boxes if box.count]]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        for dim in range(len(group[0].offsets)):
            divided = _cut(group, dim)
            if len(divided) > 1:
                groups += divided
                break
        else:
            if found := _swept(group):
                return found
    return None


def _cut(boxes: list[Box], dim: int) -> list[list[Box]]:
    """In groups that have no index of this dim in common."""
    groups: list[list[Box]] = []
    reach = 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if not groups or box.offsets[dim] >= reach:
            groups.append([])
        groups[-1].append(box)
        reach = max(reach, box.offsets[dim] + box.lengths[dim])
    return groups


def _swept(boxes: list[Box]) -> Box | None:
    if not boxes[0].offsets:  # two of a scalar
        return boxes[0]
    dim = max(
        range(len(boxes[0].offsets)), key=lambda dim: len({box.offsets[dim] for box in boxes})
    )
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        at = box.offsets[dim]
        open_boxes = [other for other in open_boxes if other.offsets[dim] + other.lengths[dim] > at]
        for other in open_boxes:
            if found := box.intersect(other):
                return found
        open_boxes.append(box)
    return None


def problem_of(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why these boxes are not each element of a tensor of that shape once; None where they are."""
    whole = Box.whole(shape)
    if len(boxes) == 1 and boxes[0] == whole:  # nearly all are
        return None
    for box in boxes:
        if len(box.offsets) != len(shape) or any(
            offset + length > size
            for offset, length, size in zip(box.offsets, box.lengths, shape, strict=True)
        ):
            return f"a piece {box} lies outside of its shape {list(shape)}"
    if found := overlap_of(boxes):
        return f"two pieces overlap at {found}"
    if sum(box.count for box in boxes) == whole.count:
        return None
    return f"elements {_hole(whole, boxes)} are in no piece"


def _hole(whole: Box, boxes: Sequence[Box]) -> Box:
    """Some of the elements of `whole` that none of the boxes has; there are some."""
    left = [whole]
    for box in sorted(boxes, key=lambda box: box.offsets):
        left = [rest for found in left for rest in _without(found, box)]
    return min(left, key=lambda box: box.offsets)


def _without(box: Box, other: Box) -> list[Box]:
    """What of `box` is not in `other`, in boxes."""
    common = box.intersect(other) if box.count else None
    if common is None:
        return [box]
    found = []
    offsets, lengths = list(box.offsets), list(box.lengths)
    for dim in range(len(offsets)):
        start, end = common.offsets[dim], common.offsets[dim] + common.lengths[dim]
        for low, high in ((offsets[dim], start), (end, offsets[dim] + lengths[dim])):
            if low < high:
                found.append(
                    Box(
                        (*offsets[:dim], low, *offsets[dim + 1 :]),
                        (*lengths[:dim], high - low, *lengths[dim + 1 :]),
                    )
                )
        offsets[dim], lengths[dim] = start, end - start
    return found
