"""Part documents in a store: how several nodes tell each other what they have of a checkpoint.

    checkpoints/00000100-0003/part-2.json      what node 2 has of it, or why it has nothing

Invariants:
* A part document is published when every byte that it names is durable, and means nothing to
  readers.
* Files that one names are not deleted by the node that wrote it, unless the node that commits has
  said that it never will: it may be about to.
"""

import contextlib

from everstep.errors import Missing
from everstep.format.manifest import CheckpointName
from everstep.format.node_parts import NodePart, decode_node_part, encode_node_part
from everstep.store import names
from everstep.tiers.tier import Readable, Tier


def publish(disk: Tier, name: CheckpointName, part: NodePart) -> None:
    """Durably, in place of what this node said before."""
    disk.replace(names.part_path(name, part.node), encode_node_part(part))


def find(disk: Readable, name: CheckpointName, node: int, attempt: str) -> NodePart | None:
    """What a node says of this attempt; None where it has said nothing yet. Raises Corrupt."""
    path = names.part_path(name, node)
    try:
        found = decode_node_part(disk.read(path), disk.root / path)
    except Missing:
        return None
    return found if (found.attempt, found.node) == (attempt, node) else None


def listed(disk: Readable, name: CheckpointName) -> list[str]:
    """The paths of all part documents of a checkpoint."""
    directory = f"{names.CHECKPOINTS}/{name}"
    return [f"{directory}/{file}" for file in disk.list(directory) if names.is_part(file)]


def clear(disk: Tier, name: CheckpointName) -> None:
    """The checkpoint is there, or will never be: nobody needs them any more. A failure leaves them
    to gc."""
    with contextlib.suppress(Exception):
        disk.forget(listed(disk, name))
