"""Manifests and piece tables as data, and their JSON.

A checkpoint is its manifest: small, new at each step. What does not change from step to step
(names, shapes, where the pieces lie in their packs) stands in a piece table, a document of its own
that all manifests with the same layout share.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from everstep.errors import Corrupt, Unsupported
from everstep.format.boxes import Box
from everstep.format.document import FORMAT_VERSION, digest_of, seal, unseal
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.packs import Layout, Piece, Spec, chunks

_OWN = re.compile(r"@\d+[.!]")
_SAFE_PATH = re.compile(r"(?!.*\.\.)[\w.-]+(/[\w.-]+)*")


@dataclass(frozen=True, slots=True)
class FileLink:
    """A file of the store: relative path, size in bytes, XXH3-128 of all its bytes (of tables)."""

    path: str
    size: int
    digest: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        link: dict[str, Any] = {"path": self.path, "size": self.size}
        return link if self.digest is None else {**link, "digest": self.digest}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FileLink":
        """Checks that the path stays inside the store."""
        if not _SAFE_PATH.fullmatch(value["path"]):
            raise ValueError(f"unsafe path {value['path']!r}")
        return cls(value["path"], _natural(value["size"]), value.get("digest"))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a piece table. `aliases` are other names of the same tensor (tied weights).
    `strides`: how its elements lay in memory, where that was not row-major; its pieces are."""

    spec: Spec
    pieces: tuple[Piece, ...]
    aliases: tuple[str, ...] = ()
    device: str = "cpu"
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PackShape:
    """A pack as its table knows it: file size, size of the header, index of the header's digest."""

    size: int
    header: int
    digest: int


