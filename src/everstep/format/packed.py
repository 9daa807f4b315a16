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
from dataclasses import replace

from everstep.format.packs import PAGE_BYTES
from everstep.format.tables import Extent, Table, extents

ENTRY = "__packed__"
HEADER_BYTES = PAGE_BYTES


def raw_chunks(table: Table) -> list[Extent]:
    """The chunks of a table's pieces, in the order in which a packed part has them; none where it
    cannot be packed: then it has several packs."""
    return [each for each in extents(table) if each.item_size] if len(table.packs) == 1 else []


def stored_extents(table: Table, stored: Sequence[int]) -> Iterator[Extent]:
    """What lies behind each digest of a packed part; `stored` by digest. A chunk is encoded where
    it has fewer bytes than the raw one."""
    yield Extent(0, 0, HEADER_BYTES, table.packs[0].digest, "the header")
    at = HEADER_BYTES
    for chunk in raw_chunks(table):
        yield replace(chunk, offset=at, size=stored[chunk.digest])
        at += stored[chunk.digest]


def header(size: int) -> bytes:
    """Of a packed file with that many bytes of chunks and padding."""
    entry = {ENTRY: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(entry, separators=(",", ":")).encode()
    return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)
