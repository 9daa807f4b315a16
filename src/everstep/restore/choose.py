"""Which checkpoint to restore: the newest that verifies, or the one that was asked for;
and from where."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.errors import Corrupt, EverstepError, Missing
from everstep.format.boxes import Box
from everstep.format.document import digest_of, uncollected
from everstep.format.global_tensors import Described, Version
from everstep.format.manifest import (
    CheckpointName,
    Manifest,
    Part,
    Stream,
    check_table,
    decode_manifest,
)
from everstep.format.packs import chunks
from everstep.format.streams import TENSOR, Row, rows_by_name
from everstep.format.tables import FileLink, Table
from everstep.keeper.arena import Arena
from everstep.keeper.ranks.node_save import REPLICA, NodeSave, ended_saves
from everstep.redo.replay import OtherBytes
from everstep.restore.chain import Chain
from everstep.restore.deliver import empty
from everstep.restore.load import MemorySource
from everstep.sharding.leaves import bytes_of
from everstep.store import catalog, names
from everstep.store.read import check_size, open_pack, read_chunk
from everstep.tiers.files import Source
from everstep.tiers.tier import Readable, Tier, Union

_TABLES_MAX = 256
"""That one candidate remembers."""


@dataclass(frozen=True, slots=True)
class Held:
    """A checkpoint that a keeper still holds in memory, a state or a record, committed or not."""

    manifest: Manifest
    table: Table
    packs: Sequence[Source]
    is_committed: bool

    @property
    def log_digest(self) -> str | None:
        """Of a replica's state: of the manifest of the log step that it has come to."""
        found = self.manifest.capture.get(REPLICA)
        return found if isinstance(found, str) else None


