"""Packed parts: where the encoded chunks of a record lie.

A packed part has one pack, a valid safetensors file with a single entry of bytes:

    0        8             header                              size, a multiple of 4096
    ├────────┼─────────────┼─────────┬─────────┬─────┬─────────┤
    │ length │ JSON, blanks│ chunk 0 │ chunk 1 │ ... │ padding │
    └────────┴─────────────┴─────────┴─────────┴─────┴─────────┘

Its chunks are those of the pieces in the raw layout, which the piece table describes, in that
layout's order. The part's `stored` says how many bytes each of them takes: those of the raw chunk
where it is stored as it is, fewer where it is encoded (codecs/planes.py). So tables stay shared
from step to step, though the sizes change. Digests are of the stored bytes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.format.dtypes import ITEM_SIZES
from everstep.format.packs import PAGE_BYTES, chunk_count
from everstep.format.tables import Extent, Table, extents

ENTRY = "__packed__"
HEADER_BYTES = PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of the raw layout: `extent`, of items of `item_size` bytes."""

    extent: Extent
    item_size: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies in a packed part: `size` stored bytes at `offset`, encoded where they are
    fewer than the raw ones."""

    chunk: Chunk
    offset: int
    size: int


def plane_count(dtype: str) -> int:
    """Into how many byte planes an item goes; complex128 counts as two."""
    return min(8, ITEM_SIZES[dtype])


def raw_chunks(table: Table) -> list[Chunk]:
    """The chunks of a table's pieces, in the order in which a packed part has them; none where it
    cannot be packed: then it has several packs."""
    if len(table.packs) != 1:
        return []
    item_sizes = {
        piece.digest + number: plane_count(entry.spec.dtype)
        for entry in table.tensors.values()
        for piece in entry.pieces
        for number in range(chunk_count(piece.size))
    }
    return [
        Chunk(extent, item_sizes[extent.digest])
        for extent in extents(table)
        if extent.digest in item_sizes
    ]


def places(table: Table, stored: Sequence[int]) -> Iterator[Place]:
    """Where each chunk lies; `stored` by digest."""
    at = HEADER_BYTES
    for chunk in raw_chunks(table):
        size = stored[chunk.extent.digest]
        yield Place(chunk, at, size)
        at += size


def header(size: int) -> bytes:
    """Of a packed file with that many bytes of chunks and padding."""
    entry = {ENTRY: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(entry, separators=(",", ":")).encode()
    return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)
