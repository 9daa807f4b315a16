"""Streams read back: each piece verified, in memory of its own, when it is asked for."""

from collections.abc import Iterator
from typing import Any

import torch

from everstep.format.manifest import Part, Stream
from everstep.format.packs import chunks
from everstep.format.streams import TENSOR, Row, rows_by_name
from everstep.store import catalog
from everstep.store.read import check_chunk, opened
from everstep.tiers.files import Reader
from everstep.tiers.tier import Tier


def read_stream(disk: Tier, stream: Stream) -> Iterator[tuple[str, Iterator[Any]]]:
    """Yield the names and their pieces as `stream()` gave them: tensors, or memoryviews of buffers.
    Holds one piece. Raises Corrupt."""
    part = catalog.read_stream(disk, stream)
    table = catalog.read_table(disk, part)
    (pack,) = part.packs
    with opened(disk, pack) as reader:
        for name, rows in rows_by_name(table, disk.root / part.table.path):
            yield name, (_read(reader, part, row) for row in rows)


def _read(reader: Reader, part: Part, row: Row) -> Any:
    (piece,) = row.entry.pieces
    view = memoryview(bytearray(piece.size))
    for index, (start, size) in enumerate(chunks(piece.size)):
        chunk = view[start : start + size]
        if size:
            reader.read_into(piece.offset + start, chunk)
        check_chunk(chunk, part.digests[piece.digest + index], f"{row.name!r} of a stream")
    if row.kind != TENSOR:
        return view
    dtype = getattr(torch, row.entry.spec.dtype)
    if not piece.size:
        return torch.empty(row.entry.spec.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(row.entry.spec.shape)