@dataclass(slots=True)
class Candidate:
    """A checkpoint that may be restored, and the sources for its packs."""

    name: CheckpointName
    disk: Tier
    held: Held | None = None
    is_shared: bool = False
    """Whether other ranks of this node read the same: then the page cache does it once for all."""
    _manifests: list[Manifest] = field(default_factory=list)
    """What it was rebuilt from when that was looked at last, as far as it could be read."""
    _damaged: set[int] = field(default_factory=set)
    """By id(): the parts of them that turned out to be damaged."""
    _tables: dict[str | None, Table] = field(default_factory=dict)
    _checked: set[tuple[int, ...]] = field(default_factory=set)
    """By id(): tables that are whole together."""
    already: Container[str] = frozenset()
    """The tensors that may be in their places: what has the right digest there is not read."""
    near: Mapping[str, Source] = field(default_factory=dict)
    """By the paths of packs, where they lie nearer than in their files."""

    @property
    def is_replica(self) -> bool:
        """Whether it is a log step that lies whole in memory, and has its log beside."""
        return self.held is not None and self.held.log_digest is not None

    def describe(self) -> Chain:
        """What it is rebuilt from: the state from memory, where it is held; one that nothing goes
        on from by `outline`. Raises Missing, Corrupt."""
        if self.held:
            held = Described(self.held.manifest, [self.held.table])
            held.check("memory")
            return Chain(held, [])
        self._manifests.clear()
        for manifest in catalog.followed(self.disk, self.name):
            self._manifests.insert(0, manifest)
        base, *logs = self._manifests
        return Chain(self.read(base) if logs else self.outline(base), [*map(self.read, logs)])

    def outline(self, manifest: Manifest) -> Described:
        """A state, as far as its index tells, if it has one: tables are read by `versions`. Raises
        Corrupt, also where it tells of more than files can have: memory is taken by it before a
        byte is read."""
        if manifest.index is None:
            return self.read(manifest)
        size = sum(entry.spec.size for entry in manifest.index.tensors.values())
        if size > manifest.size and all(part.stored is None for part in manifest.parts):
            raise Corrupt(f"reading {self.name}: its tensors are larger than its files")
        return Described(manifest, ())

    def versions(
        self, described: Described, wanted: Mapping[str, Sequence[Box]]
    ) -> Sequence[Version]:
        """The parts with their tables; of a state in outline those that have some of these boxes of
        tensors, which are there. Raises Corrupt."""
        if described.outline is None:
            return described.versions
        parts, numbers = described.manifest.parts, described.outline.parts_of(wanted)
        some = replace(described.manifest, parts=tuple(parts[number] for number in numbers))
        return self.read(some, wanted).versions

    @uncollected
    def read(
        self, manifest: Manifest, wanted: Mapping[str, Sequence[Box]] | None = None
    ) -> Described:
        """A manifest with its tables, of which most are shared. `wanted`: it has some of a state's
        parts, for these. Raises Corrupt."""
        with self._noting(manifest.all_parts):
            for pack in (pack for part in manifest.all_parts for pack in part.packs):
                check_size(self.disk, pack)  # memory is taken by it before a byte is read
            found = Described(manifest, [self._table(part) for part in manifest.all_parts])
            if wanted is None:
                found.check(self.disk.root, self._checked)
            else:
                found.check_boxes(wanted, self.disk.root)
        return found

    def _table(self, part: Part) -> Table:
        digest = part.table.digest
        if digest in self._tables:
            check_table(self._tables[digest], part, part.table.path)
            return self._tables[digest]
        if len(self._tables) >= _TABLES_MAX:
            self._tables.clear()
            self._checked.clear()
        self._tables[digest] = catalog.read_table(self.disk, part)
        return self._tables[digest]

    def has_changed(self) -> bool:
        """Whether it is gone, or rebuilt from something else by now: a replica has made a step
        whole meanwhile, and what was before that may be deleted."""
        if self.held:
            return False
        try:
            now = catalog.read_chain(self.disk, self.name)
        except EverstepError:
            return not catalog.is_there(self.disk, self.name)
        return [each.name for each in now] != [each.name for each in self._manifests]

    def following(self, error: EverstepError) -> list[CheckpointName]:
        """What it is rebuilt from, from the first on that was found to be damaged, or that a replay
        does not prove: nothing that goes on from there need be tried."""
        names = [each.name for each in self._manifests]
        if isinstance(error, OtherBytes):
            steps = [record.step for each in self._manifests for record in each.records]
            first = min([s for s in steps if s <= error.step][-error.count :], default=error.step)
            return [m.name for m in self._manifests if not m.is_whole and m.name.step >= first]
        if not self._manifests or self._manifests[0].previous:  # what is before them is not there
            return names
        damaged = (
            at
            for at, manifest in enumerate(self._manifests)
            if any(id(part) in self._damaged for part in manifest.all_parts)
        )
        return names[next(damaged, len(names)) :]

    @contextlib.contextmanager
    def sources(self, part: Part) -> Iterator[Sequence[Sequence[Source]]]:
        """For each pack of the part its sources, nearest first."""
        with contextlib.ExitStack() as stack, self._noting([part]):
            found: list[list[Source]] = []
            held, step = self.held, part.steps
            steps = names.pack_steps(held.table, part.packs, step) if held else []
            for index, pack in enumerate(part.packs):
                here: list[Source] = []
                due = held if held and steps[index] == step else None
                if due:  # of what is not memory has nothing
                    here.append(due.packs[index])
                if pack.path in self.near:
                    here.append(self.near[pack.path])
                if not due or due.is_committed:
                    here += self.files(pack, stack, direct=not self.is_shared)
                found.append(here)
            yield found

    def files(
        self, pack: FileLink, stack: contextlib.ExitStack, *, direct: bool = False
    ) -> list[Source]:
        """Where that file can be read: the nearest tier that has it, and where its bytes are not
        right there, the others."""
        others = self.disk.tiers[1:] if isinstance(self.disk, Union) else []
        return [_Lazy(tier, pack, stack, direct) for tier in (self.disk, *others)]

    def read_stream(self, stream: Stream) -> Iterator[tuple[str, Iterator[Any]]]:
        """Yield the names and their pieces as `stream()` gave them: tensors, or memoryviews of
        buffers; each verified, in memory of its own, when it is asked for. Raises Corrupt."""
        part = catalog.read_stream(self.disk, stream)
        table = catalog.read_table(self.disk, part)
        (pack,) = part.packs
        with contextlib.ExitStack() as stack:
            sources = self.files(pack, stack)
            for name, rows in rows_by_name(table, self.disk.root / part.table.path):
                yield name, (_read_row(sources, part, row) for row in rows)

    @contextlib.contextmanager
    def _noting(self, parts: Iterable[Part]) -> Iterator[None]:
        """That they are damaged, if that shows within."""
        try:
            yield
        except Corrupt:
            self._damaged.update(map(id, parts))
            raise


