"""Piece tables as data, and their JSON: what stays the same from step to step.

Names, shapes, where the pieces lie in their packs, which digests cover what: a document of its own
that all manifests with the same layout share.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby
from types import MappingProxyType
from typing import Any

from everstep.errors import Unsupported
from everstep.format.boxes import Box
from everstep.format.document import Shape, digest, malformed, natural, seal, uncollected, unseal
from everstep.format.dtypes import ITEM_SIZES, plane_count
from everstep.format.packs import Layout, PackShape, Piece, Spec, chunk_count, chunks
from everstep.format.tiling import find_flaw

_OWN = re.compile(r"@\d+[.!]")
_GRADIENT = re.compile(r"@\d+!?\.")
_SAFE_PATH = re.compile(r"(?!.*\.\.)[\w.-]{1,200}(/[\w.-]{1,200}){0,9}")


def _safe_path(value: object) -> bool:
    """That of a file inside the store."""
    return type(value) is str and _SAFE_PATH.fullmatch(value) is not None


PACK_LINK: Shape = {"path": _safe_path, "size": natural}
TABLE_LINK: Shape = {**PACK_LINK, "digest": digest}
_PIECE = {
    "offsets": [natural],
    "lengths": [natural],
    "pack": natural,
    "at": natural,
    "size": natural,
    "digest": natural,
    "codec": str,
}
TENSOR: Shape = {
    "name": str,
    "dtype": str,
    "shape": [natural],
    "device": str,
    "aliases?": [str],
    "strides?": [natural],
}
OPTIMIZERS: Shape = {str: {"groups": {str: natural}, "state": {str: [str]}}}
_WITH_PIECES = {**TENSOR, "pieces": [_PIECE]}
_PACK = {"size": natural, "header": natural, "digest": natural, "still?": bool, "turn?": natural}
_TABLE = {
    "packs": [_PACK],
    "tensors": [_WITH_PIECES],
    "optimizers": OPTIMIZERS,
    "rest?": [_WITH_PIECES],
}


@dataclass(frozen=True, slots=True)
class FileLink:
    """A file of the store, as it stands in manifests: relative path, size in bytes, XXH3-128 of all
    its bytes (of tables)."""

    path: str
    size: int
    digest: str | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FileLink":
        """Of a PACK_LINK or a TABLE_LINK."""
        return cls(value["path"], value["size"], value.get("digest"))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a piece table: all of it, or those pieces that the table's part has of it
    (global_tensors.py). `aliases` are other names of the same tensor (tied weights). `strides`: how
    its elements lay in memory, where that was not row-major; its pieces are."""

    spec: Spec
    pieces: tuple[Piece, ...]
    aliases: tuple[str, ...] = ()
    device: str = "cpu"
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """What stays the same from step to step: the packs, the tensors by name, and the optimizers.

    Each optimizer has `groups` (parameter name to hyperparameter set) and `state` (parameter name
    to its tensor keys). `rest`: what lies in these packs beside them, and is of another checkpoint
    alone, with which this one shares the packs (versions/merge.py).
    """

    packs: tuple[PackShape, ...]
    tensors: dict[str, TensorEntry]
    optimizers: dict[str, dict[str, Any]]
    rest: tuple[TensorEntry, ...] = ()

    def has_layout_of(self, other: "Table") -> bool:
        """Whether both have the same tensors in the same places of their packs."""
        return (self.packs, self.tensors) == (other.packs, other.tensors)


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes behind one digest: `size` bytes at `offset` of a pack, and what they are; of
    elements, `item_size` is the number of their byte planes."""

    pack: int
    offset: int
    size: int
    digest: int
    what: str
    item_size: int = 0


def encode_table(
    layout: Layout,
    aliases: Mapping[str, Sequence[str]],
    devices: Mapping[str, str],
    optimizers: Mapping[str, Any],
    strides: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> bytes:
    """The sealed piece table of a layout, sorted by tensor name. `strides`: of those that are not
    row-major in memory."""
    placed = sorted(
        zip(layout.specs, layout.pieces, strict=True),
        key=lambda row: (row[0].name, row[1].box.offsets, row[1].box.lengths),
    )
    tensors: dict[str, TensorEntry] = {}
    for name, rows in groupby(placed, key=lambda row: row[0].name):
        found = list(rows)
        spec = replace(found[0][0], box=None)
        assert all((s.dtype, s.shape) == (spec.dtype, spec.shape) for s, _ in found), name
        order = strides.get(name)
        tensors[name] = TensorEntry(
            spec,
            tuple(piece for _, piece in found),
            tuple(aliases.get(name, ())),
            devices.get(name, "cpu"),
            None if order is None else tuple(order),
        )
    return seal_table(Table(layout.packs, tensors, dict(optimizers)))


def seal_table(table: Table) -> bytes:
    """The sealed document of a table, whose tensors are sorted by name."""
    document = {
        "packs": table.packs,
        "tensors": list(map(_entry_to_json, table.tensors.values())),
        "optimizers": table.optimizers,
    }
    rest = list(map(_entry_to_json, table.rest))
    return seal({**document, "rest": rest} if rest else document)


@uncollected
def decode_table(data: bytes | memoryview, path: object) -> Table:
    """Parse and check a piece table; raises Corrupt."""
    value = unseal(data, path, _TABLE)
    packs = tuple(
        PackShape(p["size"], p["header"], p["digest"], p.get("still", False), p.get("turn", 0))
        for p in value["packs"]
    )
    try:
        entries = [_entry_from_json(row, packs) for row in value["tensors"]]
        rest = tuple(_entry_from_json(row, packs) for row in value.get("rest", ()))
    except ValueError as error:
        raise malformed(path, f": {error}") from error
    tensors = {entry.spec.name: entry for entry in entries}
    return Table(packs, tensors, value["optimizers"], rest)


def is_own(name: str) -> bool:
    """Whether a tensor of a record is the record's own ("@0.weight", "@0!lr"), and not one of the
    state."""
    return _OWN.match(name) is not None


def is_gradient(name: str) -> bool:
    """Whether a tensor is a record's gradient ("@0.weight"; "@0!.weight": one from before clipping,
    of which several ranks have parts)."""
    return _GRADIENT.match(name) is not None


def raw_name(at: str, parameter: str) -> str:
    """What a gradient from before clipping is called, of which several ranks have parts. They have
    to agree that it is one: where some have the clipped gradient, both are incomplete."""
    return f"{at}!.{parameter}"


def still_groups(table: Table) -> dict[str, int]:
    """The tensors that seem not to change, by the groups in which they lie (packs.lay_out)."""
    return {
        name: 1 + piece.pack
        for name, entry in table.tensors.items()
        for piece in entry.pieces
        if table.packs[piece.pack].still
    }


def extents(table: Table) -> list[Extent]:
    """What each digest of a part covers, by pack and offset: headers, and 4 MiB of pieces."""
    found = [
        Extent(index, 0, pack.header, pack.digest, "the header")
        for index, pack in enumerate(table.packs)
    ]
    for entry in chain(table.tensors.values(), table.rest):
        what, item_size = f"tensor {entry.spec.name!r}", plane_count(entry.spec.dtype)
        for piece in entry.pieces:
            pack, at, digest = piece.pack, piece.offset, piece.digest
            if chunk_count(piece.size) == 1:  # as of nearly all of a million
                found.append(Extent(pack, at, piece.size, digest, what, item_size))
                continue
            found += [
                Extent(pack, at + start, size, digest + index, what, item_size)
                for index, (start, size) in enumerate(chunks(piece.size))
            ]
    found.sort(key=lambda extent: (extent.pack, extent.offset, extent.size))
    return found


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of these strides fill their memory, in whatever order of dims."""
    size = 1
    if len(strides) != len(shape):
        return False
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


