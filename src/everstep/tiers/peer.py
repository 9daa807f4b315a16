"""A tier of another node, over TCP: its memory, or its store.

    partner ▶ nonce (32)                         to anybody
    client  ▶ nonce (32), proof (32)             HMAC-SHA256 of both nonces, by the partner's secret
    partner ▶ proof (32)                         of another role; then requests and answers:
    length (4) │ JSON: {"op", "path", ..., "size", "digest"} │ size bytes

Nothing that arrives is executed, and no memory is taken before its size was checked. What follows
the proofs is neither signed nor encrypted: the network between a run's nodes is trusted to deliver
what was sent, and digests tell where it did not.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from everstep.errors import KINDS, Corrupt, Missing, Unavailable
from everstep.format.document import digest_of
from everstep.tiers.bucket import Url
from everstep.tiers.disk import DOCUMENT_BYTES_MAX
from everstep.tiers.files import RangeReader
from everstep.tiers.whole import WholeFiles

PATIENCE_S = 20.0
"""How long one may take to send or take the next bytes."""

GREETING_S = 5.0
MESSAGE_BYTES_MAX = 64 << 10
_GREETING = b"everstep partner 1\n"
_SIZE = 32
_LENGTH = struct.Struct("!I")
_IDLE_MAX = 16
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.02, 0.5

Message = dict[str, Any]
Room = Callable[[Message, int], memoryview]
"""Memory for the bytes that follow a message. Raises ValueError where there are too many."""


def _only(view: memoryview) -> Room:
    """Just so many bytes are expected."""

    def room(message: Message, size: int) -> memoryview:
        if size != len(view):
            raise ValueError(f"{size} bytes came, not {len(view)}")
        return view

    return room


NOTHING = _only(memoryview(b""))


class Link:
    """One connection, at either end. For one thread."""

    def __init__(self, connection: socket.socket, patience_s: float = PATIENCE_S) -> None:
        """Owns `connection`."""
        self._connection = connection
        connection.settimeout(patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * patience_s))
        )
        self._patience_s = patience_s

    def challenge(self, secret: bytes) -> None:
        """As the partner: see that the other end has the secret, and prove to have it. Raises
        OSError, ValueError."""
        with self._greeting():
            ours = secrets.token_bytes(_SIZE)
            self._connection.sendall(_GREETING + ours)
            theirs, proof = self._exactly(_SIZE), self._exactly(_SIZE)
            if not hmac.compare_digest(proof, _proof(secret, b"client", ours, theirs)):
                raise ValueError("it does not have the secret of this run")
            self._connection.sendall(_proof(secret, b"partner", ours, theirs))

    def introduce(self, secret: bytes) -> None:
        """As the client. Raises OSError, ValueError."""
        with self._greeting():
            if self._exactly(len(_GREETING)) != _GREETING:
                raise ValueError("it is no partner of this version of everstep")
            theirs, ours = self._exactly(_SIZE), secrets.token_bytes(_SIZE)
            self._connection.sendall(ours + _proof(secret, b"client", theirs, ours))
            try:
                proof = self._exactly(_SIZE)
            except (EOFError, ConnectionError):
                raise ValueError("it has another secret: it is of another run") from None
            if not hmac.compare_digest(proof, _proof(secret, b"partner", theirs, ours)):
                raise ValueError("it does not have the secret of this run")

    def send(self, message: Message, data: memoryview | bytes = b"") -> None:
        """Send a message, and bytes behind it. Raises OSError."""
        if len(data):
            message = {**message, "size": len(data), "digest": digest_of(data)}
        encoded = json.dumps(message).encode()
        assert len(encoded) <= MESSAGE_BYTES_MAX, "what is large belongs behind the message"
        self._connection.sendall(_LENGTH.pack(len(encoded)) + encoded)
        if len(data):
            self._connection.sendall(data)

    def receive(self, room: Room) -> Message:
        """Wait for a message; what follows it is in `room` then. Raises EOFError at the end,
        OSError, Corrupt, ValueError for what is no message."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MESSAGE_BYTES_MAX:
            raise ValueError(f"a message of {length} bytes")
        try:
            message = json.loads(self._exactly(length))
            size = message.get("size", 0)
        except (AttributeError, RecursionError) as error:
            raise ValueError(f"no message: {error!r}") from error
        if type(size) is not int or size < 0:
            raise ValueError(f"a message before {size!r} bytes")
        if size:
            view = room(message, size)
            self._fill(view)
            if digest_of(view) != message.get("digest"):
                raise Corrupt(f"receiving {message.get('path', 'data')}: {size} bytes differ")
        return dict(message)

    def exchange(self, message: Message, data: memoryview | bytes, room: Room) -> Message:
        """A message and its answer. Raises what the two raise, and it is closed then."""
        try:
            self.send(message, data)
            return self.receive(room)
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> None:
        """Until the next message begins. Raises TimeoutError."""
        self._connection.settimeout(seconds)
        self._connection.recv(1, socket.MSG_PEEK)
        self._connection.settimeout(self._patience_s)

    def close(self) -> None:
        """Close it; whoever waits at either end is woken."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    @contextmanager
    def _greeting(self) -> Iterator[None]:
        """All that is received within takes so long at most."""
        self._until = time.monotonic() + GREETING_S
        yield
        self._until = None
        self._connection.settimeout(self._patience_s)

    _until: float | None = None

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            if self._until is not None:
                self._connection.settimeout(max(0.001, self._until - time.monotonic()))
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError("it closed the connection")
            view = view[count:]


def _proof(secret: bytes, role: bytes, challenge: bytes, answer: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + challenge + answer, hashlib.sha256)


class Peer(WholeFiles):
    """A tier that another process serves (keeper/serve.py). Thread-safe: each call takes one of a
    few connections. See Disk for what methods promise, and the tier at the other end for what
    durable means.

    Where the partner is not there, or does not answer, they raise Unavailable.
    """

    level = "replicated"
    """Of what is committed there."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        tier: str = "memory",
        patience_s: float = PATIENCE_S,
        away_s: float = 0.0,
    ) -> None:
        """`tier`: which of those that it serves. `away_s`: for how long a partner that is not there
        is tried again (another keeper may be starting)."""
        self.root = Url(f"peer://{address[0]}:{address[1]}/{tier}")
        self.tier = tier
        self._address, self._secret = address, secret
        self._patience_s, self._away_s = patience_s, away_s
        self._idle: list[Link] = []
        self._lock = threading.Lock()

    def create(self, path: str, data: bytes) -> bool:
        """Publish `data` under `path` at once; False where something else is there already."""
        return bool(self._ask("create", path, data)) or self.read(path) == data

    def replace(self, path: str, data: bytes) -> None:
        """Publish `data` under `path`; readers see what was there before, or this."""
        self._ask("replace", path, data)

    def holds(self, path: str) -> bool:
        """Whether the file exists, and durably."""
        return bool(self._ask("holds", path))

    def size(self, path: str) -> int | None:
        """Bytes of a file; None where there is none."""
        size: int | None = self._ask("size", path)
        return size

    def age_s(self, path: str) -> float | None:
        """Since a file was last written to; None where there is none."""
        age_s: float | None = self._ask("age_s", path)
        return age_s

    def read(self, path: str, limit: int = DOCUMENT_BYTES_MAX) -> bytes:
        """The whole of a small file; raises Missing, or Corrupt where it exceeds `limit` bytes."""
        data = bytearray()

        def room(message: Message, size: int) -> memoryview:
            if size > limit:
                raise ValueError(f"{size} bytes, where at most {limit} were asked for")
            data.extend(bytes(size))
            return memoryview(data)

        self._ask("read", path, room=room, limit=limit)
        return bytes(data)

    def open(self, path: str, direct: bool = False) -> RangeReader:
        """Open for reading."""
        del direct
        size = self.size(path)
        if size is None:
            raise Missing(f"reading {self.root / path}: there is no such file")
        return RangeReader(self, path, size)

    def read_range(self, path: str, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`. Raises Corrupt where the file is short."""
        self._ask("range", path, room=_only(view), offset=offset, count=len(view))

    def list(self, directory: str) -> list[str]:
        """The names in a directory, sorted."""
        data = bytearray()

        def room(message: Message, size: int) -> memoryview:
            data.extend(bytes(size))
            return memoryview(data)

        self._ask("list", directory, room=room)
        return [str(name) for name in json.loads(data)]

    def bytes_in(self, directory: str) -> int:
        """Of the files in a directory, together."""
        return int(self._ask("bytes_in", directory))

    def delete(self, path: str) -> None:
        """Remove a file; no error where it is gone already."""
        self._ask("delete", path)

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Nothing is held: one node writes there, in order."""
        del exclusive
        yield

    def close(self) -> None:
        """Close what is idle; a later call connects anew."""
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    # ---- connections -----------------------------------------------------------------------

    def _new(self, path: str, size: int) -> "Sending":
        return Sending(self, path, size)

    def _ask(
        self, op: str, path: str, data: bytes = b"", room: Room | None = None, **more: Any
    ) -> Any:
        """One request, and the value of its answer."""
        message = {"op": op, "tier": self.tier, "path": path, **more}
        link, answer = self.start(f"{op} {self.root / path}", message, data, room or NOTHING)
        self.give(link)
        return value_of(answer)

    def start(
        self, what: str, message: Message, data: bytes = b"", room: Room = NOTHING
    ) -> tuple[Link, Message]:
        """One request, its answer, and the connection, which is the caller's. All can be made
        twice: a connection that had been idle may be gone, and then another one is taken. Raises
        Unavailable, Corrupt."""
        began, pause = time.monotonic(), _PAUSE_S_MIN
        while True:
            is_new = True
            try:
                link, is_new = self._take()
                return link, self._exchanged(link, message, data, room)
            except (OSError, EOFError, ValueError) as error:
                is_over = is_new and time.monotonic() - began >= self._away_s
                if is_over or isinstance(error, (TimeoutError, ValueError)):
                    raise self.lost(what, error) from error
            if is_new:
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_S_MAX)

    def _exchanged(self, link: Link, message: Message, data: bytes, room: Room) -> Message:
        try:
            return link.exchange(message, data, room)
        except BaseException:
            link.close()
            raise

    def _take(self) -> tuple[Link, bool]:
        """A connection for one thread, and whether it is a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        return self._connect(), True

    def give(self, link: Link) -> None:
        """It is free again."""
        with self._lock:
            if len(self._idle) < _IDLE_MAX:
                self._idle.append(link)
                return
        link.close()

    def lost(self, what: str, error: Exception) -> Unavailable:
        """What to raise where the partner did not do its part."""
        reason = (
            f"no answer for {self._patience_s:.0f} s" if isinstance(error, TimeoutError) else error
        )
        return Unavailable(f"{what}: the partner at {self._address} is not there: {reason}")

    def _connect(self) -> Link:
        connection = socket.create_connection(self._address, min(GREETING_S, self._patience_s))
        try:
            link = Link(connection, self._patience_s)
            link.introduce(self._secret)
        except BaseException:
            connection.close()
            raise
        return link


class Sending:
    """A new file on its way to a partner, over a connection of its own. For one thread."""

    def __init__(self, peer: Peer, path: str, size: int) -> None:
        """Raises Unavailable, also where there is no room for `size` bytes."""
        self._peer, self._path = peer, path
        self._what = f"writing {peer.root / path}"
        message = {"op": "new", "tier": peer.tier, "path": path, "room": size}
        self._link: Link | None
        self._link, answer = peer.start(self._what, message)
        self._check(answer)

    def write(self, view: memoryview, offset: int) -> None:
        """Send all of `view`; whether it arrived is told by `finish`. Raises Unavailable."""
        assert self._link
        try:
            self._link.send({"op": "at", "path": self._path, "offset": offset}, view)
        except OSError as error:
            raise self._peer.lost(self._what, error) from error

    def finish(self) -> None:
        """Make it appear. Raises Unavailable, Corrupt, and then it does not."""
        assert self._link
        try:
            answer = self._link.exchange({"op": "finish", "path": self._path}, b"", NOTHING)
        except (OSError, EOFError, ValueError) as error:
            self.abandon()
            raise self._peer.lost(self._what, error) from error
        self._check(answer)
        link, self._link = self._link, None
        self._peer.give(link)

    def abandon(self) -> None:
        """With its connection the partner drops what it has of it, unless it was finished."""
        if self._link:
            self._link.close()
        self._link = None

    def _check(self, answer: Message) -> None:
        try:
            value_of(answer)
        except BaseException:
            self.abandon()
            raise


def value_of(answer: Message) -> Any:
    """What the partner said. Raises what it raised."""
    if "error" in answer:
        raise KINDS.get(answer["error"], Unavailable)(f"{answer.get('text')}")
    return answer.get("value")
