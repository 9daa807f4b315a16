"""From a sealed slot to a committed checkpoint: digest, write, ask the trainer, commit, retain."""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import xxhash

from everstep.errors import Conflict, Corrupt, EverstepError, Missing, Unavailable, Unsupported
from everstep.format.document import digest_of, unseal
from everstep.format.manifest import (
    Extent,
    FileLink,
    Manifest,
    Part,
    Previous,
    Record,
    Table,
    decode_table,
    encode_manifest,
    extents,
)
from everstep.format.packs import pack_starts
from everstep.keeper.arena import SUBMITTED, Arena, Row, SlotState
from everstep.keeper.arrival import Arrival
from everstep.store import catalog, commit, names, retain
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk

log = logging.getLogger(__name__)

_HASHERS = min(4, len(os.sched_getaffinity(0)))
_SHARE_BYTES = 16 << 20


@dataclass(slots=True)
class Job:
    """One slot on its way. The trainer's `answer` comes last; its death is one too."""

    arena: Arena
    slot: int
    sequence: int
    arrival: Arrival = field(default_factory=Arrival)
    written: bool = False
    answered: threading.Event = field(default_factory=threading.Event)
    problem: str | None = None

    def answer(self, problem: str | None) -> None:
        """What the trainer says of the copy, from any thread: None, or how it was torn."""
        self.problem = problem
        self.answered.set()


@dataclass(slots=True)
class Writer:
    """Who writes: one attachment of a trainer. `parent` is the newest checkpoint of its line."""

    disk: Disk
    keep: retain.Keep | None
    epoch: int | None = None
    parent: CheckpointName | None = None
    parent_digest: str | None = None
    run: str | None = None
    cache: retain.NeedsCache = field(default_factory=dict)
    hasher: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_HASHERS, "everstep-digest")
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a commit cost: bytes written, seconds until durable. `warning`: what failed after it."""

    bytes: int
    seconds: float
    warning: str | None = None


def persist(writer: Writer, job: Job, announce_written: Callable[[], None]) -> Outcome:
    """Make a sealed slot durable; blocks until it is committed. Raises EverstepError.

    The image is digested and written at the same time, and while it still arrives. Only then is
    the trainer asked whether the copy was clean: a torn one is never committed.
    """
    began = time.monotonic()
    arena, slot = job.arena, job.slot
    row = arena.row(slot)
    if row is None:
        raise Corrupt(f"reading slot {slot} of the arena: its row is not whole")
    manifest, packs, calls = _describe(writer, arena, slot, row)
    name = CheckpointName(manifest.step, manifest.epoch)
    digests = _begin_digests(writer, job, row)
    existing = False
    links: tuple[FileLink, ...] = ()
    failure: EverstepError | None = None
    try:
        try:
            existing = writer.disk.size(names.manifest_path(name)) is not None
            commit.check_epoch(writer.disk, manifest.epoch, manifest.step)
            if not existing:
                links = commit.write_packs(writer.disk, name, packs, job.arrival.wait)
        except EverstepError as error:
            failure = error  # with its manifest beside it, memory can still be restored from
        table = arena.table(slot, row)
        manifest = _with_data(manifest, calls, table, links or _unwritten(packs), digests)
        document = encode_manifest(manifest)
        arena.put_manifest(slot, row, document)
        _ask(job, announce_written)  # also before a failure: memory must not offer a torn copy
        if failure:
            raise failure
        if existing:
            arena.put_manifest(slot, row, _existing(writer.disk, manifest))
        else:
            commit.publish(writer.disk, manifest, document, [table])
    except BaseException:
        commit.discard_packs(writer.disk, name, links)
        raise
    finally:
        failure = None  # its traceback holds this frame, and so the arena's memory
    writer.parent, writer.parent_digest = name, None if existing else digest_of(document)
    warning: str | None = None
    if manifest.tag:  # also where the step was there: who committed it may have died before this
        try:
            commit.set_tag(writer.disk, manifest.tag, name)
        except EverstepError as error:
            warning = f"step {name.step} is saved, but not tagged {manifest.tag!r}: {error}"
    size = 0 if existing else sum(map(len, packs))
    return Outcome(size, time.monotonic() - began, warning)


def _ask(job: Job, announce_written: Callable[[], None]) -> None:
    """Wait for the trainer's word on the copy, or its death. Raises Unsupported for a torn one."""
    job.written = True
    announce_written()
    job.answered.wait()
    if job.problem:
        raise Unsupported(job.problem)


def _existing(disk: Disk, manifest: Manifest) -> bytes:
    """The manifest of this step as it is on the disk already. Raises Conflict where it differs."""
    name = CheckpointName(manifest.step, manifest.epoch)
    if not commit.find_same(disk, manifest):
        raise Conflict(f"saving step {manifest.step}: {name} was deleted at the same time")
    return disk.read(names.manifest_path(name))


