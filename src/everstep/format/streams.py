"""Streams (docs/format.md, section 4): content of any size that a program gives piece by piece.

A stream is described as a part of a state is. As it may be large and stays the same from step to
step, its part is a document of its own, which manifests name (manifest.Stream). By the names that
its pieces have in its table they come in the order in which they were given.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from everstep.errors import Corrupt
from everstep.format.document import seal, unseal
from everstep.format.manifest import PART, Part, part_from_json
from everstep.format.tables import Table, TensorEntry

BUFFER, TENSOR, NOTHING = "b", "t", "n"
"""What a piece was given as; NOTHING stands for a name without pieces."""


class Row(NamedTuple):
    """A piece of a stream: what it was given as, and where it lies."""

    name: str
    kind: str
    entry: TensorEntry


def row_name(number: int, index: int, kind: str, name: str) -> str:
    """What piece number `index` of name number `number` is called in the table."""
    return f"{number:08d}/{index:08d}/{kind}/{name}"


def rows_by_name(table: Table, where: object) -> Iterator[tuple[str, list[Row]]]:
    """The pieces of a stream, by the names that they were given under. Raises Corrupt."""
    for _, entries in groupby(sorted(table.tensors.items()), lambda row: row[0].partition("/")[0]):
        rows = [_row(name, entry, where) for name, entry in entries]
        yield rows[0].name, [row for row in rows if row.kind != NOTHING]


def _row(called: str, entry: TensorEntry, where: object) -> Row:
    words = called.split("/", 3)
    if len(words) != 4 or words[2] not in (BUFFER, TENSOR, NOTHING) or len(entry.pieces) != 1:
        raise Corrupt(f"reading {where}: {called!r} is no piece of a stream")
    return Row(words[3], words[2], entry)


def encode_part(part: Part) -> bytes:
    """The sealed document of a stream's part."""
    return seal({"part": part})


def decode_part(data: bytes | memoryview, path: object) -> Part:
    """Parse and check it; raises Corrupt."""
    return part_from_json(unseal(data, path, {"part": PART})["part"])
