"""Whether boxes tile a tensor: where two of them meet, and where there is none.

Sorted by where they begin in one dim, boxes fall into runs that no box crosses. Each run is then
looked at in the next dim, until every box is alone: so do shards by rows and by columns, meshes of
both, and flat ranges, in about n log n. What does not fall apart (five boxes around a middle) is
cut into slabs along one dim, in which each of its boxes is as long as the slab.
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


def find_overlap(shape: tuple[int, ...], boxes: Sequence[Box]) -> Flaw | None:
    """Where two of the boxes, all inside of `shape`, hold the same elements; None: nowhere."""
    if len(boxes) < 2 or _extent_of_row(shape, boxes) is not None:
        return None
    return _search(((0,) * len(shape), shape), _items(boxes), False)


def find_flaw(shape: tuple[int, ...], boxes: Sequence[Box]) -> Flaw | None:
    """Where the boxes, all inside of `shape`, leave a hole or overlap; None: they tile it."""
    if len(boxes) == 1 and boxes[0].lengths == shape:
        return None
    if boxes and _extent_of_row(shape, boxes) == prod(shape):
        return None
    return _search(((0,) * len(shape), shape), _items(boxes), True)


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
    flaw = find_flaw(shape, boxes)
    if flaw is None:
        return None
    if flaw.members:
        return f"two pieces overlap at {flaw.box}"
    return f"elements {flaw.box} are in no piece"


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
    """The first flaw of `items` in `region`. Each job on the stack knows in how many dims, those
    before `dim`, its items do not fall apart."""
    dims = len(region[0])
    if not items:
        return Flaw(_box(region)) if holes and 0 not in _box(region).lengths else None
    jobs = [(region, items, 0, 0)]
    while jobs:
        region, items, dim, whole = jobs.pop()
        if len(items) == 1:
            if holes and items[0][1:] != region:
                return Flaw(_rest(region, items[0]))
            continue
        if whole == dims:
            if (flaw := _search_slabs(region, items, holes)) is not None:
                return flaw
            continue
        runs = _runs(items, dim)
        if holes and (gap := _gap(region, dim, runs)) is not None:
            return Flaw(gap)
        whole = whole + 1 if len(runs) == 1 else 1
        jobs += [
            (_within(region, dim, start, end), run, (dim + 1) % dims, whole)
            for start, end, run in runs
        ]
    return None


def _runs(items: list[_Item], dim: int) -> list[tuple[int, int, list[_Item]]]:
    """(start, end, items) of the runs in `dim`."""
    runs: list[tuple[int, int, list[_Item]]] = []
    run: list[_Item] = []
    first = last = -1
    for item in sorted(items, key=lambda item: item[1][dim]):
        start, end = item[1][dim], item[2][dim]
        if start < last:
            run.append(item)
            last = max(last, end)
            continue
        if run:
            runs.append((first, last, run))
        first, last, run = start, end, [item]
    runs.append((first, last, run))
    return runs


def _gap(region: _Span, dim: int, runs: list[tuple[int, int, list[_Item]]]) -> Box | None:
    """What of the region lies between its runs, or before or after them."""
    at = region[0][dim]
    for start, end, _ in [*runs, (region[1][dim], 0, [])]:
        if start > at:
            return _box(_within(region, dim, at, start))
        at = end
    return None


def _rest(region: _Span, item: _Item) -> Box:
    """Some part of the region that its only item leaves."""
    dims = range(len(region[0]))
    gaps = (_gap(region, dim, [(item[1][dim], item[2][dim], [])]) for dim in dims)
    return next(gap for gap in gaps if gap is not None)


def _search_slabs(region: _Span, items: list[_Item], holes: bool) -> Flaw | None:
    cuts = [
        sorted({item[1][dim] for item in items} | {item[2][dim] for item in items})
        for dim in range(len(region[0]))
    ]
    inner = [dim for dim, found in enumerate(cuts) if len(found) > 2]
    if not inner:  # all of them are the same box
        _, starts, ends = items[0]
        return Flaw(_box((starts, ends)), tuple(sorted((items[0][0], items[1][0]))))
    dim = min(inner, key=lambda dim: len(cuts[dim]))
    for start, end, slab in _slabs(items, dim, cuts[dim]):
        if (flaw := _search(_within(region, dim, start, end), slab, holes)) is not None:
            return flaw
    return None


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