def apply_retention(writer: Writer) -> None:
    """Delete what `keep` does not cover. A failure is logged: it costs space, not a checkpoint."""
    if writer.keep is None:
        return
    try:
        retain.apply(writer.disk, writer.keep, writer.cache)
    except Exception:  # the next commit tries again
        log.exception("retention in %s", writer.disk.root)


def _describe(
    writer: Writer, arena: Arena, slot: int, row: Row
) -> tuple[Manifest, list[memoryview], list[Any] | None]:
    """The manifest as far as it is known before the data is written, the packs in the image, and
    the optimizer calls where it is a record and no state."""
    said = unseal(arena.descriptor(slot, row), "a descriptor in the arena")
    assert writer.epoch is not None, "a trainer claims its epoch before it seals"
    table, _ = _parsed_table(bytes(arena.table(slot, row)))
    image, packs, at = arena.image(slot), [], 0
    for pack in table.packs:
        packs.append(image[at : at + pack.size])
        at += pack.size
    if at != row.image_size:
        raise Corrupt(
            f"reading slot {slot} of the arena: {row.image_size} bytes, its table needs {at}"
        )
    parent: dict[str, Any] | None = writer.parent and writer.parent._asdict()
    writer.run = writer.run or commit.open_store(writer.disk)
    record = said.get("record")
    manifest = Manifest(
        step=row.step,
        epoch=writer.epoch,
        run=writer.run,
        created=commit.now(),
        parts=(),
        objects=said["objects"],
        hyperparameters=said["hyperparameters"],
        parent=parent,
        topology=said["topology"],
        capture=said["capture"],
        metrics=said["metrics"],
        tag=said["tag"],
        previous=_previous(writer, record["previous"]) if record else None,
    )
    return manifest, packs, record["calls"] if record else None


def _previous(writer: Writer, step: int) -> Previous:
    """What a record goes on from: a checkpoint of this epoch. Raises Unavailable where it was never
    committed: then the chain has ended, and the trainer begins another with a whole state."""
    assert writer.epoch is not None
    name = CheckpointName(step, writer.epoch)
    if writer.parent != name or writer.parent_digest is None:
        try:
            digest = catalog.digest_of_manifest(writer.disk, name)
        except Missing as error:
            raise Unavailable(
                f"saving a record: {name}, which it follows, was not saved"
            ) from error
        return Previous(step, writer.epoch, digest)
    return Previous(step, writer.epoch, writer.parent_digest)


def _with_data(
    manifest: Manifest,
    calls: list[Any] | None,
    table: memoryview,
    links: tuple[FileLink, ...],
    digests: list[Future[dict[int, str]]],
) -> Manifest:
    found = {index: digest for share in digests for index, digest in share.result().items()}
    ordered = tuple(found[index] for index in range(len(found)))
    part = Part(0, commit.table_link(table), links, ordered, manifest.step)
    if calls is None:
        return replace(manifest, parts=(part,))
    return replace(manifest, records=(Record(manifest.step, tuple(calls), part),))


def _unwritten(packs: list[memoryview]) -> tuple[FileLink, ...]:
    return tuple(FileLink(f"{names.DATA}/unwritten", len(pack)) for pack in packs)


def _begin_digests(writer: Writer, job: Job, row: Row) -> list[Future[dict[int, str]]]:
    """Hash all extents in several threads, in the order in which they arrive.

    Training that uses all cores waits for its slowest thread: what is taken evenly from all of
    them costs less than what is taken from one.
    """
    table, found = _parsed_table(bytes(job.arena.table(job.slot, row)))
    starts = pack_starts(pack.size for pack in table.packs)
    shares: dict[int, list[tuple[int, int, int]]] = {}
    for extent in found:
        start = starts[extent.pack] + extent.offset
        shares.setdefault(start // _SHARE_BYTES, []).append((extent.digest, start, extent.size))
    image = job.arena.image(job.slot)
    return [
        writer.hasher.submit(_digest, image, share, job.arrival)
        for _, share in sorted(shares.items())
    ]


def _digest(
    image: memoryview, share: list[tuple[int, int, int]], arrival: Arrival
) -> dict[int, str]:
    """The digests of some extents (index, start, size), by index. Large ones without the GIL."""
    arrival.wait(max(start + size for _, start, size in share))
    return {
        index: xxhash.xxh3_128_hexdigest(image[start : start + size])
        for index, start, size in share
    }


@lru_cache(maxsize=4)
def _parsed_table(document: bytes) -> tuple[Table, list[Extent]]:
    """Tables change rarely, and parsing one of 10,000 tensors outlasts the rest of a commit."""
    table = decode_table(document, "a piece table in the arena")
    return table, extents(table)


def submitted(arena: Arena) -> list[tuple[int, int, SlotState]]:
    """(sequence, slot, state) of the slots that wait for the keeper, in their order."""
    states = [arena.state(slot) for slot in range(arena.slot_count)]
    return sorted(
        (row.sequence, slot, state)
        for slot, state in enumerate(states)
        if state in SUBMITTED and (row := arena.row(slot))
    )
