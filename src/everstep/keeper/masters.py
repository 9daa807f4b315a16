"""Which tensors seem to be rounded from others: a bfloat16 copy of float32 weights, by whatever
names. Told from a few elements, and proven chunk by chunk where it is used."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from everstep.codecs.rounded import DTYPES, SOURCE, rounded
from everstep.format.boxes import Box
from everstep.format.packs import Piece, chunk_count, chunks
from everstep.format.tables import Extent, Table

_ITEMS = 64
View = Callable[[Extent], memoryview]


class Master(NamedTuple):
    """Of a chunk that may be rounded: the tensor it is rounded from, its own dtype, and which
    chunks of that tensor have its elements."""

    name: str
    dtype: str
    chunks: tuple[Extent, ...]


def find_masters(table: Table, view: View, size_min: int) -> dict[int, Master]:
    """By the digests of chunks; of pieces of at least `size_min` bytes, which have the same box.
    Blocks until all has arrived, if there can be any. Raises Unsupported where it never will."""
    copies = [row for dtype in DTYPES for row in _pieces(table, dtype, size_min)]
    if not copies:
        return {}
    known: dict[tuple[Box, str, bytes], tuple[str, Piece]] = {}
    for name, _, piece in _pieces(table, SOURCE, 2 * size_min):
        some = b"".join(_elements(view, piece, 4))
        for dtype in DTYPES:
            known.setdefault(
                (piece.box, dtype, bytes(rounded(memoryview(some), dtype))), (name, piece)
            )
    found = {}
    for _, dtype, piece in copies:
        if master := known.get((piece.box, dtype, b"".join(_elements(view, piece, 2)))):
            own = list(_extents(master[1], 4))
            for number in range(chunk_count(piece.size)):
                both = tuple(own[2 * number : 2 * number + 2])
                found[piece.digest + number] = Master(master[0], dtype, both)
    return found


def _pieces(table: Table, dtype: str, size_min: int) -> Iterator[tuple[str, str, Piece]]:
    for name, entry in table.tensors.items():
        if entry.spec.dtype == dtype:
            for piece in entry.pieces:
                if piece.size >= size_min:
                    yield name, dtype, piece


def _elements(view: View, piece: Piece, item_size: int) -> Iterator[memoryview]:
    """Some, at even distances."""
    whole = view(Extent(piece.pack, piece.offset, piece.size, piece.digest, ""))
    step = piece.size // item_size // _ITEMS * item_size
    return (whole[at * step : at * step + item_size] for at in range(_ITEMS))


def _extents(piece: Piece, item_size: int) -> Iterator[Extent]:
    for number, (start, size) in enumerate(chunks(piece.size)):
        yield Extent(piece.pack, piece.offset + start, size, piece.digest + number, "", item_size)
