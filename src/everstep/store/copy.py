"""Copies of checkpoints from one tier to another, byte for byte.

Invariants held here:
* As in commit.py, a checkpoint exists if and only if its manifest does: packs, then tables, then
  what stands beside the manifest, then the manifest, by atomic create. What it goes back to comes
  before it.
* Every byte is compared with its digest on the way. What differs is not published.
* What is there already is not copied again: a copy that was broken off goes on.
"""

import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from everstep.errors import Conflict, Missing, Unavailable
from everstep.format.document import seal
from everstep.format.manifest import CheckpointName, Manifest, Part, check_follows, check_table
from everstep.format.packed import content_digests
from everstep.format.tables import FileLink, Table
from everstep.store import catalog, commit, names, read
from everstep.store.presence import is_empty, shown
from everstep.tiers.tier import Readable, Target, Tier

Progress = Callable[[int, int], None]
"""Called in the caller's thread with (bytes done, bytes in all); what it raises ends the copy."""


@dataclass(slots=True)
class Copied:
    """What a copy came to: the checkpoints that are new in the target, oldest first; bytes that
    were written, those that were there, and those that source and target share."""

    checkpoints: list[CheckpointName] = field(default_factory=list)
    bytes: int = 0
    bytes_there: int = 0
    bytes_shared: int = 0


