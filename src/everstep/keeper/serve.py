"""What a keeper serves to those of other nodes, and to trainers that restore (tiers/peer.py): the
memory that it holds for a partner, to read and write, and this node's own store, to read.

Several nodes without a directory that all see commit through the store of rank 0's node: what they
write there is part documents and piece tables, and nothing else can be written.

Invariants:
* Nothing of a stranger's is looked at before it has proved to have the secret, and that is bounded
  in bytes, time and number.
* What arrives in part, or with another digest, is not there; its memory is free when the connection
  ends.
"""

import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from everstep.errors import Corrupt, EverstepError, Missing, Unavailable, kind_of
from everstep.format.manifest import decode_manifest
from everstep.store import catalog, names
from everstep.tiers.files import Reader
from everstep.tiers.memory import Memory, MemoryReader, NewInMemory
from everstep.tiers.peer import GREETING_S, Link, Message, Peer
from everstep.tiers.tier import Tier

log = logging.getLogger("everstep.keeper")

STRANGERS_MAX = 16
LINKS_MAX = 1024
IDLE_S = 60.0
DOCUMENT_BYTES_MAX = 256 << 20
RANGE_BYTES_MAX = 64 << 20
TEXT_MAX = 2000
_WARN_S = 60.0
_PATH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
_SHARED = re.compile(
    rf"{names.CHECKPOINTS}/[0-9]+-[0-9]+/part-[0-9]+\.json|{names.TABLES}/[0-9a-f]+\.json"
)

_MANIFEST = names.manifest_path(names.CheckpointName(0, 0)).rpartition("/")[2]


class Address(NamedTuple):
    """Where a keeper serves, and by which secret. It goes through the ranks' store."""

    host: str
    port: int
    secret: str

    @classmethod
    def of(cls, said: Any) -> "Address":
        """From a message. Raises ValueError, TypeError."""
        host, port, secret = said
        if type(host) is not str or type(port) is not int or len(bytes.fromhex(secret)) < 16:
            raise ValueError(f"an address of a partner: {host!r}, {port!r}")
        return cls(host, port, secret)

    @classmethod
    def new(cls, host: str) -> "Address":
        """Any free port there, and a new secret."""
        return cls(host, 0, secrets.token_hex(32))

    def peer(self, tier: str, away_s: float = 0.0) -> Peer:
        """One of the tiers that are served there: "memory" or "store"."""
        return Peer((self.host, self.port), bytes.fromhex(self.secret), tier, away_s=away_s)