def tensor_to_json(entry: TensorEntry) -> dict[str, Any]:
    """A TENSOR: all but the pieces."""
    row: dict[str, Any] = {
        "name": entry.spec.name,
        "dtype": entry.spec.dtype,
        "shape": entry.spec.shape,
        "device": entry.device,
    }
    if entry.aliases:
        row["aliases"] = entry.aliases
    if entry.strides is not None:
        row["strides"] = entry.strides
    return row


def tensor_from_json(row: Mapping[str, Any], pieces: tuple[Piece, ...] = ()) -> TensorEntry:
    """Of a TENSOR, with these pieces. Raises ValueError."""
    spec = _spec(row["name"], row["dtype"], tuple(row["shape"]))
    if spec.dtype not in ITEM_SIZES:
        raise ValueError(f"tensor {spec.name!r} has the unknown dtype {spec.dtype!r}")
    strides = tuple(row["strides"]) if "strides" in row else None
    # Whoever makes a tensor of them needs no more memory than for its elements.
    if strides is not None and not is_dense(spec.shape, strides):
        raise ValueError(f"tensor {spec.name!r} of shape {spec.shape} cannot have {strides=}")
    return TensorEntry(spec, pieces, tuple(row.get("aliases", ())), row["device"], strides)


def _entry_to_json(entry: TensorEntry) -> dict[str, Any]:
    pieces = [
        {
            "offsets": piece.box.offsets,
            "lengths": piece.box.lengths,
            "pack": piece.pack,
            "at": piece.offset,
            "size": piece.size,
            "digest": piece.digest,
            "codec": "raw",
        }
        for piece in entry.pieces
    ]
    return {**tensor_to_json(entry), "pieces": pieces}


