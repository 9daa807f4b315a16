"""Which ranks of a run share a node, and with it a keeper."""

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.keeper import wire
from everstep.keeper.client import TeamMate
from everstep.keeper.ranks import process_liveness
from everstep.sharding.world import World


def form_team(world: World, store: Path, alike: Mapping[str, Any]) -> TeamMate | None:
    """This rank's place among those of its node; None for a run of one process. All ranks call it.

    `alike`: what else all ranks have to say alike, as JSON: lists of names, and single settings.
    Raises ValueError where ranks save to different stores, or differ in that; Unavailable where
    one does not come.
    """
    if world.is_alone:
        return None
    here = f"{socket.gethostname()} {_boot()} {wire.node()}"
    mine = [
        secrets.token_hex(8),
        here,
        os.path.realpath(store),
        process_liveness.this_process(),
        dict(alike),
    ]
    said = world.gather("attaching", mine)
    if elsewhere := [rank for rank, each in enumerate(said) if each[2] != said[0][2]]:
        raise ValueError(
            f"rank {elsewhere[0]} saves to {said[elsewhere[0]][2]}, rank 0 to {said[0][2]}: all "
            f"ranks of a run save to one store"
        )
    for what in alike:
        _check_alike(what, [each[4].get(what) for each in said])
    nodes = list(dict.fromkeys(each[1] for each in said))
    local = tuple(rank for rank, each in enumerate(said) if each[1] == here)
    own, processes = local.index(world.rank), tuple(said[rank][3] for rank in local)
    return TeamMate(said[0][0], own, len(local), local, nodes.index(here), len(nodes), processes)


def _check_alike(what: str, said: Sequence[Any]) -> None:
    """What would fail at each save, or only when it is to be restored. Raises ValueError."""
    first = said[0]
    if isinstance(first, list):  # in whatever order
        said = [sorted(each) for each in said]
    other = next((rank for rank, each in enumerate(said) if each != said[0]), None)
    if other is None:
        return
    if not isinstance(first, list):
        raise ValueError(
            f"{what} is {first!r} on rank 0, {said[other]!r} on rank {other}: all ranks of a run "
            f"give the same"
        )
    here, there = sorted(set(first) - set(said[other])), sorted(set(said[other]) - set(first))
    raise ValueError(
        f"{what}: {here or 'nothing'} only on rank 0, {there or 'nothing'} only on rank {other}. "
        f"All ranks of a run give the same names; where a rank does not have a part, the value is "
        f"None"
    )


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
