"""What chunks decode to, and the chunks of earlier checkpoints to which some are differences."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep.codecs import codec, difference
from everstep.errors import Corrupt, EverstepError
from everstep.format.manifest import Part
from everstep.format.packs import Piece, chunk_count
from everstep.format.tables import TensorEntry
from everstep.restore.plan import Chunks, Target
from everstep.store import catalog
from everstep.store.read import check_chunk
from everstep.tiers.files import Source

if TYPE_CHECKING:
    from everstep.restore.choose import Candidate

ReadBase = Callable[[int], memoryview]
"""The raw bytes of a chunk of the checkpoint before, by its digest; verified."""


def decode(
    target: Target, chunk: memoryview, into: memoryview, where: str, read_base: ReadBase | None
) -> None:
    """Write the raw bytes of a chunk to `into`, which has their size. Raises Corrupt, Unsupported,
    and what the checkpoint that it is a difference to raises."""
    try:
        if target.codec == codec.DIFFERENCE and read_base:
            difference.decode_into(chunk, read_base(target.index), target.item_size, into)
        else:
            codec.decode_into(target.codec or "", chunk, target.item_size, into)
    except Corrupt as error:
        raise Corrupt(f"reading {where}: {error}") from error
    if target.content:
        check_chunk(into, target.content, f"what is encoded in {where}")


class Earlier:
    """The part of the same table in the checkpoint to which another one's part has differences. It
    is looked up when the first chunk is wanted. For any thread."""

    def __init__(
        self, candidate: "Candidate", later: Part, stack: contextlib.ExitStack, depth: int = 1
    ) -> None:
        """Files that are opened are closed with the `stack`."""
        self._candidate, self._later, self._stack, self._depth = candidate, later, stack, depth
        self._lock = threading.Lock()
        self._found: _Found | None = None

    def read(self, index: int) -> memoryview:
        """A chunk's raw bytes, in memory of their own: from the nearest tier whose are right.
        Raises Corrupt, Unavailable."""
        with self._lock:
            found = self._found = self._found or self._find()
        entry, piece, number = found.rows[index]
        target = found.chunks.target(entry, piece, number)
        where = f"{found.part.packs[piece.pack].path} at byte {target.offset}"
        stored, raw = memoryview(bytearray(target.size)), memoryview(bytearray(target.raw))
        *others, last = found.sources[piece.pack]
        for source in others:
            with contextlib.suppress(EverstepError):
                return self._read(found, source, target, (stored, raw), where)
        return self._read(found, last, target, (stored, raw), where)

    def _read(
        self,
        found: "_Found",
        source: Source,
        target: Target,
        memory: tuple[memoryview, memoryview],
        where: str,
    ) -> memoryview:
        stored, raw = memory
        source.read_into(target.offset, stored)
        check_chunk(stored, target.digest, where)
        if target.codec is None:
            return stored
        decode(target, stored, raw, where, found.before.read)
        return raw

    def _find(self) -> "_Found":
        disk, base, table = self._candidate.disk, self._later.base, self._later.table
        if base is None or self._depth > codec.CHAIN_MAX:
            raise Corrupt(f"reading {self._later.packs[0].path}: differences to {base} go too far")
        manifest = catalog.read_behind(disk, base, self._later.packs[0].path)
        same = [part for part in manifest.parts if part.table == table]
        if len(same) != 1:
            raise Corrupt(f"reading step {base.step} of {disk.root}: no part of {table.path}")
        (part,) = same
        tensors = catalog.read_table(disk, part)
        return _Found(
            part,
            Chunks(part, tensors),
            {
                piece.digest + number: (entry, piece, number)
                for entry in tensors.tensors.values()
                for piece in entry.pieces
                for number in range(chunk_count(piece.size))
            },
            [self._candidate.files(pack, self._stack) for pack in part.packs],
            Earlier(self._candidate, part, self._stack, self._depth + 1),
        )


@dataclass(frozen=True, slots=True)
class _Found:
    part: Part
    chunks: Chunks
    rows: Mapping[int, tuple[TensorEntry, Piece, int]]
    """By digest: which chunk of which piece it is."""
    sources: Sequence[Sequence[Source]]
    before: Earlier
