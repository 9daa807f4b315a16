"""One file for two stores: no byte of it is read, nor stored a second time where both lie on one
file system."""

from collections.abc import Sequence

from everstep.tiers.bucket import Bucket
from everstep.tiers.disk import Disk
from everstep.tiers.tier import Readable, Target


def share(source: Readable, target: Target, path: str) -> bool:
    """Let the target have the source's file of that path, under the same path: on one file system
    as a second name of it, in one bucket as a copy that the server makes. False where neither can
    be. It is durable after `settle`. Raises Unavailable."""
    if isinstance(source, Disk) and isinstance(target, Disk):
        return target.link_from(source, path)
    if isinstance(source, Bucket) and isinstance(target, Bucket):
        return target.copy_from(source, path)
    return False


def settle(target: Target, paths: Sequence[str]) -> None:
    """Make it durable that these shared files are there: one sync for each directory."""
    if isinstance(target, Disk):
        target.sync_entries(paths)
