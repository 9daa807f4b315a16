"""The nodes of a run as partners: where each one's keeper serves the others, and what their stores
have of each other, where each node has a directory of its own.

Secrets and addresses go through the ranks' store, to which none but the run's processes have
access. Each keeper has a secret of its own: one that has outlived its trainers tells it to those
that come, so that they find what it holds.
"""

import contextlib
import os
import secrets
import socket

from everstep.errors import Conflict, Missing, Unavailable
from everstep.format.document import unseal
from everstep.keeper.client import Client
from everstep.keeper.wire import Place
from everstep.sharding.world import World
from everstep.store import names
from everstep.store.commit import learn_epochs, open_store
from everstep.tiers.peer import Address, Peer
from everstep.tiers.tier import Tier

BUSY_S = 2.0
"""How long a keeper that has too many connections is tried again: all ranks restore at once."""


def new_address() -> Address:
    """For this node's keeper, where it serves none yet: EVERSTEP_ADDRESS, or the address by which
    this node reaches that of rank 0."""
    host = os.environ.get("EVERSTEP_ADDRESS") or _routed() or "127.0.0.1"
    return Address(host, 0, secrets.token_hex(32))  # any free port


def open_stores(world: World, place: Place, disk: Tier, remote: Tier | None) -> str:
    """As open_store. Stores of several nodes are of one run: that of the first that has one. All
    ranks call it. Raises Conflict where they are of two."""
    if not place.own_store:
        return open_store(disk, remote)
    said = world.gather("opening the stores", [str(disk.root), _document(disk)])
    known = {unseal(text.encode(), root)["run"]: root for root, text in said if text}
    if len(known) > 1:
        raise Conflict(
            f"opening the stores of several nodes: they are of different runs ({known}). Delete "
            f"those that are not wanted"
        )
    if not known and place.node == 0:
        open_store(disk, remote)
    first = world.gather("making the stores", _document(disk) if place.node == 0 else None)
    document = next((text for _, text in said if text), None) or first[0]
    disk.create(names.STORE, document.encode())
    return open_store(disk, remote)


def meet(world: World, client: Client, disk: Tier, run: str, replicates: bool) -> list[Peer]:
    """Tell the keepers of each other: where to meet, and whether each `replicates` what it commits
    to the next one. Returns what nodes hold of each other in memory, and, where
    each has a directory of its own, the stores of the others. All ranks call it. Raises
    Unavailable."""
    place = client.place
    known = dict(world.gather("meeting the other nodes", [place.node, client.address]))
    missing = [node for node, address in known.items() if address is None]
    if missing and place.own_store:
        raise Unavailable(
            f"meeting the other nodes: the keepers of nodes {missing} do not serve (their logs say "
            f"why), and nodes that share no directory save through them"
        )
    addresses = {node: Address(*address) for node, address in known.items() if address}
    nodes = [addresses.get(node) for node in range(place.nodes)]
    client.meet({"run": run, "nodes": nodes, "replicates": replicates})
    world.gather("the nodes have met", None)
    found = [Peer(address, away_s=BUSY_S) for address in addresses.values()]
    if place.own_store:
        stores = [Peer(a, "store", away_s=BUSY_S) for n, a in addresses.items() if n != place.node]

        def learn() -> None:
            """What the others have, and this one has missed, or lost."""
            for store in stores if place.local == 0 else ():
                learn_epochs(disk, store)

        world.together("taking over epochs", learn)
        found += stores
    return found


def _document(disk: Tier) -> str | None:
    with contextlib.suppress(Missing):
        return disk.read(names.STORE).decode()
    return None


def _routed() -> str | None:
    """The address from which packets to rank 0's node go; the host's own where that is this one."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            found = str(probe.getsockname()[0])
        if not found.startswith("127.") or master in ("localhost", "127.0.0.1"):
            return found
        return socket.gethostbyname(socket.gethostname())
    return None