@dataclass(frozen=True, slots=True)
class Table:
    """What stays the same from step to step: the packs, the tensors by name, and the optimizers.

    Each optimizer has `groups` (parameter name to hyperparameter set) and `state` (parameter name
    to its tensor keys).
    """

    packs: tuple[PackShape, ...]
    tensors: dict[str, TensorEntry]
    optimizers: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes behind one digest: `size` bytes at `offset` of a pack, and what they are."""

    pack: int
    offset: int
    size: int
    digest: int
    what: str


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote: table, packs, a digest per header and chunk, the step of its pieces.

    `stored`: None, or of a packed part (format/packed.py) the stored bytes behind each digest.
    """

    rank: int
    table: FileLink
    packs: tuple[FileLink, ...]
    digests: tuple[str, ...]
    steps: int
    stored: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One step's redo record. `calls`: the optimizer calls of the step, in order, as tagged JSON;
    `part`: their gradients, and the tensors that changed outside of any optimizer."""

    step: int
    calls: tuple[Any, ...]
    part: Part


@dataclass(frozen=True, slots=True)
class Previous:
    """The checkpoint that records go on from, and the XXH3-128 of its manifest: the log is a
    chain."""

    step: int
    epoch: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One committed checkpoint. `objects`, `hyperparameters`: tagged JSON (docs/format.md).

    Either it has parts; or it has records, and stands for the state of `previous` after them.
    """

    step: int
    epoch: int
    run: str
    created: str
    parts: tuple[Part, ...]
    objects: dict[str, Any]
    hyperparameters: dict[str, Any]
    parent: dict[str, int] | None = None
    topology: dict[str, Any] = field(default_factory=dict)
    capture: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    tag: str | None = None
    exact: bool = True
    records: tuple[Record, ...] = ()
    previous: Previous | None = None

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Those of the state, and of the records."""
        return (*self.parts, *(record.part for record in self.records))

    @property
    def files(self) -> tuple[FileLink, ...]:
        """Every data file that it has; what `previous` has comes in addition."""
        return tuple(link for part in self.all_parts for link in (part.table, *part.packs))

    @property
    def size(self) -> int:
        """Bytes of its packs."""
        return sum(pack.size for part in self.all_parts for pack in part.packs)


def encode_table(
    layout: Layout,
    aliases: Mapping[str, Sequence[str]],
    devices: Mapping[str, str],
    optimizers: Mapping[str, Any],
    strides: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> bytes:
    """The sealed piece table of a layout, sorted by tensor name. `strides`: of those that are not
    row-major in memory."""
    rows = []
    for spec, piece in sorted(
        zip(layout.specs, layout.pieces, strict=True), key=lambda row: row[0].name
    ):
        row: dict[str, Any] = {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": spec.shape,
            "device": devices.get(spec.name, "cpu"),
            "pieces": [_piece_to_json(piece)],
        }
        if spec.name in aliases:
            row["aliases"] = list(aliases[spec.name])
        if spec.name in strides:
            row["strides"] = list(strides[spec.name])
        rows.append(row)
    packs = [
        {"size": pack.size, "header": len(pack.header), "digest": pack.digest}
        for pack in layout.packs
    ]
    return seal(
        {"format": FORMAT_VERSION, "packs": packs, "tensors": rows, "optimizers": dict(optimizers)}
    )


def decode_table(data: bytes | memoryview, path: object) -> Table:
    """Parse and check a piece table; raises Corrupt."""
    value = unseal(data, path)
    try:
        entries = [_entry_from_json(row) for row in value["tensors"]]
        packs = tuple(
            PackShape(_natural(pack["size"]), _natural(pack["header"]), _natural(pack["digest"]))
            for pack in value["packs"]
        )
        table = Table(
            packs, {entry.spec.name: entry for entry in entries}, dict(value["optimizers"])
        )
        _check_inside(table)
        return table
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(path, error) from error


def encode_manifest(manifest: Manifest) -> bytes:
    """The sealed manifest."""
    previous = manifest.previous
    return seal(
        {
            "format": FORMAT_VERSION,
            "step": manifest.step,
            "epoch": manifest.epoch,
            "run": manifest.run,
            "created": manifest.created,
            "parent": manifest.parent,
            "exact": manifest.exact,
            "tag": manifest.tag,
            "metrics": manifest.metrics,
            "topology": manifest.topology,
            "capture": manifest.capture,
            "parts": [_part_to_json(part) for part in manifest.parts],
            "previous": asdict(previous) if previous else None,
            "records": [
                {"step": record.step, "calls": record.calls, "part": _part_to_json(record.part)}
                for record in manifest.records
            ],
            "hyperparameters": manifest.hyperparameters,
            "objects": manifest.objects,
        }
    )


def decode_manifest(data: bytes | memoryview, path: object) -> Manifest:
    """Parse and check a manifest; raises Corrupt, or Unsupported for another format version."""
    value = unseal(data, path)
    try:
        return Manifest(
            step=_natural(value["step"]),
            epoch=_natural(value["epoch"]),
            run=value["run"],
            created=value["created"],
            parts=tuple(_part_from_json(part) for part in value["parts"]),
            objects=value["objects"],
            hyperparameters=value["hyperparameters"],
            parent=value["parent"],
            topology=value["topology"],
            capture=value["capture"],
            metrics=value["metrics"],
            tag=value["tag"],
            exact=value["exact"],
            records=tuple(
                Record(
                    _natural(record["step"]),
                    tuple(record["calls"]),
                    _part_from_json(record["part"]),
                )
                for record in value["records"]
            ),
            previous=_previous_from_json(value.get("previous")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(path, error) from error


def is_own(name: str) -> bool:
    """Whether a tensor of a record is the record's own ("@0.weight", "@0!lr"), and not one of the
    state."""
    return _OWN.match(name) is not None


def extents(table: Table) -> list[Extent]:
    """What each digest of a part covers, by pack and offset: headers, and 4 MiB of pieces."""
    found = [
        Extent(index, 0, pack.header, pack.digest, "the header")
        for index, pack in enumerate(table.packs)
    ]
    for name, entry in table.tensors.items():
        for piece in entry.pieces:
            found += [
                Extent(
                    piece.pack, piece.offset + start, size, piece.digest + index, f"tensor {name!r}"
                )
                for index, (start, size) in enumerate(chunks(piece.size))
            ]
    found.sort(key=lambda extent: (extent.pack, extent.offset, extent.size))
    return found


def check_table(table: Table, part: Part, path: object) -> None:
    """Check that table and part speak of the same packs and digests; raises Corrupt.

    After this, sizes and offsets may be trusted: none takes memory or seeks by unchecked numbers.
    """
    found = extents(table)
    digests = sorted(extent.digest for extent in found)
    sizes = [pack.size for pack in table.packs]
    fits = digests == list(range(len(part.digests)))
    if part.stored is None:
        fits = fits and sizes == [pack.size for pack in part.packs]
    else:
        fits = (
            fits
            and len(part.packs) == len(sizes) == 1
            and len(part.stored) == len(part.digests)
            and all(part.stored[extent.digest] <= extent.size for extent in found)
        )
    if not fits:
        raise Corrupt(
            f"reading {path}: the piece table and the manifest that names it speak of other packs"
        )


def check_follows(manifest: Manifest, name: object) -> None:
    """Raises Corrupt for a manifest that is neither a state nor records that follow one."""
    steps = [record.step for record in manifest.records]
    previous = manifest.previous
    is_state = bool(manifest.parts) and not steps and previous is None
    is_log = (
        previous is not None
        and not manifest.parts
        and steps == sorted(set(steps))
        and steps[-1:] == [manifest.step]
        and previous.step < steps[0]
        and previous.epoch <= manifest.epoch
    )
    if not is_state and not is_log:
        raise Corrupt(f"reading the manifest of {name}: it is neither a state nor a log of one")


def content_of(part: Part) -> str:
    """What a part holds, as one digest: equal for equal tables and bytes, wherever they lie (and
    in the same encoding)."""
    return digest_of("".join((part.table.digest or "", *part.digests)).encode())


def _piece_to_json(piece: Piece) -> dict[str, Any]:
    return {
        "offsets": piece.box.offsets,
        "lengths": piece.box.lengths,
        "pack": piece.pack,
        "at": piece.offset,
        "size": piece.size,
        "digest": piece.digest,
        "codec": piece.codec,
    }


def _check_inside(table: Table) -> None:
    for name, entry in table.tensors.items():
        for piece in entry.pieces:
            if (
                piece.pack >= len(table.packs)
                or piece.offset + piece.size > table.packs[piece.pack].size
            ):
                raise ValueError(f"a piece of tensor {name!r} lies outside of its pack")


def _entry_from_json(row: Mapping[str, Any]) -> TensorEntry:
    if type(row["name"]) is not str:
        raise ValueError(f"{row['name']!r} is no name of a tensor")
    spec = Spec(row["name"], str(row["dtype"]), tuple(map(_natural, row["shape"])))
    if spec.dtype not in ITEM_SIZES:
        raise ValueError(f"tensor {spec.name!r} has the unknown dtype {spec.dtype!r}")
    pieces = tuple(
        Piece(
            Box(tuple(map(_natural, piece["offsets"])), tuple(map(_natural, piece["lengths"]))),
            _natural(piece["pack"]),
            _natural(piece["at"]),
            _natural(piece["size"]),
            _natural(piece["digest"]),
            piece["codec"],
        )
        for piece in row["pieces"]
    )
    for piece in pieces:
        if piece.codec != "raw":
            raise Unsupported(
                f"tensor {spec.name!r} is encoded with {piece.codec!r}, which this everstep cannot "
                f"decode. Install the everstep that wrote it, or a newer one"
            )
        if not _fits(piece.box, spec.shape):
            raise ValueError(f"a piece of tensor {spec.name!r} lies outside of its shape")
        if piece.size != piece.box.count * ITEM_SIZES[spec.dtype]:
            raise ValueError(
                f"a piece of tensor {spec.name!r} has {piece.size} bytes, "
                f"its box needs another number"
            )
    aliases = tuple(row.get("aliases", ()))
    return TensorEntry(spec, pieces, aliases, str(row["device"]), _strides(row, spec))


def _strides(row: Mapping[str, Any], spec: Spec) -> tuple[int, ...] | None:
    """Checked: whoever makes a tensor of them needs no more memory than for its elements."""
    if "strides" not in row:
        return None
    strides = tuple(map(_natural, row["strides"]))
    if len(strides) != len(spec.shape) or not is_dense(spec.shape, strides):
        raise ValueError(f"tensor {spec.name!r} of shape {spec.shape} cannot have {strides=}")
    return strides


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of these strides fill their memory, in whatever order of dims."""
    size = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