def check_run(source: Readable, target: Readable) -> None:
    """Raises Conflict where they are of two runs, Missing where one is no store."""
    run, other = catalog.read_run(source), catalog.read_run(target)
    if run != other:
        raise Conflict(
            f"copying {source.root} to {target.root}: that is the store of another run ({other}, "
            f"this one is {run}), and a store holds one run. Copy to another place, or delete what "
            f"is there first"
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """A checkpoint of the source as it lies there. `is_there`: the target has it."""

    name: CheckpointName
    document: bytes
    manifest: Manifest
    state_document: bytes | None
    state: Manifest | None
    streams: tuple[Part, ...]
    is_there: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those to be copied."""
        beside = self.state.all_parts if self.state else ()
        return beside if self.is_there else (*self.manifest.all_parts, *self.streams, *beside)

    @property
    def size(self) -> int:
        """Bytes of packs; those that two parts share count once."""
        return sum({pack.path: pack.size for part in self.parts for pack in part.packs}.values())

    @property
    def behind(self) -> CheckpointName | None:
        """What it goes on from, and needs."""
        previous = self.manifest.behind
        if previous is None or (self.state and self.state.ends_chain):
            return None
        return previous.name


def _is_same(target: Readable, name: CheckpointName, manifest: Manifest) -> bool:
    """Whether the target's checkpoint has the same content: a step that was routed there, whose
    answer got lost, and that the store took then, perhaps encoded in another way."""

    def said(one: Manifest) -> tuple[object, ...]:
        tables = [part.table for part in one.parts]
        return one.run, tables, one.objects, one.hyperparameters, one.ranks

    def contents(one: Manifest) -> list[object]:
        return [content_digests(part, catalog.read_table(target, part)) for part in one.parts]

    there = catalog.read_manifest(target, name)
    if manifest.records or said(there) != said(manifest):
        return False
    return contents(there) == contents(manifest)


class Copier:
    """Copies checkpoints from one tier to another. What one of them has brought or compared is not
    read again for the next. For one thread; any number of them may copy, also the same to the same
    target. Takes about 100 MiB of memory, whatever the sizes."""

    def __init__(
        self,
        source: Readable,
        target: Target,
        nodes: Collection[int] | None = None,
        progress: Progress = lambda done, total: None,
        *,
        are_shared: bool = False,
    ) -> None:
        """`nodes`: packs of these nodes alone go there, with all tables (None: of all).
        `are_shared`: files are, where one medium has both."""
        self.source, self._target, self._nodes = source, target, nodes
        self._progress, self._total, self._done = progress, 0, 0
        self._tables: dict[str | None, tuple[bytes, Table]] = {}  # most steps share one
        self._packs: set[str] = set()
        self._epochs: set[int] = set()
        """That the target is known to have."""
        self._before: set[str] = set()
        """The packs of the last copy."""
        self._are_shared, self._copied = are_shared, Copied()
        self._is_open = are_shared
        """Whether there is a store to copy to, of this run or of one that begins with it."""

    def lead(self) -> None:
        """Let the target have the newest claim of the source, whose writer it is that copies there.
        Raises Conflict where another writer has gone on in the target: it was there first, or has
        the higher number; who writes its own claim before it looks for others' sees any that
        counts. Any thread."""
        source, target = self.source, self._target
        self._open()
        theirs = set(catalog.claimed(target))  # before: a claim of its own may be made meanwhile
        self._epochs &= theirs
        mine = set(catalog.claimed(source))
        own, others = max(mine, default=0), theirs - mine
        if own in theirs or not others:
            if own not in self._epochs:
                self._copy_epochs(own)
                theirs = set(catalog.claimed(target))
            others = {number for number in theirs if number > own} - set(catalog.claimed(source))
        if others:
            raise Conflict(
                f"copying to {target.root}: another writer has started epoch {max(others)} there "
                f"(see epochs/{max(others):04d}.json for who did). What this one saves stays in "
                f"{source.root} alone: stop it, or start it again to go on from the newest"
            )

    def copy(self, name: CheckpointName, tags: Sequence[str] = ()) -> Copied:
        """Copy one checkpoint, and before it all that it goes back to; then let `tags` name it.
        Blocks. Makes the target's store where there is none.

        Raises Missing where the checkpoint is not there, Corrupt where bytes of the source differ
        from their digests, or are not there (any more), Conflict where the target is the store of
        another run, or has another checkpoint of that name; Unavailable, Unsupported.
        """
        if not self._is_open:
            self._open()
        self._copied, self._before, self._packs = Copied(), self._packs, set()
        self._tables.clear()
        steps = self._to_copy(name)
        self._total, self._done = sum(step.size for step in steps), 0
        self._copy_epochs(name.epoch)
        for step in steps:
            self._copy(step)
        for tag in tags:
            commit.set_tag(self._target, tag, name)
        return self._copied

    def _to_copy(self, name: CheckpointName) -> list[_Step]:
        """What the target lacks, oldest first. Where it has a checkpoint, it has what that goes
        back to."""
        steps = [self._read_step(name)]
        while not steps[0].is_there and (behind := steps[0].behind):
            catalog.check_previous(self.source, steps[0].manifest)
            steps.insert(0, self._read_step(behind))
        check_follows(steps[0].manifest, steps[0].name)
        return [step for step in steps if step.name == name or not step.is_there]

    def _read_step(self, name: CheckpointName) -> _Step:
        """Raises Missing, Corrupt; Conflict where the target has another one."""
        source, target, nodes = self.source, self._target, self._nodes or ()
        document, manifest = catalog.read_manifest_document(source, name)
        there = _find(target, names.manifest_path(name))
        if there not in (None, document) and not _is_same(target, name, manifest):
            raise Conflict(
                f"copying {name} of {source.root} to {target.root}: another checkpoint of that "
                f"name is there, as two writers have gone on from one step. Delete the one that is "
                f"not wanted (everstep rm {target.root} {name}), or copy to another place"
            )
        state = catalog.read_state(source, name) if manifest.records else None
        state_document = source.read(names.state_path(name)) if state else None
        streams = tuple(catalog.read_stream(source, each) for each in manifest.streams.values())
        own = (pack for part in manifest.all_parts if part.rank in nodes for pack in part.packs)
        is_there = there is not None and all(target.size(pack.path) == pack.size for pack in own)
        return _Step(name, document, manifest, state_document, state, streams, is_there)

    def _open(self) -> None:
        """Make the target's store, where there is none, of the same run. Raises as check_run."""
        try:
            check_run(self.source, self._target)
        except Missing:
            self._target.create(names.STORE, self.source.read(names.STORE))
            check_run(self.source, self._target)
        self._target.sync("")  # whoever made it may have died before that
        self._is_open = True

    def _copy_epochs(self, newest: int) -> None:
        """The claims by which the target knows the lineage of that epoch. One that is damaged or
        gone in the source stays so: the manifests tell of it."""
        if newest in self._epochs:
            return
        number: int | None = newest
        source, epochs = self.source, catalog.read_epochs(self.source)
        while number is not None and number in epochs:
            path, is_whole = names.epoch_path(number), epochs[number].created
            if is_whole and _find(self._target, path) != (document := source.read(path)):
                said = f". That of {source.root} is another: both have gone on from one run"
                _create(self._target, path, document, f"{said}. Copy elsewhere")
            number = epochs[number].parent
        self._epochs.add(newest)

    def _copy(self, step: _Step) -> None:
        """All that it goes back to is there."""
        shared: list[FileLink] = []
        for part in filter(self._is_to_go, step.parts):
            shared += self.bring_packs(part)
        self._target.sync_entries([link.path for link in shared])
        self._publish(step)

    def bring_packs(self, part: Part) -> list[FileLink]:
        """Have the packs of one part, durably; but for those that are shared, which are told, and
        durable after `sync_entries`. Raises as `copy`."""
        shared = []
        for index, pack in enumerate(part.packs):
            if pack.path not in self._packs:
                if self._are_shared and self._share(pack):
                    shared.append(pack)
                else:
                    self._copy_pack(part, index)
                self._packs.add(pack.path)
        return shared

    def _share(self, link: FileLink) -> bool:
        read.check_size(self.source, link)
        if not self._target.share(self.source, link.path):
            return False
        self._copied.bytes_shared += link.size
        self._advance(link.size)
        return True

    def _is_to_go(self, part: Part) -> bool:
        return self._nodes is None or part.rank in self._nodes

    def _copy_pack(self, part: Part, index: int) -> None:
        link = part.packs[index]
        check = read.PackCheck(part, index, self._table(part)[1])
        if self._is_there(link, check):
            self._copied.bytes_there += link.size
            return
        with read.opened(self.source, link) as reader:
            self._target.stream(link.path, self._counted(check.checked(reader)), link.size)
        self._copied.bytes += link.size

    def _is_there(self, link: FileLink, check: read.PackCheck) -> bool:
        """Whether the target has it, whole and durable: a file that a writer left may be of that
        size, and not be filled."""
        if self._target.size(link.path) != link.size:
            return False
        if link.path not in self._before:
            if self._target.is_directory and not check.is_passed_by(self._target):
                return False
            self._target.settle(link.path)
        self._advance(link.size)
        return True

    def _counted(self, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        for block in blocks:
            yield block
            self._advance(len(block))

    def _advance(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self._total)

    def _table(self, part: Part) -> tuple[bytes, Table]:
        digest = part.table.digest
        if digest not in self._tables:
            self._tables[digest] = catalog.read_table_document(self.source, part)
        document, table = self._tables[digest]
        check_table(table, part, self.source.root / part.table.path)
        return document, table

    def _publish(self, step: _Step) -> None:
        """Under the store's lock, so that no gc takes away what was there, or was written for an
        epoch that is not the newest, before the manifest needs it."""
        target = self._target
        with target.locked(exclusive=False):
            for document in {self._table(part)[0] for part in step.parts}:
                commit.write_table(target, document)
            for stream in step.manifest.streams.values():
                commit.write_table(target, self.source.read(stream.part.path))
            going = filter(self._is_to_go, step.parts)
            for link in {pack.path: pack for part in going for pack in part.packs}.values():
                if target.size(link.path) != link.size:
                    raise Unavailable(
                        f"copying {step.name} to {target.root}: {link.path} was deleted meanwhile, "
                        f"by an everstep gc. Copy it again"
                    )
            self._publish_state(step)
            if not step.is_there:
                _create(target, names.manifest_path(step.name), step.document)
                self._copied.checkpoints.append(step.name)

    def _publish_state(self, step: _Step) -> None:
        """Before the manifest, which may need it in place of what it goes on from; one that was
        left without a manifest is of no use."""
        path = names.state_path(step.name)
        there = _find(self._target, path)
        if there is not None and not step.is_there and there != step.state_document:
            self._target.delete(path)
            there = None
        if step.state_document is not None and there is None:
            _create(self._target, path, step.state_document)


def _create(tier: Target, path: str, document: bytes, advice: str = "") -> None:
    """Publish a document. Raises Conflict where another one is there."""
    if not tier.create(path, document) and _find(tier, path) != document:
        raise Conflict(f"copying to {tier.root}: another writer has created {path}{advice}")


def _find(tier: Readable, path: str) -> bytes | None:
    """A document, durably; None where there is none."""
    try:
        document = tier.read(path)
    except Missing:
        return None
    tier.sync(path.rpartition("/")[0])
    return document


def fork(
    source: Tier, target: Tier, name: CheckpointName, progress: Progress = lambda done, total: None
) -> Copied:
    """Begin a run of its own in `target`, a new place, at a checkpoint of `source`; blocks.
    Manifests and epochs are the same, files are shared where one medium has both, and everstep.json
    tells where it began. Neither store needs the other: a file goes when its last name does. What
    was broken off goes on when it is asked for again. Raises Conflict where something else is
    there; Missing, Corrupt, Unavailable."""
    origin = {"store": str(source.root), "run": catalog.read_run(source), **name._asdict()}
    catalog.read_manifest(source, name)  # it is there, before anything is made
    if target.size(names.STORE) is None and is_empty(target):
        new = {"run": uuid.uuid4().hex, "created": commit.now()}
        target.create(names.STORE, seal({**new, "from": origin}))
    found = catalog.read_origin(target) if target.size(names.STORE) is not None else None
    if found is None or {**found, "store": ""} != {**origin, "store": ""}:
        raise Conflict(
            f"forking {name} of {source.root} to {target.root}: something else is there. Name "
            f"another place"
        )
    with shown(target):
        return Copier(source, target, progress=progress, are_shared=True).copy(name)
