"""A step that is on the disk already: its keeper died after the commit. Is it just this one?"""

from typing import Any

from everstep.errors import Conflict, EverstepError
from everstep.format.manifest import CheckpointName, Manifest
from everstep.format.packed import content_digests
from everstep.format.tables import decode_table
from everstep.keeper.job import Job
from everstep.keeper.writer import Outcome, Writer
from everstep.store import catalog, names
from everstep.tiers.tier import Tier

CALL = "call"
"""Stands in what is said of the capture of several ranks: which of a run's calls saved it."""


def check_same(
    disk: Tier, mine: Manifest, table: bytes, steps: tuple[int, ...] = (), node: int | None = None
) -> None:
    """Raises Conflict where the manifest of this step, as it is on the disk, is another.

    `table`: of the last part. `steps`: of a window that it ends. `node`: which of several has
    this; the manifest on the disk is of all of them, then, and only its part is compared.
    """
    name = mine.name
    found = catalog.read_manifest(disk, name)
    own = [part for part in found.all_parts if part.rank == (node or 0)]
    layout = decode_table(table, "a table")
    is_same = bool(own) and layout.has_layout_of(catalog.read_table(disk, own[-1]))
    if steps:
        is_same &= tuple(part.steps for part in found.parts) == steps
    elif mine.previous:  # not by digests: another keeper may have packed it in another way
        is_same &= found.previous is not None and found.previous.step == mine.previous.step
    elif is_same:  # nor here by those of stored bytes
        there, here = ([content_digests(p, layout) for p in each] for each in (own, mine.parts))
        is_same = there == here
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


def _said(manifest: Manifest) -> tuple[Any, ...]:
    calls = [(r.calls, r.derived) for r in manifest.records] if manifest.previous else []
    return calls, manifest.objects, manifest.hyperparameters, manifest.ranks


def was_committed(writer: Writer, job: Job) -> Outcome | None:
    """Whether a former keeper has committed what this rank handed in, with that of others: a step
    of this epoch from the same call. None where it has not."""
    try:
        name = CheckpointName(job.row.step, writer.epoch)
        if not job.complete or not writer.disk.holds(names.manifest_path(name)):
            return None
        found = catalog.read_manifest(writer.disk, name)
    except EverstepError:
        return None
    return Outcome(name, 0, 0.0) if found.capture.get(CALL) == job.call else None
