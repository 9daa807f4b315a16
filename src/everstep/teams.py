"""Which ranks of a run share a node, and with it a keeper."""

import os
import secrets
import socket
from pathlib import Path

from everstep.keeper import mates, wire
from everstep.keeper.client import TeamMate
from everstep.state.world import World


def form_team(world: World, store: Path) -> TeamMate | None:
    """This rank's place among those of its node; None for a run of one process. All ranks call it.

    Raises ValueError where ranks save to different stores, Unavailable where one does not come.
    """
    if world.is_alone:
        return None
    here = f"{socket.gethostname()} {_boot()} {wire.node()}"
    mine = [secrets.token_hex(8), here, os.path.realpath(store), mates.this_process()]
    said = world.gather("attaching", mine)
    if elsewhere := [rank for rank, each in enumerate(said) if each[2] != said[0][2]]:
        raise ValueError(
            f"rank {elsewhere[0]} saves to {said[elsewhere[0]][2]}, rank 0 to {said[0][2]}: all "
            f"ranks of a run save to one store"
        )
    nodes = list(dict.fromkeys(each[1] for each in said))
    local = tuple(rank for rank, each in enumerate(said) if each[1] == here)
    own, processes = local.index(world.rank), tuple(said[rank][3] for rank in local)
    return TeamMate(said[0][0], own, len(local), local, nodes.index(here), len(nodes), processes)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