class _Lazy:
    """A file that is opened at the first read: one that memory serves is never touched."""

    def __init__(
        self, disk: Readable, link: FileLink, stack: contextlib.ExitStack, direct: bool
    ) -> None:
        self._disk, self._link, self._stack, self._direct = disk, link, stack, direct
        self._reader: Source | None = None
        self._lock = threading.Lock()

    def read_into(self, offset: int, view: memoryview) -> None:
        with self._lock:
            if self._reader is None:
                file = open_pack(self._disk, self._link, direct=self._direct)
                self._reader = self._stack.enter_context(contextlib.closing(file))
        self._reader.read_into(offset, view)


def _read_row(sources: Sequence[Source], part: Part, row: Row) -> Any:
    (piece,) = row.entry.pieces
    tensor = empty(row.entry)
    view: memoryview = bytes_of(tensor).numpy().data
    for index, (start, size) in enumerate(chunks(piece.size)):
        chunk, digest = view[start : start + size], part.digests[piece.digest + index]
        read_chunk(sources, piece.offset + start, chunk, digest, f"{row.name!r} of a stream")
    return tensor if row.kind == TENSOR else view


def is_of(disk: Tier, held: Held) -> bool:
    """Whether the store has the same checkpoint, or none of its name: it may have been put back to
    an older copy, and another run may have gone on from there in an epoch of the same number."""
    try:
        if held.log_digest:
            return catalog.digest_of_manifest(disk, held.manifest.name) == held.log_digest
        return catalog.read_manifest(disk, held.manifest.name) == held.manifest
    except Missing:
        return not held.is_committed
    except EverstepError:  # memory serves where the disk cannot
        return True


def find_held(
    arenas: Sequence[Arena], is_wanted: Callable[[Held], bool] = lambda held: True
) -> dict[CheckpointName, Held]:
    """What arenas hold whole, with a manifest: of several ranks, what is there of all of them."""
    found: dict[CheckpointName, Held] = {}
    for document, save in ended_saves(arenas):
        state = _held(document, save)
        if state and is_wanted(state):
            found[state.manifest.name] = state
    return found


def _held(document: bytes, save: NodeSave) -> Held | None:
    """None where it is not whole, or has no manifest: then the disk serves."""
    where = f"slot {save.jobs[0].slot} of the arena"
    try:
        manifest = decode_manifest(document, where)
        image = save.image()
        (part,) = manifest.all_parts
        check_table(image.parsed.table, part, where)
        if digest_of(image.parsed.document) != part.table.digest:
            return None
    except (EverstepError, ValueError):
        return None
    is_raw = part.stored is not None
    arenas = [job.arena for job in save.jobs]
    packs = [
        MemorySource([segment.view for segment in pack], arenas, is_raw) for pack in image.packs
    ]
    return Held(manifest, image.parsed.table, packs, save.is_committed)


def candidates(
    disk: Tier, reference: int | str | None, held: Mapping[CheckpointName, Held]
) -> Iterator[Candidate]:
    """What to try, best first. One where a step or tag was asked for, which raises Missing where it
    is not there. Of what lies in memory and is not committed the run goes on from what is newer
    than all that is."""
    for name in _listed(disk, reference, held):
        found = Candidate(name, disk, held.get(name))
        yield found
        if found.is_replica:  # the disk has no files of what lies there, but its log
            yield Candidate(name, disk)


def _listed(
    disk: Tier, reference: int | str | None, held: Mapping[CheckpointName, Held]
) -> Iterable[CheckpointName]:
    run = catalog.newest_first(disk)
    newest = next(run, None)
    found = [name for name, state in held.items() if not state.is_committed]
    if found:  # else a bucket is not asked for what nobody wants to know
        epoch, last = catalog.newest_epoch(disk), newest.step if newest else -1
        found = [name for name in found if name.epoch == epoch and name.step > last]
    if reference is not None:
        asked = (name for name in found if name.step == reference)
        return [next(asked, None) or catalog.find(disk, reference)]
    return itertools.chain(sorted(found, reverse=True), [newest] if newest else (), run)
