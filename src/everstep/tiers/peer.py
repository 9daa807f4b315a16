"""A tier of another node, over TCP: its store, or what it holds in memory for its partner.

    each end ▶ greeting, nonce (32)              to anybody
    each end ▶ proof (32)                        HMAC-SHA256 of its role and both nonces, by the
                                                 partner's secret; then requests and answers:
    length (4) │ JSON: {"op", "path", ..., "size"} │ size bytes

Nothing that arrives is executed, and no memory is taken before its size was checked. What follows
the proofs is neither signed nor encrypted: the network between a run's nodes is trusted to deliver
what was sent, and the digests of the format tell where it did not.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from everstep.errors import KINDS, Unavailable
from everstep.tiers.files import DOCUMENT_BYTES_MAX
from everstep.tiers.objects import Objects, Url

PATIENCE_S = 20.0
"""How long one may take to send or take the next bytes."""

GREETING_S = 5.0
MESSAGE_BYTES_MAX = 64 << 10
_GREETING = b"everstep partner 5\n"
_SIZE = 32
_LENGTH = struct.Struct("!I")
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.02, 0.5

Message = dict[str, Any]
Progress = Callable[[int, int], None]


class Link:
    """One connection, at either end. For one thread."""

    def __init__(self, connection: socket.socket, patience_s: float = PATIENCE_S) -> None:
        """Owns `connection`."""
        self._connection = connection
        connection.settimeout(patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._patience_s = patience_s
        self._until: float | None = time.monotonic() + GREETING_S
        """When all that greets must have come."""

    def greet(self, secret: str, role: bytes, other: bytes) -> None:
        """See that the other end has the secret, in its role, and prove to have it. Raises OSError,
        EOFError, ValueError."""
        key, ours = bytes.fromhex(secret), secrets.token_bytes(_SIZE)
        self._connection.sendall(_GREETING + ours)
        if self._exactly(len(_GREETING)) != _GREETING:
            raise ValueError("it is no partner of this version of everstep")
        theirs = self._exactly(_SIZE)
        self._connection.sendall(hmac.digest(key, role + theirs + ours, hashlib.sha256))
        expected = hmac.digest(key, other + ours + theirs, hashlib.sha256)
        if not hmac.compare_digest(self._exactly(_SIZE), expected):
            raise ValueError("it does not have the secret of this run")
        self._until = None
        self._connection.settimeout(self._patience_s)

    def send(self, message: Message, data: memoryview | bytes = b"") -> None:
        """Send a message, and bytes behind it. Raises OSError."""
        encoded = json.dumps({**message, "size": len(data)}).encode()
        assert len(encoded) <= MESSAGE_BYTES_MAX, "what is large belongs behind the message"
        self._connection.sendall(_LENGTH.pack(len(encoded)) + encoded)
        self._connection.sendall(data)

    def receive(
        self, size_max: int = 0, into: memoryview | None = None
    ) -> tuple[Message, memoryview]:
        """Wait for a message, and what follows it: at most so many bytes, in new memory or in that.
        Raises EOFError at the end, OSError, ValueError for what is no message."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MESSAGE_BYTES_MAX:
            raise ValueError(f"a message of {length} bytes")
        try:
            message = json.loads(self._exactly(length))
            size = message.get("size")
        except (AttributeError, RecursionError) as error:
            raise ValueError(f"no message: {error!r}") from error
        if type(size) is not int or not 0 <= size <= size_max:
            raise ValueError(f"{size!r} bytes behind a message, at most {size_max} make sense")
        view = memoryview(bytearray(size)) if into is None else into[:size]
        self._fill(view)
        return dict(message), view

    def close(self) -> None:
        """Close it; whoever waits at either end is woken."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

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


class Address(NamedTuple):
    """Where a keeper serves, and by which secret. It goes through the ranks' store."""

    host: str
    port: int
    secret: str


