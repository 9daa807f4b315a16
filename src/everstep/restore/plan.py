"""Which bytes of which pack go where. Pure: no files, no tensors' memory.

Large pieces are read chunk by chunk; small ones that lie side by side are read together, because
a hundred reads of a kilobyte take longer than one of a megabyte.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from everstep.errors import Unsupported
from everstep.format.boxes import Box
from everstep.format.manifest import Part
from everstep.format.packed import places, plane_count
from everstep.format.packs import ALIGNED_FROM_BYTES, CHUNK_BYTES, PAGE_BYTES, chunks, round_up
from everstep.format.tables import Table, TensorEntry


@dataclass(frozen=True, slots=True)
class Target:
    """One chunk: `size` bytes at `offset` of the pack are, or decode to, the `raw` bytes from byte
    `start` of tensor `name`, which has items of `item_size` bytes."""

    name: str
    start: int
    offset: int
    size: int
    digest: int
    raw: int
    item_size: int


@dataclass(frozen=True, slots=True)
class Span:
    """One read: `size` bytes at `offset`, both multiples of a page, and the chunks in it."""

    pack: int
    offset: int
    size: int
    targets: tuple[Target, ...]


def plan(entries: Iterable[TensorEntry], part: Part, table: Table | None = None) -> list[Span]:
    """The reads that bring these tensors, by pack and offset. `table`: of a packed part."""
    packed = {}
    if part.stored is not None:
        assert table is not None
        packed = {place.chunk.extent.digest: place for place in places(table, part.stored)}
    by_pack: dict[int, list[Target]] = {}
    for entry in entries:
        for piece in entry.pieces:
            if piece.box != Box.whole(entry.spec.shape) or piece.codec != "raw":
                raise Unsupported(
                    f"restoring {entry.spec.name!r}: it is stored in several boxes or encoded "
                    f"({piece.codec}), which takes a newer everstep"
                )
            targets = by_pack.setdefault(piece.pack, [])
            item_size = plane_count(entry.spec.dtype)
            for index, (start, raw) in enumerate(chunks(piece.size)):
                digest = piece.digest + index
                at, size = piece.offset + start, raw
                if packed:
                    at, size = packed[digest].offset, packed[digest].size
                targets.append(Target(entry.spec.name, start, at, size, digest, raw, item_size))
    spans = []
    for pack, targets in sorted(by_pack.items()):
        targets.sort(key=lambda target: (target.offset, target.size))
        spans += [_span(pack, group) for group in _groups(targets)]
    return spans


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
