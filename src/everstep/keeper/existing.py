"""A step that is on the disk already: its keeper died after the commit. Is it just this one?"""

from typing import Any

import xxhash

from everstep.errors import Conflict, EverstepError
from everstep.format.manifest import Manifest
from everstep.format.tables import decode_table
from everstep.keeper.data import whole
from everstep.keeper.job import Job
from everstep.keeper.writer import Outcome, Writer
from everstep.store import catalog, names
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk


def check_same(
    disk: Disk,
    mine: Manifest,
    table: bytes,
    steps: tuple[int, ...] = (),
    node: int | None = None,
) -> Manifest:
    """Returns the manifest of this step as it is on the disk. Raises Conflict where it is another.

    `table`: of the last part. `steps`: of a window that it ends. `node`: which of several has
    this; the manifest on the disk is of all of them, then, and only its part is compared.
    """
    name = CheckpointName(mine.step, mine.epoch)
    found = catalog.read_manifest(disk, name)
    own = [part for part in found.all_parts if part.rank == (node or 0)]
    is_same = bool(own)
    if own:
        here, there = decode_table(table, "a table"), catalog.read_table(disk, own[-1])
        is_same = (here.packs, here.tensors) == (there.packs, there.tensors)
    if steps:
        is_same &= tuple(part.steps for part in found.parts) == steps
    elif mine.previous:  # not by digests: another keeper may have packed it in another way
        is_same &= found.previous is not None and found.previous.step == mine.previous.step
    else:
        is_same &= [part.digests for part in own] == [part.digests for part in mine.parts]
    if node is None:
        is_same &= _said(found) == _said(mine)
    if not is_same:
        raise Conflict(
            f"saving step {mine.step} to {disk.root}: this step is saved already with other "
            f"content. A step is written once: save under the next step, restore() before you "
            f"begin again, or delete it first (everstep rm {disk.root} {name})"
        )
    if not disk.holds(names.manifest_path(name)):
        raise Conflict(f"saving step {mine.step}: {name} was deleted at the same time")
    return found


def _said(manifest: Manifest) -> tuple[Any, ...]:
    calls = [(r.calls, r.derived) for r in manifest.records] if manifest.previous else []
    return calls, manifest.objects, manifest.hyperparameters, manifest.ranks


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
