"""Which bytes of which pack go where. Pure: no files, no tensors' memory.

Boxes are wanted, and boxes are stored: what is read is the chunks in which they meet.
Large pieces are read chunk by chunk; small ones that lie side by side are read together, because
a hundred reads of a kilobyte take longer than one of a megabyte.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from everstep.format.boxes import Box, flat_boxes
from everstep.format.dtypes import ITEM_SIZES, plane_count
from everstep.format.manifest import Encoded, Part
from everstep.format.packed import encoded_chunks, stored_extents
from everstep.format.packs import (
    ALIGNED_FROM_BYTES,
    CHUNK_BYTES,
    PAGE_BYTES,
    chunks,
    round_up,
)
from everstep.format.tables import Extent, Table, TensorEntry


@dataclass(frozen=True, slots=True)
class Target:
    """One chunk: `size` bytes at `offset` of the pack are, or decode by `codec` to, the `raw` bytes
    from byte `start` of the elements of `box` of tensor `name`, of items of `item_size` bytes. In
    the raw layout, as memory has it, it lies at `raw_offset`, with the digest `content` (None where
    that is not known)."""

    name: str
    box: Box
    start: int
    offset: int
    size: int
    digest: str
    raw: int
    item_size: int
    codec: str | None = None
    raw_offset: int = 0
    content: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """One read: `size` bytes at `offset`, both multiples of a page, and the chunks in it."""

    pack: int
    offset: int
    size: int
    targets: tuple[Target, ...]


def plan(
    wanted: Iterable[tuple[TensorEntry, Sequence[Box]]], part: Part, table: Table | None = None
) -> list[Span]:
    """The reads that bring what the part has of these boxes, by pack and offset: each chunk once,
    and none in which there is no element of them. `table`: of a packed part."""
    packed: dict[int, Extent] = {}
    encoded: dict[int, Encoded] = {}
    if part.stored is not None:
        assert table is not None
        packed = {each.digest: each for each in stored_extents(table, part.stored)}
        encoded = encoded_chunks(part, table)
    by_pack: dict[int, list[Target]] = {}
    for entry, boxes in wanted:
        name, dtype = entry.spec.name, entry.spec.dtype
        for piece in entry.pieces:
            if not any(piece.box.intersect(box) for box in boxes):
                continue
            for index, (start, raw) in enumerate(chunks(piece.size)):
                number = piece.digest + index
                at, size = piece.offset + start, raw
                if packed:
                    at, size = packed[number].offset, packed[number].size
                digest, how = part.digests[number], encoded.get(number)
                target = Target(
                    name,
                    piece.box,
                    start,
                    at,
                    size,
                    digest,
                    raw,
                    plane_count(dtype),
                    how.codec if how else None,
                    piece.offset + start,
                    how.content if how else digest,
                )
                if _is_needed(target, boxes, ITEM_SIZES[dtype]):
                    by_pack.setdefault(piece.pack, []).append(target)
    spans = []
    for pack, targets in sorted(by_pack.items()):
        targets.sort(key=lambda target: (target.offset, target.size))
        spans += [_span(pack, group) for group in _groups(targets)]
    return spans


def blocks(target: Target, item_size: int) -> Iterator[tuple[int, Box]]:
    """The elements of a chunk as boxes of the tensor: where each begins in the chunk's raw bytes,
    in which it is a range. `item_size`: of the tensor's dtype."""
    start, at = target.start // item_size, 0
    for box in flat_boxes(target.box.lengths, start, start + target.raw // item_size):
        yield at, box.shifted(target.box.offsets)
        at += box.count * item_size


def _is_needed(target: Target, boxes: Sequence[Box], item_size: int) -> bool:
    """Whether a chunk, of a piece that meets one of these boxes, holds an element of them."""
    return target.box in boxes or any(
        block.intersect(box) for _, block in blocks(target, item_size) for box in boxes
    )


def _groups(targets: list[Target]) -> list[list[Target]]:
    groups: list[list[Target]] = []
    for target in targets:
        is_small = target.size < ALIGNED_FROM_BYTES
        if groups and is_small:
            first, last = groups[-1][0], groups[-1][-1]
            is_near = target.offset - (last.offset + last.size) <= PAGE_BYTES
            fits = target.offset + target.size - first.offset <= CHUNK_BYTES - PAGE_BYTES
            if is_near and fits and last.size < ALIGNED_FROM_BYTES:
                groups[-1].append(target)
                continue
        groups.append([target])
    return groups


def _span(pack: int, targets: list[Target]) -> Span:
    start = targets[0].offset // PAGE_BYTES * PAGE_BYTES
    end = round_up(max(target.offset + target.size for target in targets))
    return Span(pack, start, end - start, tuple(targets))
