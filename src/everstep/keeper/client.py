"""The trainer's end of the socket: finds or starts the keeper, and starts another when it dies.

Invariants:
* Whoever waits for a reply is woken when the connection changes, and asks again.
* A new connection is given all arenas before anything else goes over it.
* Nothing here blocks the copying thread but `claim`: keepers are started in the listening thread.
"""

import collections
import contextlib
import itertools
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from everstep.errors import KINDS, Corrupt, Unavailable
from everstep.format.manifest import CheckpointName
from everstep.keeper import wire
from everstep.keeper.arena import Arena
from everstep.keeper.home import IDLE_S, START_S, cannot_start, endpoint, spawn
from everstep.store.retain import Keep
from everstep.tiers.objects import Url
from everstep.tiers.peer import Address

log = logging.getLogger("everstep")

_GREETING_S = 5.0
_REPLY_S = 3600.0
_REMIND_S = 30.0
_LOOK_S = 0.2
_PAUSE_S_MIN, _PAUSE_S_MAX = 1.0, 60.0
LOSSES_MAX = 5
"""Of keepers, before anything is committed: then some time passes before the next one."""

_GAPS_MAX = 16
_REASON_MAX = 500

STALL_S = 120.0


class Patience:
    """How long a trainer's calls wait for its keeper and the disk: while anything is saved.

    A disk that hangs, or a keeper that keeps dying, must not hold up training for ever: other ranks
    wait in a collective, whose watchdog would end the run. So a call that has waited for STALL_S
    without any progress fails, and none waits after it until something is committed again.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progressed = time.monotonic()
        self._is_spent = False
        self._losses = 0
        """Of keepers, since the last commit."""
        self._lost_since: float | None = None

    def lasts(self, since: float) -> bool:
        """Whether one who waits since then (time.monotonic()) may go on. Where not, nobody waits
        any more until something is committed."""
        with self._lock:
            self._is_spent |= time.monotonic() - max(since, self._progressed) >= STALL_S
            return not self._is_spent

    def lasts_without_keeper(self) -> bool:
        """The same for what waits for another keeper since there was none for the first time, after
        the last commit."""
        with self._lock:
            since = self._lost_since = self._lost_since or time.monotonic()
        return self.lasts(since)

    def note_commit(self) -> None:
        """Something of this trainer has become durable."""
        with self._lock:
            self._progressed = time.monotonic()
            self._is_spent, self._losses, self._lost_since = False, 0, None

    def note_written(self) -> None:
        """The keeper has written more. That is no progress any more where one after the other is
        lost: the next may die at the same byte."""
        with self._lock:
            if self._losses < LOSSES_MAX:
                self._progressed = time.monotonic()

    def note_loss(self) -> int:
        """A keeper is gone. Returns how many are since the last commit."""
        with self._lock:
            self._losses += 1
            return self._losses


_Reply = tuple[wire.Message, list[int]] | None
"""None: the connection has changed."""


class Client:
    """A trainer's attachment to the keeper of its store. Methods may be called from any thread.

    `on_event` gets the keeper's messages about jobs ("held", "written", "local", "failed"), and
    about a log's "replica", or "no_replica", in a thread of the client's own; {"type": "lost",
    "message": ..., "is_final": ...} each time that no keeper can be had, and {"type": "found"}
    where one can be had again. "is_final": what is on its way shall wait for none any longer. After
    a keeper's death messages about a job may come again.
    """

    def __init__(
        self,
        store: Path | Url,
        keep: Keep | None,
        on_event: Callable[[wire.Message], None],
        idle_s: float = IDLE_S,
        replica: bool = False,
        place: wire.Place = wire.ALONE,
        tiers: wire.Message | None = None,
        serve: Address | None = None,
    ) -> None:
        """Connects, which starts a keeper where none runs. `replica`: whether a live one is wanted.
        `place`: among the ranks of a run. `tiers`: see Tiers.to_json. `serve`: where the keeper
        serves those of other nodes, unless it does so already. Raises Unavailable."""
        self._store = store
        self._on_event = on_event
        self._idle_s = idle_s
        self.place = place
        self._hello = {
            "type": "attach",
            "id": -1,
            "protocol": wire.PROTOCOL,
            "token": secrets.token_hex(8),
            "keep": asdict(keep) if keep else None,
            "replica": replica,
            "tiers": tiers,
            "place": None if place.is_alone else place._asdict(),
        }
        self.address = serve
        """Where other nodes find the keeper; None where it serves none. The next keeper serves
        there, too."""
        self._partners: wire.Message | None = None
        self._claims = 0
        self._epoch: int | None = None
        self._arenas: dict[str, Arena] = {}
        self._gaps: collections.deque[wire.Message] = collections.deque(maxlen=_GAPS_MAX)
        self._ids = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[_Reply]] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._lost: str | None = None
        self._pause_s = _PAUSE_S_MIN
        self.patience = Patience()
        self.losses = 0
        """Keepers that are gone: ranks see one's death at about the same time, and attach to the
        next one when they can."""
        self.keeper_pid = 0
        self._connection: socket.socket | None = self._attach()
        self._listener = threading.Thread(target=self._listen, name="everstep-client", daemon=True)
        self._listener.start()

    def ensure(self) -> None:
        """Raises Unavailable where no keeper can be had now; does not block. It is sought
        further."""
        if self._lost is not None:
            raise Unavailable(self._lost)

    def claim(self, parent: CheckpointName | None) -> int:
        """Claim an epoch that goes on from `parent` (None: nothing). Blocks, for a keeper as well
        as long as patience lasts; raises Unavailable. All ranks of a team make the same claims, and
        get the same epochs."""
        number = self._claims + 1  # the same again where it fails: perhaps only for this rank
        message = {"type": "claim", "number": number, "parent": parent}
        reply, _ = self._request(message)
        if "epoch" not in reply:
            raise KINDS.get(reply["kind"], Unavailable)(reply["message"])
        return int(reply["epoch"])

    def meet(self, partners: wire.Message) -> None:
        """Tell where the keepers of other nodes are; blocks until it is heard. Raises
        Unavailable."""
        self._partners = partners
        self._request({"type": "partners", "partners": partners})

    def tell_restored(self, name: CheckpointName) -> None:
        """Tell which checkpoint of this run it goes on from."""
        self._send({"type": "restored", "name": name})

    def add_arena(self, key: str, arena: Arena) -> None:
        """Give the keeper an arena, which the client owns from now on; it is handed over again to
        whichever keeper comes next."""
        with self._lock:
            self._arenas[key] = arena
            self._send({"type": "arenas", "arenas": [key]}, [arena.fd])

    def release_arena(self, key: str) -> None:
        """Take an arena out of use; its jobs must be done."""
        with self._lock:
            arena = self._arenas.pop(key, None)
            self._send({"type": "release", "arena": key})
            if arena:
                arena.close()

    def adopt(self, key: str, arena: Arena) -> bool:
        """Go on with the arena of a trainer that died, as after `add_arena`. False where the keeper
        has it no more."""
        reply, _ = self._request({"type": "adopt", "arena": key})
        if reply["ok"]:
            self.add_arena(key, arena)  # a keeper that came since does not know it
        return bool(reply["ok"])

    def submit(self, key: str, figures: Mapping[str, float] | None = None) -> None:
        """Tell that a slot was announced, sealed or torn; and figures for who looks on. Lost
        messages do no harm: a new keeper looks itself."""
        self._send({"type": "job", "arena": key, "figures": figures})

    def tell_copied(self, sequence: int, count: int) -> None:
        """Tell that the first `count` bytes of an announced image will not change any more."""
        self._send({"type": "copied", "sequence": sequence, "bytes": count})

    def confirm(self, sequence: int, problem: str | None) -> None:
        """Answer "written": None, or how the copy was torn."""
        self._send({"type": "confirm", "sequence": sequence, "problem": problem})

    def leave_out(self, step: int, call: int, reason: str) -> None:
        """This rank has nothing of a step (in that call), which the others need not wait for
        then."""
        if not self.place.is_alone:
            message = {"type": "gap", "step": step, "call": call, "reason": reason[:_REASON_MAX]}
            with self._lock:
                self._gaps.append(message)  # a new keeper is told, too
                self._send(message)

    def settle(self) -> list[tuple[str, Arena]]:
        """Wait until the keeper has finished what dead trainers sealed.

        Returns what it holds of theirs, by key. The arenas are mapped for the caller, for as long
        as it refers to them.
        """
        with self._lock:
            self._gaps.clear()  # what comes now may be the same steps again
        reply, fds = self._request({"type": "settle"})
        arenas = []
        for key, fd in zip(reply["arenas"], fds, strict=False):
            try:
                arenas.append((key, Arena(fd)))
            except (Corrupt, OSError) as error:  # the disk serves
                log.warning("mapping what the keeper holds: %s", error)
        return arenas

    def close(self) -> None:
        """Detach, and close the arenas. Whatever is sealed by now is still finished by the
        keeper."""
        self._stop.set()
        with self._lock:
            self._send({"type": "detach"})
            if self._connection:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # wakes the listening thread
            self._wake_waiting()
        if threading.current_thread() is not self._listener:
            self._listener.join(_GREETING_S)
        with self._lock:
            connection, self._connection = self._connection, None
            if connection:
                connection.close()
            for arena in self._arenas.values():
                arena.close()
            self._arenas.clear()

    def abandon_in_child(self) -> None:
        """In a forked child: forget socket and arenas without a word to the keeper."""
        self._stop = threading.Event()  # the locks may be held by threads that are not here
        self._stop.set()
        self._lock = threading.RLock()
        connection, self._connection = self._connection, None
        if connection:
            os.close(connection.detach())
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}

    # ---- sending ---------------------------------------------------------------------------

    def _send(self, message: wire.Message, fds: list[int] | None = None) -> None:
        """A failure is not raised here: the listening thread sees the loss and mends it."""
        try:
            with self._lock:
                if self._connection:
                    wire.send(self._connection, message, fds)
        except OSError as error:
            log.debug("the keeper did not take %s: %s", message["type"], error)

    def _request(self, message: wire.Message) -> tuple[wire.Message, list[int]]:
        """Send and wait for the reply, over the deaths of keepers and while there is none, as long
        as patience lasts."""
        since = time.monotonic()
        number = next(self._ids)
        replies: queue.SimpleQueue[_Reply] = queue.SimpleQueue()
        with self._lock:
            self._waiting[number] = replies
        try:
            while True:
                self._send({**message, "id": number})
                if reply := self._wait_for(replies, message["type"], since):
                    return reply
                if not self.patience.lasts(since):
                    what = f"asking the keeper of {self._store} ({message['type']})"
                    raise Unavailable(f"{what}: it was lost again and again")
        finally:
            with self._lock:
                del self._waiting[number]

    def _wait_for(self, replies: "queue.SimpleQueue[_Reply]", what: str, since: float) -> _Reply:
        """None where it has to be asked again."""
        began = reminded = time.monotonic()
        while (now := time.monotonic()) - began < _REPLY_S:
            if not self.patience.lasts(since):
                self.ensure()
            if self._stop.is_set():
                raise Unavailable(f"asking the keeper of {self._store}: this client is closed")
            if now - reminded >= _REMIND_S:
                reminded = now
                waited = now - began
                log.warning(
                    "the keeper of %s: no answer (%s) for %.0f s", self._store, what, waited
                )
            with contextlib.suppress(queue.Empty):
                return replies.get(timeout=_LOOK_S)
        raise Unavailable(f"asking the keeper of {self._store} ({what}): no answer in {_REPLY_S} s")

    # ---- listening -------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._stop.is_set():
            connection = self._connection
            assert connection
            try:
                received = wire.receive(connection)
            except (OSError, ValueError) as error:
                log.debug("the keeper's socket: %s", error)
                received = None
            if received is not None:
                self._dispatch(*received)
            elif not self._stop.is_set():
                self._reconnect()

    def _dispatch(self, message: wire.Message, fds: list[int]) -> None:
        if message["type"] == "progress":
            self.patience.note_written()
            return
        if message["type"] == "local":
            self._pause_s = _PAUSE_S_MIN
            self.patience.note_commit()
        if message["type"] == "claimed" and "epoch" in message:
            # Here, since this thread greets the next keeper, which must be told.
            self._claims, self._epoch = message["number"], message["epoch"]
        if message["type"] == "spill":
            self._take_spill(message["arena"], fds)
            return
        with self._lock:
            waiting = self._waiting.get(message.get("id", -1))
            if waiting:
                waiting.put((message, fds))
                return
        for fd in fds:
            os.close(fd)
        self._announce(message)

    def _take_spill(self, key: str, fds: list[int]) -> None:
        """An arena of the keeper's own, for whichever keeper comes next; or it is not needed any
        more (no descriptor)."""
        with self._lock:
            known = self._arenas.get(key)
            if known is None and fds:
                try:
                    self._arenas[key] = Arena(fds.pop())
                except (Corrupt, OSError) as error:
                    log.warning("mapping the spill: %s", error)
            elif known and not fds:
                self._arenas.pop(key).close()
        for fd in fds:
            os.close(fd)

    def _announce(self, message: wire.Message) -> None:
        try:
            self._on_event(message)
        except Exception:
            log.exception("handling %s from the keeper", message.get("type"))

    def _wake_waiting(self) -> None:
        for replies in self._waiting.values():
            replies.put(None)

    def _reconnect(self) -> None:
        """The keeper has died: start another, and go on until that works or the client is closed.

        Where keepers cannot be started, or die one after the other, that is told, and tried again
        after a while: a longer one each time, until something is committed.
        """
        self.losses += 1
        log.warning("the keeper of %s was lost; looking for another", self._store)
        if (count := self.patience.note_loss()) >= LOSSES_MAX:
            self._rest(cannot_start(self._store, f"{count} were lost before anything was saved"))
        while not self._stop.is_set():
            try:
                connection = self._attach()
            except Exception as error:  # noqa: BLE001 - without this thread nothing is ever told
                self._rest(str(error))
                continue
            self._switch_to(connection)
            return

    def _rest(self, reason: str) -> None:
        if self._stop.is_set():
            return
        if self._lost is None:
            log.error("%s", reason)
        self._lost = reason
        is_final = not self.patience.lasts_without_keeper()
        self._announce({"type": "lost", "message": reason, "is_final": is_final})
        self._stop.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)

    def _switch_to(self, connection: socket.socket) -> None:
        """Use a new keeper, and give it the arenas, in which it finds what is sealed."""
        with self._lock:
            if self._stop.is_set():
                connection.close()
                return
            if self._connection:
                self._connection.close()
            self._connection = connection
            if self._arenas:
                fds = [arena.fd for arena in self._arenas.values()]
                self._send({"type": "arenas", "arenas": list(self._arenas)}, fds)
            for message in self._gaps:
                self._send(message)
            self._wake_waiting()
        if self._lost is not None:
            self._lost = None
            self._announce({"type": "found"})

    # ---- attaching -------------------------------------------------------------------------

    def _attach(self) -> socket.socket:
        """Connect, and start keepers until one answers. Raises Unavailable."""
        deadline = time.monotonic() + START_S
        reason: object = "no answer"
        pause = 0.005
        while time.monotonic() < deadline and not self._stop.is_set():
            path = endpoint(self._store).with_suffix(".sock")
            try:
                connection = wire.connect(path)
            except OSError as error:
                reason = error
                spawn(self._store, self._idle_s)
            else:
                reason = self._greet(connection)
                if reason is None:
                    return connection
                connection.close()
            self._stop.wait(pause)
            pause = min(2 * pause, 0.2)
        raise Unavailable(cannot_start(self._store, reason))

    def _greet(self, connection: socket.socket) -> str | None:
        """Attach over a new connection; None, or why it was refused."""
        now = {"epoch": self._epoch, "serve": self.address, "partners": self._partners}
        try:
            wire.send(connection, {**self._hello, **now})
            connection.settimeout(_GREETING_S)
            received = wire.receive(connection)
            connection.settimeout(None)
        except (OSError, ValueError) as error:
            return str(error)
        if received is None:
            return "it closed the connection"
        if received[0]["type"] != "attached":
            return (
                f"a keeper of another everstep is running: {received[0]}. "
                f"Wait until its trainer ends"
            )
        self.keeper_pid = received[0]["pid"]
        found = received[0].get("address")
        self.address = Address(*found) if found else None
        return None