def _fits(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.offsets) == len(box.lengths) == len(shape) and all(
        offset + length <= size
        for offset, length, size in zip(box.offsets, box.lengths, shape, strict=True)
    )


def _part_to_json(part: Part) -> dict[str, Any]:
    return {
        "rank": part.rank,
        "steps": part.steps,
        "table": part.table.to_json(),
        "packs": [pack.to_json() for pack in part.packs],
        "digests": part.digests,
        **({} if part.stored is None else {"stored": part.stored}),
    }


def _previous_from_json(value: Mapping[str, Any] | None) -> Previous | None:
    if value is None:
        return None
    return Previous(_natural(value["step"]), _natural(value["epoch"]), str(value["digest"]))


def _part_from_json(value: Mapping[str, Any]) -> Part:
    return Part(
        rank=_natural(value["rank"]),
        table=FileLink.from_json(value["table"]),
        packs=tuple(FileLink.from_json(pack) for pack in value["packs"]),
        digests=tuple(value["digests"]),
        steps=_natural(value["steps"]),
        stored=tuple(map(_natural, value["stored"])) if "stored" in value else None,
    )


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a natural number")
    return value


def _malformed(path: object, error: Exception) -> Corrupt:
    return Corrupt(
        f"reading {path}: its digest is right, but it is not what the format says: {error!r}"
    )
