"""Whether boxes tile a tensor: where two of them meet, and where there is none.

A region is cut into slabs along one dim, wherever a box begins or ends in it, and each slab is
looked at in the dims that are left. Boxes in a row, which nearly all layouts are, need no search.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from everstep.format.boxes import Box

_Span = tuple[tuple[int, ...], tuple[int, ...]]  # starts, ends
_Item = tuple[int, tuple[int, ...], tuple[int, ...]]  # index of a box, its starts, its ends


@dataclass(frozen=True, slots=True)
class Flaw:
    """Elements that two boxes hold, `members` being their indices; or none, then it is empty."""

    box: Box
    members: tuple[int, ...] = ()


def find_flaw(shape: tuple[int, ...], boxes: Sequence[Box], *, holes: bool = True) -> Flaw | None:
    """Where the boxes, all inside of `shape`, overlap, or leave a hole (if that is one: `holes`);
    None: nowhere."""
    if len(boxes) < 2 and (not holes or [box.lengths for box in boxes] == [shape]):
        return None
    count = _extent_of_row(shape, boxes) if boxes else None
    if count is not None and (not holes or count == prod(shape)):
        return None
    return _search(((0,) * len(shape), shape), _items(boxes), holes)


def _items(boxes: Sequence[Box]) -> list[_Item]:
    return [
        (
            index,
            box.offsets,
            tuple([at + n for at, n in zip(box.offsets, box.lengths, strict=True)]),
        )
        for index, box in enumerate(boxes)
        if 0 not in box.lengths
    ]


def _extent_of_row(shape: tuple[int, ...], boxes: Sequence[Box]) -> int | None:
    """How many elements boxes hold that lie one after the other in one dim; None: they do not.

    Nearly all layouts are like that, and this is several times quicker than the search.
    """
    cut = [dim for dim, (n, m) in enumerate(zip(boxes[0].lengths, shape, strict=True)) if n != m]
    if not cut:
        return None
    dim, at, count = cut[0], 0, 0
    for start, length, size in sorted(
        [(box.offsets[dim], box.lengths[dim], prod(box.lengths)) for box in boxes]
    ):
        if start < at and size:
            return None
        at = max(at, start + length)
        count += size
    return count


def _search(region: _Span, items: list[_Item], holes: bool) -> Flaw | None:
    """The first flaw of `items` in `region`, inside of which they lie."""
    if not items:
        return Flaw(_box(region)) if holes and 0 not in _box(region).lengths else None
    if len(items) == 1 and not (holes and items[0][1:] != region):
        return None
    cuts = [
        sorted({*bounds, *(item[1][dim] for item in items), *(item[2][dim] for item in items)})
        for dim, bounds in enumerate(zip(*region, strict=True))
    ]
    divided = [dim for dim, found in enumerate(cuts) if len(found) > 2]
    if not divided:  # all of them are the region
        return Flaw(_box(region), tuple(sorted((items[0][0], items[1][0]))))
    dim = min(divided, key=lambda dim: _crossings(items, dim, cuts[dim]))
    for start, end, slab in _slabs(items, dim, cuts[dim]):
        if flaw := _search(_within(region, dim, start, end), slab, holes):
            return flaw
    return None


def _crossings(items: list[_Item], dim: int, cuts: list[int]) -> int:
    """In how many slabs between these cuts the items lie, all told."""
    numbers = {cut: number for number, cut in enumerate(cuts)}
    return sum(numbers[ends[dim]] - numbers[starts[dim]] for _, starts, ends in items)


def _slabs(items: list[_Item], dim: int, cuts: list[int]) -> Iterator[tuple[int, int, list[_Item]]]:
    """(start, end, the items there, cut to it) of each slab between two cuts."""
    waiting = sorted(items, key=lambda item: item[1][dim], reverse=True)
    active: list[_Item] = []
    for start, end in pairwise(cuts):
        active = [item for item in active if item[2][dim] > start]
        while waiting and waiting[-1][1][dim] == start:
            active.append(waiting.pop())
        yield (
            start,
            end,
            [(item[0], *_within((item[1], item[2]), dim, start, end)) for item in active],
        )


def _within(span: _Span, dim: int, start: int, end: int) -> _Span:
    starts, ends = span
    return (*starts[:dim], start, *starts[dim + 1 :]), (*ends[:dim], end, *ends[dim + 1 :])


def _box(span: _Span) -> Box:
    starts, ends = span
    return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))
