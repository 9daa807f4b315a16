"""Manifests as data, and their JSON.

A checkpoint is its manifest: small, new at each step. What does not change from step to step stands
in a piece table (tables.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from everstep.errors import Corrupt
from everstep.format.document import (
    Shape,
    anything,
    digest,
    malformed,
    natural,
    seal,
    uncollected,
    unseal,
)
from everstep.format.index import INDEX, Index
from everstep.format.tables import PACK_LINK, TABLE_LINK, FileLink, Table, extents

LEFT_OUT = "left_out"
"""Stands in what is said of a record's capture: the parts of which it has no tensors, so that it is
not exact."""

FORMS = ("clips", "compressed")
"""What a record's calls say of gradients that are not as the optimizer consumed them."""

_NAME = {"step": natural, "epoch": natural}
_PREVIOUS: Shape = {**_NAME, "digest": digest}
PART: Shape = {
    "rank": natural,
    "table": TABLE_LINK,
    "packs": [PACK_LINK],
    "digests": [digest],
    "steps": natural,
    "stored?": [natural],
    "encoded?": [[natural, str, (None, digest)]],
    "base?": _PREVIOUS,
}
_ANYTHING = {str: anything}
_OF_RANK = {
    "clips?": [{"coefficient": str, "foreach": bool, "names": [str]}],
    "compressed?": [{"form": str, "dtype": str, "names": [str], "strides?": {str: [natural]}}],
    "scaler?": _ANYTHING,
    "arguments?": [anything, anything],
    "autocast?": {str: str},
    "generators?": _ANYTHING,
    "digest?": str,
}
CALL: Shape = {
    "optimizer": str,
    "class": str,
    "sets": [_ANYTHING],
    "ranks?": [_OF_RANK],
    **_OF_RANK,
}
_RECORD = {
    "step": natural,
    "calls": [CALL],
    "part?": (natural, PART),
    "parts?": [PART],
    "derived?": {str: {"rule": bool, "digest": (None, str), "digests?": [(None, str)]}},
}
_STREAM: Shape = {"part": TABLE_LINK, "table": TABLE_LINK, "packs": [PACK_LINK]}
_MANIFEST = {
    **_NAME,
    "run": str,
    "created": str,
    "parent": (None, _NAME),
    "exact": bool,
    "replaces_log?": bool,
    "tag": (None, str),
    "metrics": _ANYTHING,
    "topology": _ANYTHING,
    "capture": _ANYTHING,
    "parts": [PART],
    "previous?": (None, _PREVIOUS),
    "records": [_RECORD],
    "hyperparameters": {str: [_ANYTHING]},
    "objects": _ANYTHING,
    "ranks?": [{str: {"index": natural, "count": natural, "value": anything}}],
    "streams?": {str: _STREAM},
    "index?": INDEX,
}
_IF_ANY = ("replaces_log", "ranks", "streams", "index")
"""Members that are left out where there is nothing to say."""


class CheckpointName(NamedTuple):
    """A checkpoint's identity within its store: the step, and the epoch that wrote it."""

    step: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.step:08d}-{self.epoch:04d}"


class Encoded(NamedTuple):
    """A chunk that is not stored as it is: the index of its digest, its codec (codecs/codec.py),
    and the digest of its raw bytes, where that is known."""

    digest: int
    codec: str
    content: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote, as it stands in a manifest: table, packs, a digest per header and chunk,
    the step of its pieces.

    `stored`: None, or of a packed part (format/packed.py) the stored bytes behind each digest.
    `encoded`: which of its chunks are; None in parts of before, where all that are smaller are byte
    planes.
    """

    rank: int
    table: FileLink
    packs: tuple[FileLink, ...]
    digests: tuple[str, ...]
    steps: int
    stored: tuple[int, ...] | None = None
    encoded: tuple[Encoded, ...] | None = None
    base: "Previous | None" = None
    """The checkpoint to whose part of the same table some chunks are differences."""

    @property
    def size(self) -> int:
        """Bytes of its packs."""
        return sum(pack.size for pack in self.packs)


@dataclass(frozen=True, slots=True)
class Record:
    """One step's redo record. `calls`: the optimizer calls of the step, in order, as tagged JSON;
    `parts`: their gradients, and the tensors that changed outside of any optimizer, of each node
    what it wrote. `derived`: the parts of the state that the user's rules derive, or that nobody
    changes: `rule` (whether there is one) and `digest` (of its tensors, or None); of several ranks
    `digests`, of each one's."""

    step: int
    calls: tuple[Any, ...]
    parts: tuple[Part, ...]
    derived: dict[str, Any] = field(default_factory=dict)

    @property
    def part(self) -> Part:
        """Of a run on one node, which has one."""
        (part,) = self.parts
        return part

    @property
    def size(self) -> int:
        """Bytes of its packs."""
        return sum(part.size for part in self.parts)

    @property
    def ruled(self) -> list[str]:
        """The parts that only the program's rules can derive."""
        return [part for part, said in self.derived.items() if said["rule"]]


