"""A new run that begins at a checkpoint of another one: manifests and epochs are the same, files
are shared where one medium has both, and everstep.json tells of a run of its own
and where that began.

Neither store needs the other: a file goes when its last name does.
"""

import uuid

from everstep.errors import Conflict
from everstep.format.document import FORMAT_VERSION, seal
from everstep.store import catalog, commit, names
from everstep.store.catalog import Origin
from everstep.store.copy import Copied, Progress, share_checkpoint
from everstep.store.names import CheckpointName
from everstep.store.presence import is_empty, shown
from everstep.tiers.tier import Tier


def fork(
    source: Tier,
    target: Tier,
    name: CheckpointName,
    progress: Progress = lambda done, total: None,
) -> Copied:
    """Begin a run in `target`, a new place, at a checkpoint of `source`; blocks. What was broken
    off goes on when it is asked for again. Raises Conflict where something else is there; Missing,
    Corrupt, Unavailable."""
    origin = Origin(str(source.root), catalog.read_run(source), *name)
    catalog.read_manifest(source, name)  # it is there, before anything is made
    if target.size(names.STORE) is None and is_empty(target):
        new = {"format": FORMAT_VERSION, "run": uuid.uuid4().hex, "created": commit.now()}
        target.create(names.STORE, seal({**new, "from": origin._asdict()}))
    _check_is_that(target, origin)
    with shown(target):
        return share_checkpoint(source, target, name, progress)


def _check_is_that(target: Tier, origin: Origin) -> None:
    """Whether it is this fork, by whomever it was begun."""
    is_there = target.size(names.STORE) is not None
    found = catalog.read_origin(target) if is_there else None
    if found is None or found[1:] != origin[1:]:
        what = "a store that began elsewhere" if is_there else "something that is no store"
        raise Conflict(
            f"forking step {origin.step} of {origin.store} to {target.root}: {what} is there. Name "
            f"another place"
        )
