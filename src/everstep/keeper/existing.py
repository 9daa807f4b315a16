"""A step that is on the disk already: its keeper died after the commit. Is it just this one?"""

from typing import Any

import xxhash

from everstep.errors import Conflict, EverstepError
from everstep.format.manifest import Manifest
from everstep.format.tables import FileLink
from everstep.keeper.data import Data, whole
from everstep.keeper.job import Job
from everstep.keeper.ranks.node_save import Joint
from everstep.keeper.writer import Outcome, Share, Writer
from everstep.store import catalog, commit, names
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk


def settle(
    disk: Disk,
    manifest: Manifest,
    record: dict[str, Any] | None,
    share: Share | None,
    data: Data,
    job: Joint,
) -> None:
    """It was committed before: its keeper died then. Raises Conflict where that is another."""
    if share:
        _check_same_window(disk, manifest, share, commit.table_link(data.document))
    elif record is not None:
        _check_same_record(disk, manifest, record, commit.table_link(data.document))
    else:
        job.put_manifest(_existing(disk, manifest))


def was_committed(writer: Writer, job: Job) -> Outcome | None:
    """Whether a step of several ranks is on the disk with all that this rank has of it, so that
    nobody need hand it in again; None where it is not."""
    row = job.arena.row(job.slot)
    if row is None or not job.arrival.complete or writer.epoch is None:
        return None
    name = CheckpointName(row.step, writer.epoch)
    try:
        if writer.disk.size(names.manifest_path(name)) is None:
            return None
        parts = catalog.read_manifest(writer.disk, name).all_parts
        view, table = job.arena.image(job.slot)[: row.image_size], job.arena.table(job.slot, row)
        image = whole(view, job.arrival, bytes(table), f"slot {job.slot} of the arena")
    except EverstepError:
        return None
    there = {digest for part in parts for digest in part.digests}
    headers = {pack.digest for pack in image.parsed.table.packs}  # merged ones are others
    for each in image.parsed.extents:
        found = image.view(each.pack, each.offset, each.size)
        if each.digest not in headers and xxhash.xxh3_128_hexdigest(found) not in there:
            return None
    return Outcome(name, 0, 0.0)


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
        f"is written once: save under the next step, or restore() before you begin again"
    )
