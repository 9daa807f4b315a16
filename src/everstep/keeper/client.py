"""The trainer's end of the socket: finds or starts the keeper, and starts another when it dies."""

import atexit
import itertools
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from everstep.errors import KINDS, Unavailable
from everstep.keeper import wire
from everstep.keeper.arena import Arena
from everstep.keeper.process import IDLE_S
from everstep.store.names import CheckpointName
from everstep.store.retain import Keep

log = logging.getLogger("everstep")

_START_S = 20.0
_LOG_BYTES_MAX = 1 << 20
_started: list[subprocess.Popen[bytes]] = []  # held so that those that have ended are reaped


@atexit.register
def _leave_keepers() -> None:
    """A keeper outlives its trainer on purpose: Popen shall not report it as forgotten."""
    for process in _started:
        process.returncode = process.poll() or 0


class Client:
    """A trainer's attachment to the keeper of its store. Methods may be called from any thread.

    `on_event` gets the keeper's messages about jobs ("held", "written", "local", "failed") in a
    thread of the client's own, and {"type": "lost", "message": ...} where no keeper can be had
    any more.
    """

    def __init__(
        self,
        store: Path,
        keep: Keep | None,
        on_event: Callable[[wire.Message], None],
        idle_s: float = IDLE_S,
    ) -> None:
        """Connects, which starts a keeper where none runs. Raises Unavailable."""
        self._store = store
        self._keep = keep
        self._on_event = on_event
        self._idle_s = idle_s
        self._endpoint = wire.endpoint(store)
        self._epoch: int | None = None
        self._parent: CheckpointName | None = None
        self._arenas: dict[str, Arena] = {}
        self._ids = itertools.count()
        self._replies: dict[int, queue.SimpleQueue[tuple[wire.Message, list[int]]]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.keeper_pid = 0
        self._connection = self._attach()
        self._start_listening()

    def ensure(self) -> None:
        """Attach again where no keeper could be had the last time. Raises Unavailable."""
        if self._connection is None:
            self._connection = self._attach()
            self._hand_over()
            self._start_listening()

    def claim(self, parent: CheckpointName | None) -> int:
        """Claim an epoch that goes on from `parent` (None: nothing). Blocks; raises Unavailable."""
        message = {
            "type": "claim",
            "parent": parent.epoch if parent else None,
            "fork": parent.step if parent else 0,
        }
        reply, _ = self._request(message)
        if "epoch" not in reply:
            raise KINDS[reply["kind"]](reply["message"])
        self._epoch, self._parent = reply["epoch"], parent
        return self._epoch

    def add_arena(self, key: str, arena: Arena) -> None:
        """Give the keeper an arena; the client hands it over again to whichever comes next."""
        with self._lock:
            self._arenas[key] = arena
        self._send({"type": "arena", "arena": key}, [arena.fd])

    def release_arena(self, key: str) -> None:
        """Take an arena out of use; its jobs must be done."""
        with self._lock:
            arena = self._arenas.pop(key)
        self._send({"type": "release", "arena": key})
        arena.close()

    def adopt(self, key: str, arena: Arena) -> bool:
        """Go on with the arena of a trainer that died. False where the keeper has it no more."""
        reply, _ = self._request({"type": "adopt", "arena": key})
        if reply["ok"]:
            with self._lock:
                self._arenas[key] = arena
        return bool(reply["ok"])

    def submit(self, key: str) -> None:
        """Tell that a slot was sealed. Lost messages do no harm: a new keeper looks itself."""
        self._send({"type": "job", "arena": key})

    def confirm(self, sequence: int, problem: str | None) -> None:
        """Answer "written": None, or how the copy was torn."""
        self._send({"type": "confirm", "sequence": sequence, "problem": problem})

    def settle(self) -> list[tuple[str, Arena]]:
        """Wait until the keeper has finished what dead trainers sealed.

        Returns what it holds of theirs, by key. The arenas are mapped for the caller, who closes
        them.
        """
        reply, fds = self._request({"type": "settle"})
        return [(key, Arena(fd)) for key, fd in zip(reply["arenas"], fds, strict=True)]

    def close(self) -> None:
        """Detach. Whatever is sealed by now is still finished by the keeper."""
        self._closed = True
        self._send({"type": "detach"})
        with self._lock:
            connection = self._connection
        if connection:
            connection.close()

    def abandon_in_child(self) -> None:
        """In a forked child: forget the socket without a word to the keeper."""
        self._closed = True
        if self._connection:
            os.close(self._connection.detach())

    def _send(self, message: wire.Message, fds: list[int] | None = None) -> None:
        """A failure is not raised here: the listening thread sees the loss and mends it."""
        with self._lock:
            try:
                if self._connection:
                    wire.send(self._connection, message, fds)
            except OSError as error:
                log.debug("the keeper did not take %s: %s", message["type"], error)

    def _request(self, message: wire.Message) -> tuple[wire.Message, list[int]]:
        """Send and wait for the reply, over the deaths of any number of keepers."""
        number = next(self._ids)
        reply: queue.SimpleQueue[tuple[wire.Message, list[int]]] = queue.SimpleQueue()
        self._replies[number] = reply
        try:
            for _ in range(3):
                keeper = self.keeper_pid
                self._send({**message, "id": number})
                while True:
                    try:
                        return reply.get(timeout=1.0)
                    except queue.Empty:
                        if self._connection is None:
                            raise Unavailable(self._cannot_start("it was lost")) from None
                        if self.keeper_pid != keeper:
                            break  # the one that was asked has died
            raise Unavailable(f"asking the keeper of {self._store} ({message['type']}): three died")
        finally:
            del self._replies[number]

    def _listen(self) -> None:
        while not self._closed:
            connection = self._connection
            received = None
            try:
                received = wire.receive(connection) if connection else None
            except (OSError, ValueError) as error:
                log.debug("the keeper's socket: %s", error)
            if received is not None:
                self._dispatch(*received)
            elif not self._closed and not self._restart():
                return

    def _dispatch(self, message: wire.Message, fds: list[int]) -> None:
        waiting = self._replies.get(message.get("id", -1))
        if waiting:
            waiting.put((message, fds))
            return
        for fd in fds:
            os.close(fd)
        try:
            self._on_event(message)
        except Exception:
            log.exception("handling %s from the keeper", message.get("type"))

    def _restart(self) -> bool:
        """The keeper has died: start another, hand it the arenas. False, and an event, if not."""
        log.warning("the keeper of %s has died; starting another", self._store)
        try:
            connection = self._attach()
        except Unavailable as error:
            with self._lock:
                self._connection = None
            self._on_event({"type": "lost", "message": str(error)})
            return False
        with self._lock:
            self._connection = connection
        self._hand_over()
        return True

    def _hand_over(self) -> None:
        """Give a new keeper the arenas, in which it finds what is sealed."""
        with self._lock:
            arenas = list(self._arenas.items())
        for key, arena in arenas:
            self._send({"type": "arena", "arena": key}, [arena.fd])

    def _start_listening(self) -> None:
        threading.Thread(target=self._listen, name="everstep-client", daemon=True).start()

    def _attach(self) -> socket.socket | None:
        """Connect, and start keepers until one answers."""
        deadline = time.monotonic() + _START_S
        reason: object = "no answer"
        pause = 0.005
        process: subprocess.Popen[bytes] | None = None
        while time.monotonic() < deadline and not self._closed:
            try:
                connection = wire.connect(self._endpoint.with_suffix(".sock"))
            except OSError as error:
                reason = error
                if process is None or process.poll() is not None:
                    process = self._spawn()
                    _started[:] = [other for other in _started if other.poll() is None]
                    _started.append(process)
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
                continue
            try:
                reason = self._greet(connection)
            except (OSError, ValueError) as error:
                reason = error
            if reason is None:
                return connection
            connection.close()
            time.sleep(pause)
        raise Unavailable(self._cannot_start(reason))

    def _greet(self, connection: socket.socket) -> str | None:
        """Attach over a new connection; what the keeper refused, or None."""
        hello = {
            "type": "attach",
            "id": -1,
            "protocol": wire.PROTOCOL,
            "keep": self._keep.to_json() if self._keep else None,
            "epoch": self._epoch,
            "parent": self._parent,
        }
        wire.send(connection, hello)
        connection.settimeout(5)
        received = wire.receive(connection)
        connection.settimeout(None)
        if received is None:
            return "it closed the connection"
        if received[0]["type"] != "attached":
            return (
                f"a keeper of another everstep is running: {received[0]}. "
                f"Wait until its trainer ends"
            )
        self.keeper_pid = received[0]["pid"]
        return None

    def _spawn(self) -> subprocess.Popen[bytes]:
        """A process in a session of its own, with its own stdio: nobody who waits for the trainer's
        pipes to close waits for the keeper, and no signal to the trainer's group reaches it."""
        source = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        log_path = self._endpoint.with_suffix(".log")
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        if log_path.exists() and log_path.stat().st_size > _LOG_BYTES_MAX:
            flags |= os.O_TRUNC
        output = os.open(log_path, flags, 0o600)
        try:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "everstep.keeper",
                    os.path.realpath(self._store),
                    "--idle-s",
                    str(self._idle_s),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(self._cannot_start(error)) from error
        finally:
            os.close(output)

    def _cannot_start(self, reason: object) -> str:
        log_path = self._endpoint.with_suffix(".log")
        return f"starting the keeper of {self._store}: {reason}. Its log is {log_path}"
