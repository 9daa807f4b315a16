"""Which bytes of which pack go where. Pure: no files, no tensors' memory.

Boxes are wanted, and boxes are stored: what is read is the chunks in which they meet.
Large pieces are read chunk by chunk; small ones that lie side by side are read together, because
a hundred reads of a kilobyte take longer than one of a megabyte.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep.codecs.codec import master_of
from everstep.codecs.rounded import SOURCE
from everstep.errors import Corrupt
from everstep.format.boxes import Box, flat_boxes
from everstep.format.dtypes import ITEM_SIZES, plane_count
from everstep.format.manifest import Encoded, Part
from everstep.format.packed import encoded_chunks, stored_extents
from everstep.format.packs import (
    ALIGNED_FROM_BYTES,
    CHUNK_BYTES,
    PAGE_BYTES,
    Piece,
    chunk_at,
    chunk_count,
    round_up,
)
from everstep.format.tables import Extent, Table, TensorEntry


@dataclass(frozen=True, slots=True)
class Target:
    """One chunk: `size` bytes at `offset` of the pack are, or decode by `codec` to, the `raw` bytes
    from byte `start` of the elements of `box` of tensor `name`, of items of `item_size` bytes. In
    the raw layout, as memory has it, it lies at `raw_offset`, with the digest `content` (None where
    that is not known). `index`: of its digest. `copies`: what of other tensors is rounded from it,
    to which dtype."""

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
    index: int = 0
    copies: tuple[tuple[str, "Target"], ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """One read: `size` bytes at `offset`, both multiples of a page, and the chunks in it."""

    pack: int
    offset: int
    size: int
    targets: tuple[Target, ...]


def plan(
    wanted: Iterable[tuple[TensorEntry, Sequence[Box]]], part: Part, table: Table
) -> list[Span]:
    """The reads that bring what the part has of these boxes, by pack and offset: each chunk once,
    and none in which there is no element of them."""
    found = Chunks(part, table)
    for entry, boxes in wanted:
        for piece in entry.pieces:
            if not any(piece.box.intersect(box) for box in boxes):
                continue
            count = chunk_count(piece.size)
            for index in range(count):
                target = found.target(entry, piece, index)
                if count == 1 or _is_needed(target, boxes, ITEM_SIZES[entry.spec.dtype]):
                    found.add(entry, piece, index, target)
    spans = []
    for pack, targets in sorted(found.by_pack.items()):
        rows = sorted(targets.values(), key=lambda target: (target.offset, target.size))
        spans += [_span(pack, group) for group in _groups(rows)]
    return spans


class Chunks:
    """The chunks of a part that are to be read: by their packs, and digests."""

    def __init__(self, part: Part, table: Table) -> None:
        self.by_pack: dict[int, dict[int, Target]] = {}
        self.part, self._table = part, table
        self._packed: dict[int, Extent] = {}
        self._encoded: dict[int, Encoded] = {}
        if part.stored is not None:
            self._packed = {each.digest: each for each in stored_extents(table, part.stored)}
            self._encoded = encoded_chunks(part, table)

    def target(self, entry: TensorEntry, piece: Piece, index: int) -> Target:
        """Chunk number `index` of a piece."""
        start, raw = chunk_at(piece.size, index)
        number, at = piece.digest + index, piece.offset + start
        return Target(
            name=entry.spec.name,
            box=piece.box,
            start=start,
            raw=raw,
            item_size=plane_count(entry.spec.dtype),
            raw_offset=at,
            index=number,
            **self._stored(number, at, raw),
        )

    def again(self, target: Target) -> Target:
        """The same chunk as this part has it; the other part's table is the same."""
        return replace(target, **self._stored(target.index, target.raw_offset, target.raw))

    def _stored(self, number: int, at: int, raw: int) -> dict[str, Any]:
        """How and where the pack has that chunk."""
        digest, how = self.part.digests[number], self._encoded.get(number)
        packed = self._packed.get(number)
        return {
            "offset": packed.offset if packed else at,
            "size": packed.size if packed else raw,
            "digest": digest,
            "codec": how.codec if how else None,
            "content": how.content if how else digest,
        }

    def add(self, entry: TensorEntry, piece: Piece, index: int, target: Target) -> None:
        """It is wanted: itself, or what it is rounded from. Raises Corrupt."""
        if (master := master_of(target.codec)) is not None:
            self._add_master(master, entry, index, target)
            return
        here = self.by_pack.setdefault(piece.pack, {})
        before = here.get(piece.digest + index)
        if before:
            target = replace(target, copies=(*before.copies, *target.copies))
        here[piece.digest + index] = target

    def _add_master(self, name: str, entry: TensorEntry, index: int, target: Target) -> None:
        """The same elements of that tensor take twice as many chunks."""
        master = self._table.tensors.get(name)
        if master is None or master.spec.dtype != SOURCE:
            master = replace(entry, pieces=())
        left = 2 * target.raw
        for piece in (each for each in master.pieces if each.box == target.box):
            for number in range(2 * index, min(2 * index + 2, chunk_count(piece.size))):
                source = self.target(master, piece, number)
                if master_of(source.codec) is None:
                    copy = replace(target, start=source.start // 2, raw=source.raw // 2)
                    copies = ((entry.spec.dtype, copy),)
                    self.add(master, piece, number, replace(source, copies=copies))
                    left -= source.raw
        if left or target.size:
            raise Corrupt(
                f"reading tensor {target.name!r}: it is said to be rounded from {name!r}, of which "
                f"there are no such elements"
            )


def blocks(target: Target, item_size: int) -> Iterator[tuple[int, Box]]:
    """The elements of a chunk as boxes of the tensor: where each begins in the chunk's raw bytes,
    in which it is a range. `item_size`: of the tensor's dtype."""
    if target.raw == target.box.count * item_size > 0:
        yield 0, target.box
        return
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