_spec = lru_cache(maxsize=1 << 14)(Spec)
"""Most parts have the same tensors, and most of a part's are cut alike (`_box`): it is several
times as fast."""


@lru_cache(maxsize=1 << 12)
def _box(offsets: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """Raises ValueError where it is none of a tensor of that shape."""
    fits = len(offsets) == len(lengths) == len(shape)
    if not fits or any(at + n > m for at, n, m in zip(offsets, lengths, shape, strict=True)):
        raise ValueError(f"a piece lies outside of its tensor's shape {list(shape)}")
    return Box(offsets, lengths)


def _entry_from_json(row: Mapping[str, Any], packs: Sequence[PackShape]) -> TensorEntry:
    shape = tuple(row["shape"])
    pieces = [
        Piece(
            _box(tuple(piece["offsets"]), tuple(piece["lengths"]), shape),
            piece["pack"],
            piece["at"],
            piece["size"],
            piece["digest"],
        )
        for piece in row["pieces"]
    ]
    entry = tensor_from_json(row, tuple(pieces))
    spec = entry.spec
    if odd := {piece["codec"] for piece in row["pieces"]} - {"raw"}:
        raise Unsupported(
            f"tensor {spec.name!r} is encoded with {sorted(odd)}, which this everstep cannot "
            f"decode. Install the everstep that wrote it, or a newer one"
        )
    for piece in pieces:
        if piece.size != piece.box.count * ITEM_SIZES[spec.dtype]:
            raise ValueError(
                f"a piece of tensor {spec.name!r} has {piece.size} bytes, "
                f"its box needs another number"
            )
        if piece.pack >= len(packs) or piece.offset + piece.size > packs[piece.pack].size:
            raise ValueError(f"a piece of tensor {spec.name!r} lies outside of its pack")
    if not pieces:
        raise ValueError(f"tensor {spec.name!r} has no piece")
    if flaw := find_flaw(spec.shape, [piece.box for piece in pieces], holes=False):
        raise ValueError(f"two pieces of tensor {spec.name!r} overlap at {flaw.box}")
    return entry


def owned_names(optimizers: Mapping[str, Any]) -> Iterator[str]:
    """The names of what optimizers change, by `optimizers` of a table."""
    for table in optimizers.values():
        yield from table["groups"]
    yield from (name for name, _ in state_names(optimizers))


def state_names(optimizers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names of the tensors of their state, and of the parameters that have these."""
    for optimizer, table in optimizers.items():
        for parameter, keys in table["state"].items():
            yield from ((f"{optimizer}.{parameter}.{key}", parameter) for key in keys)
