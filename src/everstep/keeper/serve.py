"""What a keeper serves to those of other nodes, and to trainers that restore (tiers/peer.py): this
node's own store, and what it holds in memory for the node before it, whose keeper says when it
should take a checkpoint from there.

Invariants:
* Nothing of a stranger's is looked at before it has proved to have the secret, and that is bounded
  in bytes, time and number.
* What is held was compared with its digests as it came (store/copy.py).
"""

import json
import logging
import re
import socket
import socketserver
import threading
from collections.abc import Collection
from contextlib import closing, suppress
from typing import Any

from everstep.errors import Corrupt, EverstepError, Missing, Unavailable
from everstep.format.manifest import CheckpointName
from everstep.keeper import wire
from everstep.store import catalog, names
from everstep.store.copy import Copier
from everstep.tiers.memory import Memory
from everstep.tiers.peer import Address, Link, Message, Peer
from everstep.tiers.tier import Readable, Tier

log = logging.getLogger("everstep.keeper")

STRANGERS_MAX = 16
IDLE_S = 60.0
"""How long a partner may take until its next request, or the next bytes of one."""

RANGE_BYTES_MAX = 64 << 20
_PATH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


class Service(socketserver.ThreadingTCPServer):
    """A port for partners, which threads of its own serve. Any thread."""

    allow_reuse_address = daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, memory: Memory, store: Tier, address: Address) -> None:
        """Serves both at that address, any free port where that is 0. Raises OSError."""
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), socketserver.BaseRequestHandler)
        self.address = address._replace(port=self.socket.getsockname()[1])
        self._memory = memory
        self._tiers: dict[str, Readable] = {"memory": memory, "store": store}
        self._source: tuple[Peer, Collection[int]] | None = None
        self._strangers = threading.Semaphore(STRANGERS_MAX)
        threading.Thread(target=self.serve_forever, name="everstep-serve", daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Hear who a stranger is; then one request after another, until the connection ends, or
        something comes that no partner says. In a thread of its own."""
        try:
            link = Link(request, IDLE_S)
            if not self._strangers.acquire(blocking=False):
                raise ValueError("there are too many")
            try:
                link.greet(self.address.secret, b"partner", b"client")
            finally:
                self._strangers.release()
        except (OSError, EOFError, ValueError) as error:
            log.warning("refused a connection from %s: %s", client_address[0], error)
            return
        try:
            while True:
                self._answer(link)
        except (OSError, EOFError):
            return
        except Exception as error:  # noqa: BLE001 - whatever one partner says, the others are served
            log.warning("a partner: %r", error)

    def meet(self, run: str, source: Peer | None, parts: Collection[int]) -> None:
        """Whose checkpoints are held: those of the node with that store, whose parts have these
        numbers. What is there of another run is of no use: its store was put away."""
        self._source = (source, parts) if source else None
        with suppress(Missing, Corrupt):
            if catalog.read_run(self._memory) == run:
                return
        self._memory.keep_only(())

    def _answer(self, link: Link) -> None:
        """Take a request, and do it. Raises what the link raises, ValueError for what is none."""
        message, _ = link.receive()
        try:
            found = self._do(message, link)
        except EverstepError as error:
            link.send(wire.failure(error))
            return
        if isinstance(found, (bytes, memoryview)):
            link.send({}, found)
        else:
            link.send({"value": found})

    def _do(self, message: Message, link: Link) -> Any:
        match message:
            case {"op": "hold", "path": str(name)}:
                return self._hold(names.parse_checkpoint(name), link)
            case {"op": str(op), "tier": "memory" | "store" as place, "path": str(path)}:
                tier = self._tiers[place]
                if path and not _PATH.fullmatch(path):
                    raise ValueError(f"no path of a store: {path[:200]!r}")
                if op in ("size", "list", "read"):
                    found = getattr(tier, op)(path)
                    return json.dumps(found).encode() if op == "list" else found
                if op == "range" and (count := wire.number(message["count"])) <= RANGE_BYTES_MAX:
                    offset, data = wire.number(message["offset"]), memoryview(bytearray(count))
                    with closing(tier.open(path)) as reader:
                        reader.read_into(offset, data)
                    return data
        raise ValueError(f"no request: {str(message)[:200]}")

    def _hold(self, name: CheckpointName | None, link: Link) -> Message:
        """Take a checkpoint from its node. Where it is the newest, and nothing comes before it,
        nothing else is needed any more: older ones, and what was taken of some in vain."""
        if name is None or self._source is None:
            raise Unavailable(f"holding {name}: this node has not met the one before it")
        source, parts = self._source

        def progress(done: int, total: int) -> None:
            link.send({"done": done, "total": total})

        memory = self._memory
        copied = Copier(source, memory, parts, progress).copy(name)
        manifest = catalog.read_manifest(memory, name)
        newest = max(catalog.committed(memory), key=lambda each: (each.epoch, each.step))
        if manifest.previous is None and name == newest:
            epochs = [f"{names.EPOCHS}/{each}" for each in memory.list(names.EPOCHS)]
            files = [link.path for link in manifest.files]
            memory.keep_only({names.manifest_path(name), names.STORE, *epochs, *files})
        return {"checkpoints": [str(each) for each in copied.checkpoints], "bytes": copied.bytes}
