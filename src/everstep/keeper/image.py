"""Images: the packs of a part as they will lie on the disk, in the memory in which they arrive.

    one rank      the slot's image itself
    several       a header for all, then the data of each rank's packs, straight from its slot

So any number of ranks and tensors becomes a few large files, and nothing is copied to that end.
"""

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from everstep.errors import Corrupt
from everstep.format.merge import Merged
from everstep.format.packed import Chunk, raw_chunks
from everstep.format.packs import pack_starts
from everstep.format.tables import Extent, Table, decode_table, extents, is_gradient
from everstep.keeper.arrival import Arrival


@dataclass(frozen=True, slots=True)
class Parsed:
    """A piece table, and what is made of it for every part that has it."""

    document: bytes
    table: Table
    extents: list[Extent]
    chunks: list[Chunk]
    gradients: int
    """Bytes of a record's gradients."""

    @classmethod
    def of(cls, document: bytes, table: Table) -> "Parsed":
        """Everything that follows from a table."""
        gradients = (entry for name, entry in table.tensors.items() if is_gradient(name))
        size = sum(piece.size for entry in gradients for piece in entry.pieces)
        return cls(document, table, extents(table), raw_chunks(table), size)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a pack: its memory, and whose arrival says when bytes of it are there (None:
    they are), `base` being where it begins in what arrives."""

    view: memoryview
    arrival: Arrival | None = None
    base: int = 0

    def wait(self, end: int) -> None:
        """Block until the first `end` bytes are there. Raises Unsupported."""
        if self.arrival:
            self.arrival.wait(self.base + end)


@dataclass(slots=True)
class Image:
    """All packs of one part. For the keeper's threads."""

    parsed: Parsed
    packs: Sequence[Sequence[Segment]]
    _starts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._starts = [pack_starts(len(each.view) for each in pack) for pack in self.packs]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each pack."""
        return [sum(len(each.view) for each in pack) for pack in self.packs]

    def view(self, pack: int, offset: int, size: int) -> memoryview:
        """Bytes of a pack that lie in one segment, as those of a header and of a piece do; blocks
        until they are there. Raises Unsupported where they never will be."""
        at = max(0, bisect_right(self._starts[pack], offset) - 1)
        segment, start = self.packs[pack][at], offset - self._starts[pack][at]
        segment.wait(start + size)
        return segment.view[start : start + size]

    def views(self, pack: int, offset: int, size: int) -> Iterator[memoryview]:
        """Bytes of a pack that may lie in several segments, in their order; fewer past its end. For
        an image that has arrived."""
        at = max(0, bisect_right(self._starts[pack], offset) - 1)
        for segment, start in zip(self.packs[pack][at:], self._starts[pack][at:], strict=False):
            if size > 0:
                first = offset - start
                view = segment.view[first : first + size]
                yield view
                offset, size = offset + len(view), size - len(view)

    def wait(self, pack: int, end: int) -> None:
        """Block until the first `end` bytes of a pack are there. Raises Unsupported."""
        for segment, start in zip(self.packs[pack], self._starts[pack], strict=True):
            if start < end:
                segment.wait(min(len(segment.view), end - start))


def whole(view: memoryview, arrival: Arrival, document: bytes, what: str) -> Image:
    """The image of one slot, as its table says. Raises Corrupt."""
    parsed = parse(document)
    sizes = [pack.size for pack in parsed.table.packs]
    _check_size(view, sum(sizes), what)
    packs = [
        [Segment(view[start : start + size], arrival, start)]
        for start, size in zip(pack_starts(sizes), sizes, strict=True)
    ]
    return Image(parsed, packs)


def gathered(
    views: Sequence[memoryview], arrivals: Sequence[Arrival], merged: Merged, parsed: Parsed
) -> Image:
    """The images of several ranks' slots as one part. Raises Corrupt."""
    packs = []
    for header, sections in zip(merged.headers, merged.sections, strict=True):
        pack = [Segment(_aligned(header))]
        for rank, start, size in sections:
            view = views[rank][start : start + size]
            _check_size(view, size, f"the slot of local rank {rank}")
            pack.append(Segment(view, arrivals[rank], start))
        packs.append(pack)
    return Image(parsed, packs)


@lru_cache(maxsize=16)
def parse(document: bytes) -> Parsed:
    """Tables change rarely, and parsing one of 10,000 tensors outlasts the rest of a commit."""
    return Parsed.of(document, decode_table(document, "a piece table in the arena"))


def _check_size(view: memoryview, size: int, what: str) -> None:
    if len(view) != size:
        raise Corrupt(f"reading {what}: {len(view)} bytes, its table needs {size}")


@lru_cache(maxsize=4)
def _aligned(header: bytes) -> memoryview:
    """In page-aligned memory, from which it can be written directly."""
    memory = mmap.mmap(-1, len(header))
    memory[:] = header
    return memoryview(memory)