class Peer(Objects):
    """A tier that another process serves (keeper/serve.py). Thread-safe: each call takes one of a
    few connections. It can be read. See Disk for what methods promise, and the tier at the other
    end for what durable means.

    Where the partner is not there, or does not answer, they raise Unavailable.
    """

    def __init__(
        self,
        address: Address,
        tier: str = "memory",
        patience_s: float = PATIENCE_S,
        away_s: float = 0.0,
        is_awaited: Callable[[], bool] = lambda: True,
    ) -> None:
        """`tier`: which of those that it serves: its "store", or "memory". `away_s`: for how long
        one that is not there is tried again (another may be starting), if it `is_awaited`."""
        self.root = Url(f"peer://{address.host}:{address.port}/{tier}")
        self._tier, self._address = tier, address
        self._patience_s, self._away_s = patience_s, away_s
        self._is_awaited = is_awaited
        self._idle: deque[Link] = deque()
        """As many as threads have asked at a time."""

    def size(self, path: str) -> int | None:
        size: int | None = self._ask("size", path)
        return size

    def read(self, path: str) -> bytes:
        """See Disk; by one request."""
        return bytes(self._ask("read", path, size_max=DOCUMENT_BYTES_MAX))

    def read_range(self, path: str, offset: int, view: memoryview) -> None:
        size = len(view)
        self._ask("range", path, size_max=size, into=view, offset=offset, count=size)

    def list(self, directory: str) -> list[str]:
        found = self._ask("list", directory, size_max=DOCUMENT_BYTES_MAX)
        return [str(name) for name in json.loads(bytes(found))]

    def hold(self, name: str, progress: Progress) -> Message:
        """Let the partner take a checkpoint of this node's into its memory, with what that goes
        back to; which ones are new there ("checkpoints"), and of how many "bytes". Blocks. Raises
        what a copy raises."""
        return dict(self._ask("hold", name, progress=progress))

    def close(self) -> None:
        """Close what is idle; a later call connects anew."""
        while self._idle:
            self._idle.pop().close()

    # ---- connections -----------------------------------------------------------------------

    def _ask(
        self,
        op: str,
        path: str,
        size_max: int = 0,
        into: memoryview | None = None,
        progress: Progress = lambda done, total: None,
        **more: Any,
    ) -> Any:
        """One request, and what its answer says, or the bytes behind that. All can be made twice: a
        connection that had been idle may be gone, and then another one is taken. Raises
        Unavailable, and what the partner raised."""
        message = {"op": op, "tier": self._tier, "path": path, **more}
        began, pause = time.monotonic(), _PAUSE_S_MIN
        while True:
            is_new = True
            try:
                link, is_new = self._take()
                with contextlib.ExitStack() as stack:
                    stack.callback(link.close)
                    link.send(message)
                    answer, found = link.receive(size_max, into)
                    while "done" in answer:
                        progress(answer["done"], answer["total"])
                        answer, found = link.receive(size_max, into)
                    stack.pop_all()  # it serves for the next one
                break
            except (OSError, EOFError, ValueError) as error:
                is_over = time.monotonic() - began >= self._away_s or not self._is_awaited()
                if (is_new and is_over) or isinstance(error, (TimeoutError, ValueError)):
                    is_late = isinstance(error, TimeoutError)
                    reason = f"no answer for {self._patience_s:.0f} s" if is_late else error
                    place = f"the partner at {self._address[:2]} is not there"
                    raise Unavailable(f"{op} {self.root / path}: {place}: {reason}") from error
            if is_new:
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_S_MAX)
        self._idle.append(link)
        if kind := answer.get("kind"):
            raise KINDS.get(kind, Unavailable)(str(answer.get("message")))
        return answer.get("value", found)

    def _take(self) -> tuple[Link, bool]:
        """A connection for one thread, and whether it is a new one."""
        with contextlib.suppress(IndexError):
            return self._idle.pop(), False
        place = self._address[:2]
        connection = socket.create_connection(place, min(GREETING_S, self._patience_s))
        link = Link(connection, self._patience_s)
        try:
            link.greet(self._address.secret, b"client", b"partner")
        except BaseException:
            link.close()
            raise
        return link, True
