"""Which ranks of a run share a node, and with it a keeper."""

import os
import secrets
import socket
from pathlib import Path

from everstep.keeper import wire
from everstep.keeper.client import TeamMate
from everstep.state.world import World


def form_team(world: World, store: Path) -> TeamMate | None:
    """This rank's place among those of its node; None for a run of one process. All ranks call it.

    Raises ValueError where ranks save to different stores, Unavailable where one does not come.
    """
    if world.is_alone:
        return None
    here = f"{socket.gethostname()} {_boot()} {wire.node()}"
    said = world.gather("attaching", [secrets.token_hex(8), here, os.path.realpath(store)])
    if elsewhere := [rank for rank, (_, _, other) in enumerate(said) if other != said[0][2]]:
        raise ValueError(
            f"rank {elsewhere[0]} saves to {said[elsewhere[0]][2]}, rank 0 to {said[0][2]}: all "
            f"ranks of a run save to one store"
        )
    nodes = list(dict.fromkeys(node for _, node, _ in said))
    local = tuple(rank for rank, (_, node, _) in enumerate(said) if node == here)
    own = local.index(world.rank)
    return TeamMate(said[0][0], own, len(local), local, nodes.index(here), len(nodes))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
