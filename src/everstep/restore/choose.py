"""Which checkpoint to restore: the newest that verifies, or the one that was asked for;
and from where."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.errors import EverstepError, Missing
from everstep.format.document import digest_of
from everstep.format.global_tensors import check_whole, tables_of_records
from everstep.format.manifest import Manifest, Part, Record, check_table, decode_manifest
from everstep.format.tables import FileLink, Table
from everstep.keeper.arena import Arena
from everstep.keeper.persist import UNCLAIMED
from everstep.keeper.recoverable import EndedJoint, ended_joints
from everstep.restore.load import ImageSource, MemorySource, Source
from everstep.sharding.topology import ALONE, differences, layout_differences
from everstep.store import catalog
from everstep.store.names import CheckpointName
from everstep.store.read import check_size, open_pack
from everstep.tiers.disk import Disk

log = logging.getLogger("everstep")


@dataclass(frozen=True, slots=True)
class Held:
    """A checkpoint that a keeper still holds in memory, committed or not."""

    manifest: Manifest
    table: Table
    packs: Sequence[Source]
    is_committed: bool

    @property
    def is_unclaimed(self) -> bool:
        """Whether its writer could not claim an epoch: it goes on from its parent, and nothing can
        go on from it."""
        return bool(self.manifest.capture.get(UNCLAIMED))

    @property
    def parent(self) -> CheckpointName | None:
        """What it goes on from; None for a start from nothing."""
        parent = self.manifest.parent
        return CheckpointName(parent["step"], parent["epoch"]) if parent else None

    @property
    def name(self) -> CheckpointName:
        """Step and epoch."""
        return CheckpointName(self.manifest.step, self.manifest.epoch)


@dataclass(frozen=True, slots=True)
class Described:
    """A manifest, and the table of each of its parts."""

    manifest: Manifest
    tables: list[Table]

    def differences(self, layout: str) -> list[str]:
        """What is other here than where it was recorded, of what a replay may depend on. `layout`:
        of the ranks that replay."""
        then = self.manifest.topology
        calls = (call for record in self.manifest.records for call in record.calls)
        return differences(then) + layout_differences(then, layout, calls)

    @property
    def records(self) -> list[tuple[Record, tuple[Table, ...]]]:
        """Each with the tables of its parts."""
        return tables_of_records(self.manifest, self.tables)


def moved(base: Described, kinds: Mapping[str, str] | None = None) -> list[str]:
    """That it is replayed on another kind of device than the run's, which comes to other last bits.
    `kinds`: of the parameters that are here, by name; None: all are, on the CPU."""
    found = set()
    for table in base.tables:
        for optimizer in table.optimizers.values():
            for name in optimizer["groups"].keys() & table.tensors.keys():
                then, _, _ = table.tensors[name].device.partition(":")
                now = "cpu" if kinds is None else kinds.get(name, then)
                found |= {f"parameters on {then}, here on {now}"} if then != now else set()
    return sorted(found)


def has_to_be_equal(
    base: Described, logs: Sequence[Described], layout: str, *, is_moved: bool
) -> bool:
    """Whether a replay on this machine, by ranks of this layout, comes to the run's own bytes on
    each of them; or else something is wrong. `is_moved`: on another kind of device."""
    is_same = all(each.manifest.topology.get("layout", ALONE) == layout for each in logs)
    is_same &= base.manifest.exact and not is_moved
    return is_same and not any(each.differences(layout) for each in logs)


@dataclass(slots=True)
class Candidate:
    """A checkpoint that may be restored, and the sources for its packs."""

    name: CheckpointName
    disk: Disk
    held: Held | None = None
    damaged: frozenset[CheckpointName] = frozenset()
    """Log steps whose state that was made of them is not to be used."""
    chain: tuple[CheckpointName, ...] = ()
    """What it was rebuilt from when that was looked at last."""
    is_shared: bool = False
    """Whether other ranks of this node read the same: then the page cache does it once for all."""

    @property
    def origin(self) -> CheckpointName | None:
        """What the next epoch goes on from, when this was restored."""
        return self.held.parent if self.held and self.held.is_unclaimed else self.name

    def describe(self) -> list[Described]:
        """What it is rebuilt from: a state (from memory where it is held), then the logs that go
        on from it, itself last. Raises Missing, Corrupt."""
        if self.held:
            check_whole(self.held.manifest, [self.held.table], "memory")
            return [Described(self.held.manifest, [self.held.table])]
        known: dict[str | None, Table] = {}  # most steps share one
        checked: set[tuple[int, ...]] = set()

        def table(part: Part) -> Table:
            digest = part.table.digest
            if digest in known:
                check_table(known[digest], part, part.table.path)
            else:
                known[digest] = catalog.read_table(self.disk, part)
            return known[digest]

        def described(manifest: Manifest) -> Described:
            for pack in (pack for part in manifest.all_parts for pack in part.packs):
                check_size(self.disk, pack)  # memory is taken by it before a byte is read
            tables = [table(part) for part in manifest.all_parts]
            check_whole(manifest, tables, self.disk.root, checked)
            return Described(manifest, tables)

        chain = catalog.read_chain(self.disk, self.name, self.damaged)
        self.chain = _names_of(chain)
        return [described(manifest) for manifest in chain]

    def has_changed(self) -> bool:
        """Whether it is rebuilt from something else by now: host catch-up has made a step whole
        meanwhile, and what was before that may be deleted."""
        if self.held or not self.chain:
            return False
        with contextlib.suppress(EverstepError):
            now = catalog.read_chain(self.disk, self.name, self.damaged)
            return self.chain != _names_of(now)
        return False

    def by_its_log(self) -> "Candidate | None":
        """The same without the state that it goes on from, where that was made of a log step (or
        ended there, as a log's base): the log may be whole. None where it goes on from no such
        one, or from nothing that is there."""
        if self.held:
            return None
        with contextlib.suppress(EverstepError):
            *_, base = catalog.followed(self.disk, self.name, self.damaged)
            name = CheckpointName(base.step, base.epoch)
            other = replace(self, damaged=self.damaged | {name})
            if catalog.read_manifest(self.disk, name).previous and name not in self.damaged:
                catalog.read_chain(self.disk, self.name, other.damaged)
                return other
        return None

    @contextlib.contextmanager
    def sources(self, part: Part) -> Iterator[Sequence[Sequence[Source]]]:
        """For each pack of the part its sources, nearest first."""
        with contextlib.ExitStack() as stack:
            found: list[list[Source]] = []
            for index, pack in enumerate(part.packs):
                here: list[Source] = []
                if self.held:
                    here.append(self.held.packs[index])
                if not self.held or self.held.is_committed:
                    here.append(_Lazy(self.disk, pack, stack, direct=not self.is_shared))
                found.append(here)
            yield found


class _Lazy:
    """A file that is opened at the first read: one that memory serves is never touched."""

    def __init__(
        self, disk: Disk, link: FileLink, stack: contextlib.ExitStack, direct: bool
    ) -> None:
        self._disk, self._link, self._stack, self._direct = disk, link, stack, direct
        self._reader: Source | None = None
        self._lock = threading.Lock()

    def read_into(self, offset: int, view: memoryview) -> None:
        """See Source."""
        with self._lock:
            if self._reader is None:
                file = open_pack(self._disk, self._link, direct=self._direct)
                self._reader = self._stack.enter_context(contextlib.closing(file))
        self._reader.read_into(offset, view)


def _names_of(chain: Iterable[Manifest]) -> tuple[CheckpointName, ...]:
    return tuple(CheckpointName(manifest.step, manifest.epoch) for manifest in chain)


def is_of(disk: Disk, held: Held) -> bool:
    """Whether the store has the same checkpoint, or none of its name: it may have been put back to
    an older copy, and another run may have gone on from there in an epoch of the same number."""
    try:
        return catalog.read_manifest(disk, held.name) == held.manifest
    except Missing:
        return not held.is_committed
    except EverstepError:  # memory serves where the disk cannot
        return True


def find_held(
    arenas: Sequence[Arena], is_wanted: Callable[[Held], bool] = lambda held: True
) -> dict[CheckpointName, Held]:
    """What the arenas of dead trainers hold whole, with a manifest: of several ranks, what is there
    of all of them."""
    found: dict[CheckpointName, Held] = {}
    for state in map(_held, ended_joints(arenas)):
        if state and is_wanted(state):
            found[state.name] = state
    return found


def _held(joint: EndedJoint) -> Held | None:
    """None where it is not whole, or has no manifest: then the disk serves."""
    where = f"slot {joint.jobs[0].slot} of the arena"
    try:
        manifest = decode_manifest(joint.document, where)
        image = joint.image()
        part = manifest.parts[0]
        check_table(image.parsed.table, part, where)
        if digest_of(image.parsed.document) != part.table.digest:
            return None
    except (EverstepError, IndexError):
        return None
    if len(joint.jobs) > 1:
        packs: list[Source] = [ImageSource(image, pack) for pack in range(len(image.packs))]
    else:
        packs = [MemorySource(segment.view) for (segment,) in image.packs]
    return Held(manifest, image.parsed.table, packs, joint.is_committed)


def candidates(
    disk: Disk, reference: int | str | None, held: dict[CheckpointName, Held]
) -> list[Candidate]:
    """What to try, best first. One where a step or tag was asked for;
    raises Missing where it is not there."""
    newest = catalog.newest_epoch(disk)
    run = catalog.lineage(disk)
    last = run[-1] if run else None
    held = {
        name: state
        for name, state in held.items()
        if not state.is_unclaimed or (name.epoch == newest + 1 and state.parent == last)
    }
    uncommitted = [
        name
        for name, state in held.items()
        if not state.is_committed
        and (name.epoch == newest or state.is_unclaimed)
        and (last is None or name.step > last.step)
    ]
    if reference is None:
        order = sorted(run + uncommitted, reverse=True)
        return [Candidate(name, disk, held.get(name)) for name in order]
    for name in uncommitted:
        if reference == name.step:
            return [Candidate(name, disk, held[name])]
    name = catalog.find(disk, reference)
    return [Candidate(name, disk, held.get(name))]
