"""A partner in the test's own process: what a keeper serves to other nodes."""

import contextlib
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest

from everstep.keeper.serve import Service
from everstep.tiers.disk import Disk
from everstep.tiers.memory import Memory
from everstep.tiers.peer import Address, Peer


@dataclass
class Partner:
    """Its memory, its store, and its service on loopback."""

    memory: Memory
    store: Disk
    service: Service
    peers: list[Peer] = field(default_factory=list)

    def peer(self, tier: str = "memory", secret: str | None = None, **options: float) -> Peer:
        """A client of it."""
        own = self.service.address
        self.peers.append(Peer(own._replace(secret=secret or own.secret), tier, **options))
        return self.peers[-1]


class Attentive(Service):
    """One that sees at once that it is to end, and knows its connections."""

    def __init__(self, *arguments: Any) -> None:
        self.links: list[socket.socket] = []
        super().__init__(*arguments)

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.links.append(request)
        super().finish_request(request, client_address)

    def serve_forever(self, poll_interval: float = 0.01) -> None:
        super().serve_forever(poll_interval)


def end(service: Attentive) -> None:
    """As its process's death does."""
    service.shutdown()
    service.server_close()
    for link in service.links:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def partner(tmp_path):
    """One with 64 MiB of memory."""
    memory, store = Memory(64 << 20), Disk(tmp_path / "partner")
    made = Partner(memory, store, Attentive(memory, store, Address("127.0.0.1", 0, "5e" * 32)))
    yield made
    for peer in made.peers:
        peer.close()
    end(made.service)
