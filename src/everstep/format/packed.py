"""Packed parts (docs/format.md, section 7): where chunks lie of which some are encoded.

A packed part's packs, but for still ones, are safetensors files with a single entry of bytes: the
chunks of the raw layout, which the piece table describes, in its order. How many bytes each of them
takes stands in the part: so tables stay shared from step to step, though the sizes change. Still
packs lie raw, as later checkpoints name them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from everstep.format.manifest import Encoded, Part
from everstep.format.packs import PAGE_BYTES, Entries
from everstep.format.tables import Extent, Table, extents

ENTRY = "__packed__"
HEADER_BYTES = PAGE_BYTES


def raw_chunks(table: Table) -> list[Extent]:
    """The chunks of a table's pieces, in the order in which a packed part has them, pack by pack;
    but for still packs."""
    return [each for each in extents(table) if each.item_size and not table.packs[each.pack].still]


def stored_extents(table: Table, stored: Sequence[int]) -> Iterator[Extent]:
    """What lies behind each digest of a packed part; `stored` by digest. A chunk is encoded where
    it has fewer bytes than the raw one."""
    at = 0
    for extent in extents(table):
        pack = table.packs[extent.pack]
        if pack.still:
            yield extent
        elif extent.digest == pack.digest:
            yield replace(extent, size=HEADER_BYTES)
            at = HEADER_BYTES
        else:
            yield replace(extent, offset=at, size=stored[extent.digest])
            at += stored[extent.digest]


def encoded_chunks(part: Part, table: Table) -> dict[int, Encoded]:
    """The chunks of a part that are not stored as they are, by the index of their digest."""
    if part.encoded is not None:
        return {each.digest: each for each in part.encoded}
    stored = part.stored
    return {
        chunk.digest: Encoded(chunk.digest, "planes")
        for chunk in (raw_chunks(table) if stored is not None else ())
        if stored is not None and stored[chunk.digest] < chunk.size
    }


def content_digests(part: Part, table: Table) -> dict[int, str | None]:
    """The digests of the raw bytes of a part's chunks, by the index of those of what is stored;
    None where one is not known."""
    encoded = encoded_chunks(part, table)
    headers = {pack.digest for pack in table.packs}
    return {
        index: encoded[index].content if index in encoded else digest
        for index, digest in enumerate(part.digests)
        if index not in headers
    }


def header(size: int) -> bytes:
    """Of a packed file with that many bytes of chunks and padding; of HEADER_BYTES."""
    entries = Entries()
    entries.add(ENTRY, "uint8", (size,), size)
    return entries.encode()
