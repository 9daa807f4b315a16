"""The keeper's process: one per user, store and node.

One thread waits for messages and deaths; each session (one attachment of one trainer) has a worker
thread that takes its jobs in order, so that a trainer that hangs holds up nobody else.

A trainer that goes, by death or by a closed socket, leaves an *orphan* session: its sealed jobs are
finished, its arena stays as the memory tier until a successor adopts it or commits on its own.
"""

import argparse
import contextlib
import logging
import os
import queue
import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from everstep.errors import EverstepError, Unavailable
from everstep.keeper import wire
from everstep.keeper.arena import Arena, SlotState
from everstep.keeper.persist import Job, Outcome, Writer, apply_retention, pending, persist
from everstep.store import commit, retain
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk

log = logging.getLogger("everstep.keeper")

IDLE_S = 600.0
"""How long a keeper holds the memory of a trainer that died and has not come back, in seconds."""

LINGER_S = 2.0
"""How long it stays when every trainer has left in peace."""


_TEXT_MAX = 5000  # characters; one takes up to 12 bytes of a message


class Session:
    """One attachment of a trainer: its socket, its process, its arenas and its queue of work."""

    def __init__(self, connection: socket.socket, disk: Disk, hello: wire.Message) -> None:
        self.connection: socket.socket | None = connection
        self.pid = wire.check_peer(connection)
        self.pidfd = os.pidfd_open(self.pid)
        keep = retain.Keep(**hello["keep"]) if hello["keep"] else None
        self.writer = Writer(disk, keep, hello["epoch"])
        if hello["parent"]:
            self.writer.parent = CheckpointName(*hello["parent"])
        self.arenas: dict[str, Arena] = {}
        self.orphan = False
        self.detached = False
        self.committed = 0
        self._jobs: dict[int, Job] = {}
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._idle = threading.Event()
        self._pending = 0
        self._count_lock = threading.Lock()
        self._idle.set()
        threading.Thread(target=self._work, name=f"everstep-{self.pid}", daemon=True).start()

    def submit(self, task: Callable[[], None]) -> None:
        """Queue work for this session's thread."""
        with self._count_lock:
            self._pending += 1
            self._idle.clear()
        self._queue.put(task)

    def scan(self, arena: Arena) -> None:
        """Take every sealed slot of the arena that is not queued yet. Main thread."""
        for sequence, slot in pending(arena):
            if sequence not in self._jobs:
                job = Job(arena, slot, sequence)
                if self.orphan:
                    job.answer(None)
                self._jobs[sequence] = job
                self.tell({"type": "held", "sequence": sequence})
                self.submit(lambda job=job: self._persist(job))  # type: ignore[misc]

    def answer(self, sequence: int, problem: str | None) -> None:
        """The trainer's word on a copy."""
        if job := self._jobs.get(sequence):
            job.answer(problem)

    def abandon(self) -> None:
        """The trainer is gone: finish what it sealed, free what it was copying. Main thread."""
        if self.orphan:
            return
        self.orphan = True
        self.disconnect()
        for arena in self.arenas.values():
            for slot in range(arena.slot_count):
                if arena.state(slot) is SlotState.CAPTURING:
                    arena.set_state(slot, SlotState.FREE)
            self.scan(arena)
        for job in list(self._jobs.values()):
            if not job.answered.is_set():
                job.answer(None)

    def wait_idle(self) -> None:
        """Block until the queue is empty."""
        self._idle.wait()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return self._idle.is_set()

    def tell(self, message: wire.Message, fds: list[int] | None = None) -> None:
        """Send to the trainer; one that is gone or does not read is left to its death notice."""
        with self._send_lock, contextlib.suppress(OSError):
            if self.connection:
                wire.send(self.connection, message, fds)

    def disconnect(self) -> None:
        """Close the socket."""
        with self._send_lock:
            if self.connection:
                self.connection.close()
                self.connection = None

    def close(self) -> None:
        """Release arenas and descriptors; the session must be idle."""
        self.disconnect()
        self._queue.put(None)
        self.writer.hasher.shutdown(wait=False)
        for arena in self.arenas.values():
            arena.close()
        self.arenas.clear()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _work(self) -> None:
        while task := self._queue.get():
            try:
                task()
            except Exception:
                log.exception("a task of trainer %s", self.pid)
            with self._count_lock:
                self._pending -= 1
                if not self._pending:
                    self._idle.set()

    def _persist(self, job: Job) -> None:
        sequence = job.sequence
        try:
            if self.writer.epoch is None:
                raise Unavailable("saving: this trainer has claimed no epoch")
            outcome = persist(
                self.writer, job, lambda: self.tell({"type": "written", "sequence": sequence})
            )
        except Exception as error:  # noqa: BLE001 - each reaches the handle, none ends the keeper
            self._fail(job, error)
            return
        self._done(job, outcome)

    def _fail(self, job: Job, error: Exception) -> None:
        kind = type(error).__name__ if isinstance(error, EverstepError) else "Unavailable"
        text = str(error) if isinstance(error, EverstepError) else f"the keeper failed: {error!r}"
        log.error("job %s of trainer %s: %s: %s", job.sequence, self.pid, kind, text)
        # A torn copy is worth nothing; any other state that was not committed is whole in memory.
        job.arena.set_state(job.slot, SlotState.FREE if job.problem else SlotState.FAILED)
        del self._jobs[job.sequence]
        self.tell(
            {"type": "failed", "sequence": job.sequence, "kind": kind, "message": text[:_TEXT_MAX]}
        )

    def _done(self, job: Job, outcome: Outcome) -> None:
        job.arena.set_state(job.slot, SlotState.DONE)
        del self._jobs[job.sequence]
        self.committed += 1
        self.tell(
            {
                "type": "local",
                "sequence": job.sequence,
                "bytes": outcome.bytes,
                "seconds": outcome.seconds,
            }
        )
        apply_retention(self.writer)


