"""What chunks decode to, and the chunks of earlier checkpoints to which some are differences."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from everstep.codecs import codec, difference
from everstep.errors import Corrupt
from everstep.format.manifest import Part, check_table
from everstep.format.tables import Table
from everstep.restore.plan import Chunks, Target
from everstep.store import catalog
from everstep.store.read import check_chunk, read_chunk
from everstep.tiers.files import Source

if TYPE_CHECKING:
    from everstep.restore.choose import Candidate

ReadBase = Callable[[int, Target], memoryview]
"""The raw bytes of a pack's chunk in the checkpoint before; verified."""


def decode(
    pack: int, target: Target, chunk: memoryview, into: memoryview, where: str, base: ReadBase
) -> None:
    """Write the raw bytes of a chunk to `into`, which has their size. Raises Corrupt, Unsupported,
    and what `base` raises."""
    try:
        if target.codec == codec.DIFFERENCE:
            difference.decode_into(chunk, base(pack, target), target.item_size, into)
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
        self, candidate: "Candidate", later: Part, table: Table, stack: ExitStack, depth: int = 1
    ) -> None:
        """Files that are opened are closed with the `stack`."""
        self._candidate, self._later, self._table = candidate, later, table
        self._stack, self._depth = stack, depth
        self._lock = threading.Lock()
        self._found: tuple[Chunks, Sequence[Sequence[Source]], Earlier] | None = None

    def read(self, pack: int, target: Target) -> memoryview:
        """The raw bytes that the chunk had there, in memory of their own. Raises Corrupt,
        Unavailable."""
        with self._lock:
            chunks, sources, before = self._found = self._found or self._find()
        here = chunks.again(target)
        where = f"{chunks.part.packs[pack].path} at byte {here.offset} (tensor {here.name!r})"
        stored = memoryview(bytearray(here.size))
        read_chunk(sources[pack], here.offset, stored, here.digest, where)
        if here.codec is None:
            return stored
        raw = memoryview(bytearray(here.raw))
        decode(pack, here, stored, raw, where, before.read)
        return raw

    def _find(self) -> "tuple[Chunks, Sequence[Sequence[Source]], Earlier]":
        disk, base, table = self._candidate.disk, self._later.base, self._later.table
        where = self._later.packs[0].path
        if base is None or self._depth > codec.CHAIN_MAX:
            raise Corrupt(f"reading {where}: there is nothing, or too much, that it differs from")
        parts = catalog.read_behind(disk, base, where).parts
        same = [part for part in parts if part.table == table]
        if len(same) != 1:
            raise Corrupt(f"reading {where}: step {base.step} has no part of {table.path}")
        (part,) = same
        check_table(self._table, part, table.path)
        sources = [self._candidate.files(pack, self._stack) for pack in part.packs]
        before = Earlier(self._candidate, part, self._table, self._stack, self._depth + 1)
        return Chunks(part, self._table), sources, before