class Service:
    """Listens, with threads of its own, until `close`."""

    def __init__(self, memory: Memory, store: Tier, address: Address) -> None:
        """At that address, any free port where that is 0. Raises OSError."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._listener = socket.create_server((address.host, address.port), family=family)
        self.address = address._replace(port=self._listener.getsockname()[1])
        self._tiers: Mapping[str, Tier] = {"memory": memory, "store": store}
        self._strangers = 0
        self._is_closed = False
        self._links: dict[Link, threading.Thread] = {}
        self._lock = threading.Lock()
        self._warned = float("-inf")
        self._thread = threading.Thread(target=self._listen, name="everstep-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and end all connections and threads."""
        with self._lock:
            self._is_closed = True
            links = dict(self._links)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in links:
            link.close()
        for thread in (self._thread, *links.values()):
            thread.join(GREETING_S)

    def _listen(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
                link = Link(connection)
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("accepting a partner: %r", error)
                time.sleep(0.05)
                continue
            serving = threading.Thread(target=self._serve, args=(link, host), daemon=True)
            with self._lock:
                is_full = self._strangers >= STRANGERS_MAX or len(self._links) >= LINKS_MAX
                is_full |= self._is_closed
                if not is_full:
                    self._strangers += 1
                    self._links[link] = serving
                    serving.start()
            if is_full:
                self._warn(host, "there are too many")
                link.close()

    def _serve(self, link: Link, host: str) -> None:
        try:
            if self._is_partner(link, host):
                Requests(link, self._tiers).serve()
        finally:
            link.close()
            with self._lock:
                self._links.pop(link, None)

    def _is_partner(self, link: Link, host: str) -> bool:
        """Hear who a stranger is."""
        try:
            link.challenge(bytes.fromhex(self.address.secret))
        except (OSError, EOFError, ValueError) as error:
            self._warn(host, error)
            return False
        finally:
            with self._lock:
                self._strangers -= 1
        return True

    def _warn(self, host: str, reason: object) -> None:
        """Not of each: a scanner of ports may come again and again."""
        if time.monotonic() - self._warned > _WARN_S:
            self._warned = time.monotonic()
            log.warning("refused a connection from %s to the partners' port: %s", host, reason)


def clear_unless_of(memory: Memory, run: str) -> None:
    """What it holds of another run is of no use: its store was put away."""
    with suppress(Missing, Corrupt):
        if catalog.read_run(memory) == run:
            return
    memory.keep_only(())


def keep_newest(memory: Memory, path: str) -> None:
    """The manifest `path` has arrived. Where it is the newest, and nothing comes before it, nothing
    else is needed any more: older checkpoints, and what was sent of some in vain."""
    try:
        manifest = decode_manifest(memory.read(path), path)
    except EverstepError as error:
        log.warning("%s, as a partner sent it", error)
        return
    name = names.CheckpointName(manifest.step, manifest.epoch)
    newest = max(catalog.committed(memory), key=lambda each: (each.epoch, each.step))
    if manifest.previous is None and name == newest:
        epochs = [f"{names.EPOCHS}/{name}" for name in memory.list(names.EPOCHS)]
        files = [link.path for link in manifest.files]
        memory.keep_only({path, names.STORE, *epochs, *files})


class Requests:
    """Those of one partner, one after another. For the thread of its connection."""

    def __init__(self, link: Link, tiers: Mapping[str, Tier]) -> None:
        self._link, self._tiers = link, tiers
        self._file: NewInMemory | None = None
        self._problem: EverstepError | None = None
        self._data, self._buffer = bytearray(), bytearray()
        self._open: tuple[str, Reader] | None = None

    def serve(self) -> None:
        """Until the connection ends, or something comes that no partner says."""
        try:
            while True:
                self._link.wait(IDLE_S)
                self._answer(self._receive())
        except (OSError, EOFError):
            return
        except Exception as error:  # noqa: BLE001 - whatever one partner says, the others are served
            log.warning("a partner: %r", error)
        finally:
            self._drop()
            self._close()

    def _receive(self) -> Message:
        """Data of a new file goes to its place at once."""
        self._data = bytearray()
        try:
            return self._link.receive(self._room)
        except Corrupt as error:
            if self._file is None:
                raise
            self._problem = self._problem or error.with_traceback(None)
            return {"op": "at"}

    def _room(self, message: Message, size: int) -> memoryview:
        if message.get("op") == "at" and self._file and not self._problem:
            try:
                return self._file.room(_number(message["offset"]), size)
            except Unavailable as error:  # told when it is finished; what comes is dropped
                self._problem = error.with_traceback(None)
        if size > DOCUMENT_BYTES_MAX:
            raise ValueError(f"{size} bytes, at most {DOCUMENT_BYTES_MAX} make sense")
        self._data = bytearray(size)
        return memoryview(self._data)

    def _answer(self, message: Message) -> None:
        if message.get("op") == "at":
            return
        data: memoryview | bytes = b""
        answer: Message = {}
        try:
            found = self._do(message)
            if isinstance(found, (bytes, memoryview)):
                data = found
            else:
                answer["value"] = found
        except EverstepError as error:
            answer = {"error": kind_of(error), "text": str(error)[:TEXT_MAX]}
        self._link.send(answer, data)

    def _do(self, message: Message) -> Any:
        match message:
            case {"op": "finish"}:
                return self._finish()
            case {"op": "new", "tier": "memory", "path": str(path), "room": int(size)}:
                return self._begin(_checked(path), _number(size))
            case {"op": str(op), "tier": str(name), "path": str(path)} if name in self._tiers:
                tier = self._tiers[name]
                path = _checked(path) if path else path
                if op in ("create", "replace", "delete"):
                    if name == "store" and not _SHARED.fullmatch(path):
                        raise ValueError(f"writing to {path!r} of a node's store")
                    done = _write(tier, op, path, bytes(self._data))
                    if isinstance(tier, Memory) and path.endswith(_MANIFEST) and op != "delete":
                        keep_newest(tier, path)
                    return done
                return self._look(tier, op, path, message)
        raise ValueError(f"no request: {str(message)[:200]}")

    def _look(self, tier: Tier, op: str, path: str, message: Message) -> Any:
        if op in ("size", "holds", "age_s", "bytes_in"):
            return getattr(tier, op)(path)
        if op == "list":
            return json.dumps(tier.list(path)).encode()
        if op == "read":
            return tier.read(path, min(_number(message["limit"]), DOCUMENT_BYTES_MAX))
        if op == "range":
            return self._range(tier, path, _number(message["offset"]), message["count"])
        raise ValueError(f"no request: {op!r}")

    def _range(self, tier: Tier, path: str, offset: int, count: int) -> memoryview:
        """Of a pack: the file stays open, as it is read range by range."""
        if not 0 <= _number(count) <= RANGE_BYTES_MAX:
            raise ValueError(f"{count} bytes at once")
        name = f"{tier.root}/{path}"
        if self._open is None or self._open[0] != name:
            self._close()
            self._open = name, tier.open(path)
        reader = self._open[1]
        if isinstance(reader, MemoryReader) and offset + count <= reader.size:
            return reader.view[offset : offset + count]
        if len(self._buffer) < count:
            self._buffer = bytearray(count)
        data = memoryview(self._buffer)[:count]
        reader.read_into(offset, data)
        return data

    def _close(self) -> None:
        if self._open:
            self._open[1].close()
        self._open = None

    def _begin(self, path: str, size: int) -> None:
        self._drop()
        memory = self._tiers["memory"]
        assert isinstance(memory, Memory)
        self._file, self._problem = NewInMemory(memory, path, size), None

    def _finish(self) -> None:
        file, self._file = self._file, None
        if file is None:
            raise ValueError("there is no new file")
        if self._problem:
            file.abandon()
            raise self._problem
        file.finish()

    def _drop(self) -> None:
        if self._file:
            self._file.abandon()
        self._file = None


def _write(tier: Tier, op: str, path: str, data: bytes) -> bool | None:
    if op == "create":
        return tier.create(path, data)
    if op == "replace":
        return tier.replace(path, data)
    return tier.delete(path)


def _checked(path: str) -> str:
    if len(path) > 1000 or not _PATH.fullmatch(path):
        raise ValueError(f"no path of a store: {path[:200]!r}")
    return path


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 50:
        raise ValueError(f"not a size: {value!r}")
    return value