class Keeper:
    """The event loop. Everything here runs in the main thread."""

    def __init__(self, store: str, listener: socket.socket, idle_s: float) -> None:
        self._disk = Disk(store)
        self._listener = listener
        self._idle_s = idle_s
        self._sessions: list[Session] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._leaving = False
        self._last_use = time.monotonic()

    def leave_when_free(self) -> None:
        """On SIGTERM: finish what is sealed, serve the trainers that live, then exit."""
        self._leaving = True

    def run(self) -> None:
        """Serve until nobody needs the keeper any more."""
        while not self._is_over():
            for key, _ in self._selector.select(timeout=0.5):
                key.data()
            self._tidy()

    def _is_over(self) -> bool:
        if any(not session.orphan or not session.idle for session in self._sessions):
            self._last_use = time.monotonic()
            return False
        patience = self._idle_s if self._sessions else min(LINGER_S, self._idle_s)
        return self._leaving or time.monotonic() - self._last_use > patience

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            wire.check_peer(connection)
            connection.settimeout(5)
            received = wire.receive(connection)
            connection.settimeout(None)
            if received is None or received[0]["type"] != "attach":
                raise ValueError("the first message must be attach")
            if received[0]["protocol"] != wire.PROTOCOL:
                wire.send(connection, {"type": "refused", "protocol": wire.PROTOCOL})
                raise ValueError(f"protocol {received[0]['protocol']}")
            session = Session(connection, self._disk, received[0])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("refused a connection: %r", error)
            connection.close()
            return
        self._last_use = time.monotonic()
        self._sessions.append(session)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(session))
        self._selector.register(session.pidfd, selectors.EVENT_READ, lambda: self._bury(session))
        session.tell({"type": "attached", "id": received[0]["id"], "pid": os.getpid()})

    def _serve(self, session: Session) -> None:
        if session.connection is None:
            return
        try:
            received = wire.receive(session.connection)
        except (OSError, ValueError) as error:
            log.warning("trainer %s: %r", session.pid, error)
            received = None
        if received is None:
            self._bury(session)
            return
        message, fds = received
        try:
            self._handle(session, message, fds)
        except (EverstepError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("trainer %s: message %s: %r", session.pid, message.get("type"), error)
            self._bury(session)

    def _handle(self, session: Session, message: wire.Message, fds: list[int]) -> None:
        match message["type"]:
            case "arena":
                arena = session.arenas[message["arena"]] = Arena(fds.pop())
                session.scan(arena)
            case "job":
                session.scan(session.arenas[message["arena"]])
            case "confirm":
                session.answer(message["sequence"], message["problem"])
            case "claim":
                session.submit(lambda: self._claim(session, message))
            case "release":
                arena = session.arenas.pop(message["arena"])
                session.submit(arena.close)
            case "settle":
                self._settle(session, message)
            case "adopt":
                self._adopt(session, message)
            case "detach":
                session.detached = True
                self._bury(session)
            case kind:
                raise ValueError(f"unknown message {kind!r}")
        for fd in fds:
            os.close(fd)

    def _claim(self, session: Session, message: wire.Message) -> None:
        """Claim the session's epoch. Worker thread."""
        reply: dict[str, Any] = {"type": "claimed", "id": message["id"]}
        try:
            parent, fork = message["parent"], message["fork"]
            session.writer.epoch = commit.claim_epoch(session.writer.disk, parent, fork)
            if parent is not None:
                session.writer.parent = CheckpointName(fork, parent)
            reply["epoch"] = session.writer.epoch
        except EverstepError as error:
            reply |= {"kind": type(error).__name__, "message": str(error)}
        session.tell(reply)

    def _settle(self, session: Session, message: wire.Message) -> None:
        """Let the dead trainers' jobs finish, then hand their arenas over for reading."""
        for other in self._sessions:
            if other is not session and _is_readable(other.pidfd):
                self._bury(other)
        orphans = [other for other in self._sessions if other.orphan]

        def reply() -> None:
            for orphan in orphans:
                orphan.wait_idle()
            held = [item for orphan in orphans for item in list(orphan.arenas.items())]
            held = held[-wire.DESCRIPTORS_MAX :]
            settled = {"type": "settled", "id": message["id"], "arenas": [key for key, _ in held]}
            session.tell(settled, [arena.fd for _, arena in held])

        threading.Thread(target=reply, name="everstep-settle", daemon=True).start()

    def _adopt(self, session: Session, message: wire.Message) -> None:
        key = message["arena"]
        for other in self._sessions:
            if other.orphan and other.idle and key in other.arenas:
                session.arenas[key] = other.arenas.pop(key)
                session.tell({"type": "adopted", "id": message["id"], "ok": True})
                return
        session.tell({"type": "adopted", "id": message["id"], "ok": False})

    def _bury(self, session: Session) -> None:
        """A trainer has died, closed its socket, or detached."""
        if session.connection:
            self._selector.unregister(session.connection)
        if session.pidfd in self._selector.get_map():
            self._selector.unregister(session.pidfd)
        session.abandon()

    def _tidy(self) -> None:
        """Drop orphans that nobody will ask for: who left in peace, and who has a successor."""
        succeeded = any(not session.orphan and session.committed for session in self._sessions)
        for session in list(self._sessions):
            forgotten = succeeded or session.detached or not session.arenas
            if session.orphan and session.idle and forgotten:
                self._sessions.remove(session)
                session.close()


def _is_readable(fd: int) -> bool:
    return fd >= 0 and bool(select.select([fd], [], [], 0)[0])


def main(arguments: list[str] | None = None) -> int:
    """Run a keeper for a store; returns at once where one is running."""
    parser = argparse.ArgumentParser(prog="everstep.keeper", description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    chosen = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    endpoint = wire.endpoint(chosen.store)
    lock = wire.take_lock(endpoint.with_suffix(".lock"))
    if lock is None:
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = wire.listen(endpoint.with_suffix(".sock"))
    keeper = Keeper(chosen.store, listener, chosen.idle_s)
    signal.signal(signal.SIGTERM, lambda *_: keeper.leave_when_free())
    try:
        keeper.run()
    finally:
        endpoint.with_suffix(".sock").unlink(missing_ok=True)
        os.close(lock)
    return 0