@dataclass(frozen=True, slots=True)
class Stream:
    """A streamed object of the state (format/streams.py). `part`: the document that has its part;
    `table` and `packs`: what that one names. Its version is among the manifest's objects."""

    part: FileLink
    table: FileLink
    packs: tuple[FileLink, ...]

    @property
    def files(self) -> tuple[FileLink, ...]:
        """All that it needs."""
        return self.part, self.table, *self.packs

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Stream":
        """Of a _STREAM."""
        part, table = FileLink.from_json(value["part"]), FileLink.from_json(value["table"])
        return cls(part, table, tuple(map(FileLink.from_json, value["packs"])))


@dataclass(frozen=True, slots=True)
class Previous:
    """The checkpoint that records go on from, and the XXH3-128 of its manifest: the log is a
    chain."""

    step: int
    epoch: int
    digest: str

    @property
    def name(self) -> CheckpointName:
        """The step and the epoch by which it is known."""
        return CheckpointName(self.step, self.epoch)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One committed checkpoint. `objects`, `hyperparameters`: tagged JSON (docs/format.md).

    It has parts: a state. Or it has records, and stands for the state of `previous` after them. Or
    it has both, and no `previous`: its parts are of several steps (`Part.steps`), and the records
    bring each of them to the last one.
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
    ranks: tuple[dict[str, Any], ...] = ()
    """Of several ranks: for each the objects that it has for itself."""
    replaces_log: bool = False
    """Of a state that was made of a log and is not exact: to be taken in its place all the same."""
    streams: Mapping[str, Stream] = field(default_factory=dict)
    index: Index | None = None
    """Of a state of many parts, of one step: which of them have what."""

    @property
    def name(self) -> CheckpointName:
        """Step and epoch."""
        return CheckpointName(self.step, self.epoch)

    @property
    def ends_chain(self) -> bool:
        """Whether a state that was made of a log stands for it: nothing before it is needed."""
        return self.exact or self.replaces_log

    @property
    def behind(self) -> Previous | None:
        """What is needed beside its files: what records go on from, or differences are to."""
        return self.previous or next((part.base for part in self.parts if part.base), None)

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Those of the state, and of the records; one that is both, once."""
        own = set(map(id, self.parts))
        return (
            *self.parts,
            *(part for record in self.records for part in record.parts if id(part) not in own),
        )

    @property
    def is_spread(self) -> bool:
        """Whether its parts have to be brought to one step."""
        return bool(self.parts and self.records)

    @property
    def is_whole(self) -> bool:
        """Whether it is a state, without anything to be replayed."""
        return self.previous is None and not self.is_spread

    @property
    def classes(self) -> dict[str, str]:
        """Of its optimizers, module and qualified name, as far as it says them."""
        said = self.topology.get("optimizers")
        if not isinstance(said, dict):
            return {}
        return {name: kind for name, kind in said.items() if isinstance(kind, str)}

    @property
    def files(self) -> tuple[FileLink, ...]:
        """Every data file that it has; what `previous` has comes in addition."""
        of_streams = (link for stream in self.streams.values() for link in stream.files)
        of_parts = (link for part in self.all_parts for link in (part.table, *part.packs))
        return (*of_parts, *of_streams)

    @property
    def size(self) -> int:
        """Bytes of its packs."""
        packs = (pack for stream in self.streams.values() for pack in stream.packs)
        return sum(part.size for part in self.all_parts) + sum(pack.size for pack in packs)


def encode_manifest(manifest: Manifest) -> bytes:
    """The sealed manifest."""
    keys = (key.removesuffix("?") for key in _MANIFEST)
    members: dict[str, Any] = {key: getattr(manifest, key) for key in keys}
    members |= {
        "records": [_record_to_json(manifest, record) for record in manifest.records],
        "index": manifest.index and manifest.index.to_json(),
    }
    said = {key: each for key, each in members.items() if each or key not in _IF_ANY}
    return seal(said)


@uncollected
def decode_manifest(data: bytes | memoryview, path: object) -> Manifest:
    """Parse and check a manifest; raises Corrupt, or Unsupported for another format version."""
    value = unseal(data, path, _MANIFEST)
    parts = tuple(map(part_from_json, value["parts"]))
    try:
        records = tuple(_record_from_json(record, parts) for record in value["records"])
        index = Index.from_json(value["index"], len(parts)) if "index" in value else None
    except (IndexError, ValueError) as error:
        raise malformed(path, f": {error}") from error
    if index and records:
        raise malformed(path, ".index is there beside records")
    known = {field.name: value[field.name] for field in fields(Manifest) if field.name in value}
    known["previous"] = _previous(value.get("previous"))
    known["ranks"] = tuple(value.get("ranks", ()))
    found = value.get("streams", {})
    known["streams"] = {name: Stream.from_json(each) for name, each in found.items()}
    return Manifest(**{**known, "parts": parts, "records": records, "index": index})


def _previous(value: Mapping[str, Any] | None) -> Previous | None:
    return Previous(value["step"], value["epoch"], value["digest"]) if value else None


def check_table(table: Table, part: Part, path: object) -> None:
    """Check that table and part speak of the same packs and digests; raises Corrupt.

    After this, sizes and offsets may be trusted: none takes memory or seeks by unchecked numbers.
    """
    found = extents(table)
    digests = sorted(extent.digest for extent in found)
    fits = digests == list(range(len(part.digests))) and len(part.packs) == len(table.packs)
    fits = fits and all(
        link.size == pack.size
        for link, pack in zip(part.packs, table.packs, strict=True)
        if part.stored is None or pack.still
    )
    if part.stored is not None:
        fits = fits and len(part.stored) == len(part.digests)
        fits = fits and all(part.stored[extent.digest] <= extent.size for extent in found)
    if part.encoded is not None:
        smaller = {
            extent.digest
            for extent in found
            if extent.item_size and part.stored and part.stored[extent.digest] < extent.size
        }
        fits = fits and smaller == {each.digest for each in part.encoded}
    if not fits:
        raise Corrupt(
            f"reading {path}: the piece table and the manifest that names it speak of other packs"
        )


def check_follows(manifest: Manifest, name: object) -> None:
    """Raises Corrupt for a manifest that is neither a state nor records that follow one."""
    steps = [record.step for record in manifest.records]
    parts, previous = manifest.parts, manifest.previous
    is_right = steps == sorted(set(steps)) and steps[-1:] in ([], [manifest.step])
    if previous is None:
        is_right &= bool(parts) and all(part.steps <= manifest.step for part in parts)
        is_right &= bool(steps) or all(part.steps == manifest.step for part in parts)
    else:
        is_right &= bool(steps) and previous.step < steps[0] and not parts
        is_right &= previous.epoch <= manifest.epoch
    if not is_right:
        raise Corrupt(f"reading the manifest of {name}: it is neither a state nor a log of one")


def _record_to_json(manifest: Manifest, record: Record) -> dict[str, Any]:
    """As it stands in a manifest: of a spread state with the number of the part that holds it
    beside its pieces."""
    said: dict[str, Any] = {"step": record.step, "calls": record.calls}
    if record.derived:
        said["derived"] = record.derived
    if len(record.parts) > 1:
        return {**said, "parts": record.parts}
    if not manifest.parts:
        return {**said, "part": record.part}
    return {**said, "part": next(i for i, p in enumerate(manifest.parts) if p is record.part)}


def _record_from_json(value: Mapping[str, Any], parts: Sequence[Part]) -> Record:
    """Raises ValueError or IndexError for a record that has no parts, or those of nobody."""
    if "parts" in value:
        own = tuple(map(part_from_json, value["parts"]))
        if not own or parts:
            raise ValueError("a record has parts of its own, and none or others beside them")
    elif "part" not in value or natural(value["part"]) != bool(parts):
        raise ValueError("a record has no part")
    else:
        own = (parts[value["part"]] if parts else part_from_json(value["part"]),)
    return Record(value["step"], tuple(value["calls"]), own, value.get("derived", {}))


def part_from_json(value: Mapping[str, Any]) -> Part:
    """Of a PART."""
    return Part(
        rank=value["rank"],
        table=FileLink.from_json(value["table"]),
        packs=tuple(map(FileLink.from_json, value["packs"])),
        digests=tuple(value["digests"]),
        steps=value["steps"],
        stored=tuple(value["stored"]) if "stored" in value else None,
        encoded=tuple(Encoded(*row) for row in value["encoded"]) if "encoded" in value else None,
        base=_previous(value.get("base")),
    )
