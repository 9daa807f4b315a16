"""Whether boxes tile a tensor: where two of them meet, and where there is none.

A tensor is cut into slabs along one dim, wherever a box begins or ends in it, and each slab in the
next dim, as long as boxes do not reach through all that is left. Boxes in a row, which nearly all
layouts are, need no search.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from everstep.format.boxes import Box

_Item = tuple[int, Box]  # its index


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
    items = [(index, box) for index, box in enumerate(boxes) if box.count]
    return _search(Box((), ()), shape, items, holes and 0 not in shape)


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


def _search(cut: Box, shape: tuple[int, ...], items: list[_Item], holes: bool) -> Flaw | None:
    """The first flaw in a part of a tensor: the box `cut` in its first dims, in which `items` are
    all there is, and all of the others."""
    dim = len(cut.lengths)
    rest = shape[dim:]
    if len(items) < 2 and not (holes and [box.lengths[dim:] for _, box in items] != [rest]):
        return None
    if not items or not rest:
        members = tuple(sorted(index for index, _ in items[:2]))
        return Flaw(Box(cut.offsets + (0,) * len(rest), cut.lengths + rest), members)
    for start, end, there in _slabs(items, dim, shape[dim]):
        slab = Box((*cut.offsets, start), (*cut.lengths, end - start))
        if flaw := _search(slab, shape, there, holes):
            return flaw
    return None


def _slabs(items: list[_Item], dim: int, length: int) -> Iterator[tuple[int, int, list[_Item]]]:
    """(start, end, what is there) of each slab between two cuts."""
    waiting = sorted(items, key=lambda item: item[1].offsets[dim], reverse=True)
    ends = (box.offsets[dim] + box.lengths[dim] for _, box in items)
    active: list[_Item] = []
    for start, end in pairwise(sorted({0, length, *(box.offsets[dim] for _, box in items), *ends})):
        active = [row for row in active if row[1].offsets[dim] + row[1].lengths[dim] > start]
        while waiting and waiting[-1][1].offsets[dim] == start:
            active.append(waiting.pop())
        yield start, end, active
