"""From a sealed slot to a committed checkpoint: digest, write, ask the trainer, commit, retain."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from everstep.errors import Conflict, Corrupt, EverstepError, Missing, Unavailable, Unsupported
from everstep.format.document import digest_of, unseal
from everstep.format.manifest import Manifest, Part, Previous, Record, encode_manifest
from everstep.format.tables import FileLink
from everstep.keeper.arena import SUBMITTED, Arena, Row, SlotState
from everstep.keeper.arrival import ALL
from everstep.keeper.data import Data
from everstep.keeper.job import Job, Outcome, Writer
from everstep.keeper.window import Share
from everstep.store import catalog, commit, names, retain
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk

log = logging.getLogger(__name__)

UNCLAIMED = "unclaimed"
"""Stands in what is said of the capture where no epoch could be claimed (never on a disk): the
manifest has the number that would have been next."""


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
    manifest, record, share = _describe(writer, arena, slot, row)
    name = CheckpointName(manifest.step, manifest.epoch)
    pieces, share = _begin_window(writer, name, share, record)
    data = Data(writer, job, row, is_record=record is not None)
    failure: EverstepError | None = None
    try:
        existing, failure = _write(writer, name, share, data)
        part = data.part(manifest.step)
        if part is None:
            job.arrival.wait(ALL)  # the trainer still fills the slot
        elif share is None:
            manifest = _with_part(manifest, record, part)
            arena.put_manifest(slot, row, encode_manifest(manifest))
        _ask(job, announce_written)  # also before a failure: memory must not offer a torn copy
        if failure:
            raise failure
        if share and part and not existing:
            manifest = writer.window.add(share, part, bytes(data.document), manifest)
            if not share.ends:
                return Outcome(data.size, time.monotonic() - began, is_part=True)
        if existing:
            _settle(writer.disk, manifest, record, share, data, job)
        else:
            tables = writer.window.documents if share else [data.document]
            commit.publish(writer.disk, manifest, encode_manifest(manifest), tables)
            if share:  # from now on its files are the checkpoint's
                writer.window.clear()
    except BaseException:
        commit.discard_packs(writer.disk, name, data.links + writer.window.end(share))
        raise
    finally:
        failure = None  # its traceback holds this frame, and so the arena's memory
    warning = _set_tag(writer, manifest)
    warning = _extend_base(writer, None if existing else pieces, manifest, data) or warning
    digest = None if existing else digest_of(encode_manifest(manifest))
    writer.parent, writer.parent_digest = name, digest
    takes_replay = record is not None or bool(manifest.records)
    return Outcome(data.size, time.monotonic() - began, warning, takes_replay=takes_replay)


def _extend_base(writer: Writer, share: Share | None, manifest: Manifest, data: Data) -> str | None:
    """A record with pieces of the next base (`share`): with the last of them the base is put beside
    the record. Returns what went wrong."""
    if share is None:
        writer.window.clear()
        return None
    (record,) = manifest.records
    first = len(share.steps) == 1  # its pieces are of after this record
    added = replace(share, calls=None if first else record.calls)
    try:
        writer.window.check(added)
        base = writer.window.add(added, record.part, bytes(data.document), manifest)
        if share.ends:
            commit.publish_base(writer.disk, replace(base, previous=None, tag=None))
            writer.window.clear()
    except EverstepError as error:
        return f"step {manifest.step} is saved, but no base beside it: {error}"
    return None


def _write(
    writer: Writer, name: CheckpointName, share: Share | None, data: Data
) -> tuple[bool, EverstepError | None]:
    """Whether it was committed before, else write the data; and what went wrong: with its manifest
    beside it, memory can be restored from all the same."""
    existing = False
    try:
        if writer.epoch is None:
            raise Unavailable(writer.unclaimed)
        existing = _is_there(writer, name, share)
        commit.check_epoch(writer.disk, name.epoch, name.step)
        if not existing:
            data.write(name)
    except EverstepError as error:
        return existing, error
    return existing, None


def _begin_window(
    writer: Writer, name: CheckpointName, share: Share | None, record: dict[str, Any] | None
) -> tuple[Share | None, Share | None]:
    """What a record, or what a spread checkpoint, has of a window. Of a window that another one
    follows, nothing was published: its files are deleted."""
    for stale in writer.window.begin(share, name.epoch, is_log=record is not None):
        commit.discard_packs(writer.disk, name, stale.packs)
    return (None, share) if record is None else (share, None)


def end_window(writer: Writer) -> None:
    """Nothing more comes from this trainer: what it wrote of a checkpoint that it has not ended is
    deleted."""
    for stale in writer.window.begin(None, None, is_log=False):
        at = CheckpointName(stale.steps, writer.epoch or 0)
        commit.discard_packs(writer.disk, at, stale.packs)


def _is_there(writer: Writer, name: CheckpointName, share: Share | None) -> bool:
    """Whether it was committed before. Raises Unavailable where it cannot be, as something that it
    needs is lost."""
    found = writer.disk.size(names.manifest_path(name)) is not None
    if share and not (found and share.ends):
        writer.window.check(share)
        return False
    return found


def _settle(
    disk: Disk,
    manifest: Manifest,
    record: dict[str, Any] | None,
    share: Share | None,
    data: Data,
    job: Job,
) -> None:
    """It was committed before: its keeper died then. Raises Conflict where that is another."""
    if share:
        _check_same_window(disk, manifest, share, commit.table_link(data.document))
    elif record is not None:
        _check_same_record(disk, manifest, record, commit.table_link(data.document))
    elif row := job.arena.row(job.slot):
        job.arena.put_manifest(job.slot, row, _existing(disk, manifest))


def _set_tag(writer: Writer, manifest: Manifest) -> str | None:
    """Also where the step was there: who committed it may have died before this. What failed."""
    if not manifest.tag:
        return None
    try:
        commit.set_tag(writer.disk, manifest.tag, CheckpointName(manifest.step, manifest.epoch))
    except EverstepError as error:
        return f"step {manifest.step} is saved, but not tagged {manifest.tag!r}: {error}"
    return None


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


def _check_same_record(
    disk: Disk, manifest: Manifest, record: dict[str, Any], table: FileLink
) -> None:
    """Whether the step is on the disk as just this record: its keeper died after the commit. Not by
    digests: another keeper may have packed it in another way. Raises Conflict where it differs."""
    name = CheckpointName(manifest.step, manifest.epoch)
    found = catalog.read_manifest(disk, name)
    is_same = (
        [(list(row.calls), row.derived, row.part.table) for row in found.records]
        == [(record["calls"], record.get("derived", {}), table)]
        and found.previous == manifest.previous
        and (found.objects, found.hyperparameters) == (manifest.objects, manifest.hyperparameters)
    )
    if not is_same or not disk.holds(names.manifest_path(name)):
        raise _is_other(disk, manifest.step)


def _check_same_window(disk: Disk, manifest: Manifest, share: Share, table: FileLink) -> None:
    """Whether the step is on the disk as the end of just this window: see _check_same_record."""
    name = CheckpointName(manifest.step, manifest.epoch)
    found = catalog.read_manifest(disk, name)
    is_same = (
        tuple(part.steps for part in found.parts) == share.steps
        and found.parts[-1].table == table
        and (found.objects, found.hyperparameters) == (manifest.objects, manifest.hyperparameters)
    )
    if not is_same or not disk.holds(names.manifest_path(name)):
        raise _is_other(disk, manifest.step)


def _is_other(disk: Disk, step: int) -> Conflict:
    return Conflict(
        f"saving step {step} to {disk.root}: this step is saved already with other content. A step "
        f"is written once: save under the next step, or restore() before you begin again; for "
        f"metrics, call save(step, metrics=...) in place of step(step)"
    )


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
) -> tuple[Manifest, dict[str, Any] | None, Share | None]:
    """The manifest as far as it is known before the data is written; what is said of the record,
    where it is one and no state; and what it adds to a window, where it is a part of one."""
    said = unseal(arena.descriptor(slot, row), "a descriptor in the arena")
    parent: dict[str, Any] | None = writer.parent and writer.parent._asdict()
    capture = said["capture"]
    if writer.epoch is None:
        capture = {**capture, UNCLAIMED: True}
    writer.run = writer.run or commit.open_store(writer.disk)
    record = said.get("record")
    manifest = Manifest(
        step=row.step,
        epoch=writer.epoch or catalog.newest_epoch(writer.disk) + 1,
        run=writer.run,
        created=commit.now(),
        parts=(),
        objects=said["objects"],
        hyperparameters=said["hyperparameters"],
        parent=parent,
        topology=said["topology"],
        capture=capture,
        metrics=said["metrics"],
        tag=said["tag"],
        previous=_previous(writer, record["previous"]) if record else None,
    )
    return manifest, record, Share.of(said.get("share"))


def _previous(writer: Writer, step: int) -> Previous:
    """What a record goes on from: a checkpoint of this epoch. Raises Unavailable where it was never
    committed: then the chain has ended, and the trainer begins another with a whole state."""
    if writer.epoch is None:
        raise Unavailable(writer.unclaimed)
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


def _with_part(manifest: Manifest, said: dict[str, Any] | None, part: Part) -> Manifest:
    if said is None:
        return replace(manifest, parts=(part,))
    record = Record(manifest.step, tuple(said["calls"]), part, said.get("derived", {}))
    return replace(manifest, records=(record,))


def submitted(arena: Arena) -> list[tuple[int, int, SlotState]]:
    """(sequence, slot, state) of the slots that wait for the keeper, in their order."""
    states = [arena.state(slot) for slot in range(arena.slot_count)]
    return sorted(
        (row.sequence, slot, state)
        for slot, state in enumerate(states)
        if state in SUBMITTED and (row := arena.row(slot))
    )
