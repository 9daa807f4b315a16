"""Streams read back: each piece verified, in memory of its own, when it is asked for."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from everstep.format.manifest import Part, Stream
from everstep.format.packs import chunks
from everstep.format.streams import TENSOR, Row, rows_by_name
from everstep.restore.buffer_pool import empty
from everstep.restore.choose import Candidate
from everstep.sharding.leaves import bytes_of
from everstep.store import catalog
from everstep.store.read import read_chunk
from everstep.tiers.files import Source


def read_stream(candidate: Candidate, stream: Stream) -> Iterator[tuple[str, Iterator[Any]]]:
    """Yield the names and their pieces as `stream()` gave them: tensors, or memoryviews of buffers.
    Holds one piece. Raises Corrupt."""
    disk = candidate.disk
    part = catalog.read_stream(disk, stream)
    table = catalog.read_table(disk, part)
    (pack,) = part.packs
    with ExitStack() as stack:
        sources = candidate.files(pack, stack)
        for name, rows in rows_by_name(table, disk.root / part.table.path):
            yield name, (_read(sources, part, row) for row in rows)


def _read(sources: Sequence[Source], part: Part, row: Row) -> Any:
    (piece,) = row.entry.pieces
    tensor = empty(row.entry)
    view: memoryview = bytes_of(tensor).numpy().data
    for index, (start, size) in enumerate(chunks(piece.size)):
        chunk, digest = view[start : start + size], part.digests[piece.digest + index]
        read_chunk(sources, piece.offset + start, chunk, digest, f"{row.name!r} of a stream")
    return tensor if row.kind == TENSOR else view
