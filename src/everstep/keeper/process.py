"""The keeper's process: one per user, store and node.

One thread waits for messages and deaths, and blocks for greetings alone; each session (one
attachment of one trainer) has a worker thread that takes its jobs in order, so that a trainer that
hangs, or a disk that does, holds up nobody else.

A trainer that goes, by death or by a closed socket, leaves an *orphan* session: its sealed jobs are
finished, its arena stays as the memory tier until a successor adopts it or commits on its own. At
most one run's arenas are kept, one of each of its ranks, and those of ranks whose others live.
"""

import gc
import logging
import os
import selectors
import socket
import threading
import time
from typing import Any

from everstep.format.manifest import CheckpointName
from everstep.keeper import wire
from everstep.keeper.arena import SlotState
from everstep.keeper.copies import RemoteCopies
from everstep.keeper.home import Home
from everstep.keeper.live_replica import KEY, LiveReplica
from everstep.keeper.measured import available_memory
from everstep.keeper.ranks.team import Team
from everstep.keeper.serve import Service
from everstep.keeper.session import Session
from everstep.store import retain
from everstep.store.presence import Presence
from everstep.tiers.memory import Memory
from everstep.tiers.peer import Address, Peer
from everstep.tiers.tier import tier_at

log = logging.getLogger("everstep.keeper")

LINGER_S = 2.0
"""How long it stays when every trainer has left in peace."""

SILENCE_S = 30.0
"""How long a trainer that lives, but has lost its connection, may take to attach again."""

FIRST_S = 10.0
"""How long it waits for the trainer that started it."""

GREETING_S = 1.0
"""How long a connection may take to say who it is: who has connected says so at once."""

HALF_STEP_S = 5.0
"""How long somebody who restores waits for a step of others, of which some ranks are dead, and some
live and have not handed in theirs."""

LEND_S = 60.0
"""How long somebody who restores waits for the replica, which is at most some records behind."""

TIER_PATIENCE_S = 10.0
"""How long one call to another tier is tried again, before that is told; then it is made anew. A
trainer may wait for it, who claims an epoch."""

PULSE_S = 5.0
"""How often trainers are told how much was written, while something is."""

SESSIONS_MAX = 1024
_TICK_S = 0.5
_LEAVE_S = 2.0
_MESSAGES_AT_ONCE = 64


class Keeper:
    """The event loop. Everything here runs in the main thread."""

    def __init__(self, store: str, home: Home, idle_s: float) -> None:
        self._disk = tier_at(store)
        self._memory = Memory(available_memory() // 2)
        self._service: Service | None = None
        self._presence = Presence(self._disk)
        self._home = home
        self._idle_s = idle_s
        self._sessions: list[Session] = []
        self._settling: list[tuple[Session, int, float]] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(home.listener, selectors.EVENT_READ, self._accept)
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(
            self._alarm, selectors.EVENT_READ, lambda: os.eventfd_read(self._alarm)
        )
        self._copies: dict[object, RemoteCopies] = {}
        """Those to the remote tier, by how they were asked for: one at most."""
        self._live: LiveReplica | None = None
        self._leaving = False
        self._told = time.monotonic()
        self._last_use = time.monotonic() + FIRST_S
        self._written_told = 0

    def leave_when_free(self) -> None:
        """On SIGTERM: finish what is sealed, serve the trainers that live, then exit."""
        self._leaving = True

    def run(self) -> None:
        """Serve until nobody needs the keeper any more."""
        threading.Thread(target=self._home.tidy, name="everstep-tidy", daemon=True).start()
        while not self._is_over():
            for key, _ in self._selector.select(timeout=_TICK_S):
                key.data()
            self._end_silence()
            self._answer_settled()
            self._tidy()
            self._lend_early()
            self._tell_progress()
            is_needed = self._is_needed
            self._presence.show(is_needed)
            for copies in self._copies.values():
                copies.show(is_needed)
            self._look_after_home()
        for copies in self._copies.values():
            copies.close(_LEAVE_S)
        if self._live:
            self._live.close()
        self._presence.end(_LEAVE_S)

    @property
    def _is_needed(self) -> bool:
        return any(not session.orphan or not session.team.idle for session in self._sessions)

    def _is_over(self) -> bool:
        if self._is_needed:
            self._last_use = time.monotonic()
            return False
        if any(copies.is_awaited for copies in self._copies.values()):
            return self._leaving
        # What another node has lost may be here alone, till somebody has saved again.
        is_awaited = self._sessions or self._memory.used_bytes
        patience = self._idle_s if is_awaited else min(LINGER_S, self._idle_s)
        return self._leaving or time.monotonic() - self._last_use > patience

    # ---- connections -----------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._home.listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("accepting a connection: %r", error)
            time.sleep(0.05)  # out of descriptors, most likely; the others are served meanwhile
            return
        connection.settimeout(GREETING_S)
        try:
            if len(self._sessions) >= SESSIONS_MAX:
                raise ConnectionError(f"there are {SESSIONS_MAX}")
            pid = wire.check_peer(connection)
            received = wire.receive(connection)
            if received is None:
                raise ConnectionError("it said nothing")
            hello, fds = received
            _close(fds)
            self._attach(connection, pid, hello)
        except Exception as error:  # noqa: BLE001 - whatever a stranger says, the others are served
            log.warning("refused a connection: %r", error)
            connection.close()

    def _attach(self, connection: socket.socket, pid: int, hello: wire.Message) -> None:
        if hello["type"] == "status":
            wire.send(connection, self._status())
            connection.close()
            return
        if hello["type"] != "attach":
            raise ValueError("the first message must be attach")
        if hello["protocol"] != wire.PROTOCOL:
            # With nobody else to serve, make way for a keeper of the other version.
            self._leaving = self._leaving or all(session.orphan for session in self._sessions)
            wire.send(connection, {"type": "refused", "protocol": wire.PROTOCOL})
            raise ValueError(f"protocol {hello['protocol']!r}")
        self._serve_others(hello.get("serve"))
        token = hello.get("token")
        known = (s for s in self._sessions if token and (s.pid, s.token) == (pid, token))
        session = next(known, None) or self._begin(pid, hello)
        self._unplug(session)
        address = self._service and self._service.address
        reply = {"type": "attached", "id": -1, "pid": os.getpid(), "address": address}
        connection.setblocking(False)
        session.resume(connection, reply)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._drain(session))
        self._last_use = time.monotonic()
        for copies in (session.team.writer.remote, session.team.replica):
            for message in copies.news() if copies else ():
                session.tell(message)

    def _begin(self, pid: int, hello: wire.Message) -> Session:
        said = hello.get("place")
        place = wire.Place(**{**said, "ranks": tuple(said["ranks"])}) if said else wire.ALONE
        team = self._team_of(place, hello)
        try:
            session = Session(pid, hello, place, team)
        except BaseException:
            if team.is_empty:
                team.close()
            raise
        self._sessions.append(session)
        self._selector.register(session.pidfd, selectors.EVENT_READ, lambda: self._bury(session))
        return session

    def _status(self) -> wire.Message:
        teams = {session.team for session in self._sessions if not session.team.is_empty}
        tiers = [team.status() for team in teams]
        tiers += [team.replica.status() for team in teams if team.replica]
        tiers += [copies.status() for copies in self._copies.values()]
        sessions = [session.status() for session in self._sessions]
        said = {"type": "status", "pid": os.getpid(), "bytes_written": self._disk.written}
        return said | {"trainers": sessions, "tiers": tiers}

    def _serve_others(self, wanted: list[Any] | None) -> None:
        """Those of other nodes: where a former keeper of this run did, or at a new address."""
        if wanted is not None and self._service is None:
            try:
                self._service = Service(self._memory, self._disk, Address(*wanted))
            except OSError as error:
                log.warning("serving other nodes: %s. They do without this one", error)

    def _meet(self, place: wire.Place, partners: wire.Message) -> None:
        """Hold what the node before this one commits. Raises ValueError, KeyError, TypeError,
        IndexError."""
        node = (place.node - 1) % place.nodes
        before = partners["nodes"][node] if partners["replicates"] else None
        source = Peer(Address(*before), "store") if before else None
        if self._service:
            self._service.meet(str(partners["run"]), source, place.parts_of(node))

    def _team_of(self, place: wire.Place, hello: wire.Message) -> Team:
        for session in self._sessions:
            if not place.is_alone and session.team.place.id == place.id:
                return session.team
        if hello.get("partners"):
            self._meet(place, hello["partners"])
        has_replica = hello.get("replica") and place.commits and not place.own_store
        if has_replica and self._live is None:  # else the same, for one run of it after another
            self._live = LiveReplica(self._disk, self._wake)
        live, remote = self._live if has_replica else None, self._copies_for(place, hello)
        return Team(self._disk, place, hello, self._wake, remote, live)

    def _copies_for(self, place: wire.Place, hello: wire.Message) -> RemoteCopies | None:
        """To the remote tier, by the node that commits, while others watch; of one trainer after
        another that asks for the same, the same. Raises ValueError, KeyError or TypeError."""
        asked = hello.get("tiers") or {}
        remote = asked.get("remote")
        if remote is None:
            return None
        every = wire.number(asked["remote_every"])
        keep = retain.Keep(**hello["keep"]) if hello["keep"] else None
        key = str(remote), every, keep, place.commits
        if key not in self._copies:
            tier = tier_at(str(remote), patience_s=TIER_PATIENCE_S)
            for copies in self._copies.values():
                copies.close()
            made = RemoteCopies(self._disk, tier, every, keep, self._tell_all, not place.commits)
            self._copies = {key: made}
        return self._copies[key]

    def _tell_all(self, message: wire.Message) -> None:
        """Any thread."""
        for session in list(self._sessions):
            session.tell(message)

    def _unplug(self, session: Session) -> None:
        if session.connection:
            self._selector.unregister(session.connection)

    # ---- messages --------------------------------------------------------------------------

    def _serve(self, session: Session) -> bool:
        if session.connection is None:
            return False
        try:
            received = wire.receive(session.connection)
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            log.warning("trainer %s: %r", session.pid, error)
            received = None
        if received is None:
            self._lose(session)
            return False
        message, fds = received
        try:
            self._handle(session, message, fds)
        except Exception as error:  # noqa: BLE001 - whatever one trainer says, the others are served
            log.warning("trainer %s: message %s: %r", session.pid, message.get("type"), error)
            self._lose(session)
        finally:
            _close(fds)
        return True

    def _handle(self, session: Session, message: wire.Message, fds: list[int]) -> None:
        """`fds`: those that are left in it are closed by the caller."""
        match message:
            case {"type": "arenas", "arenas": list(keys)}:
                for key in keys:
                    session.take_arena(key, fds.pop(0))
                session.look_at(keys)
            case {"type": "claim", "id": int()}:
                session.team.claim(message, session.local, session)
            case {"type": "settle", "id": int(number)}:
                self._settling.append((session, number, time.monotonic()))
            case {"type": "adopt", "arena": str(key), "id": int(number)}:
                self._adopt(session, key, number)
            case {"type": "partners", "id": int(number), "partners": dict(partners)}:
                self._meet(session.team.place, partners)
                session.team.meet(partners)
                session.tell({"type": "met", "id": number})
            case {"type": "restored", "name": [int(step), int(epoch)]}:
                if replica := session.team.replica:
                    replica.restored(CheckpointName(wire.number(step), wire.number(epoch)))
            case {"type": "detach"}:
                session.detached = True
                self._abandon(session)
            case _:
                session.hear(message)

    def _answer_settled(self) -> None:
        """Hand the orphans' arenas over for reading, once their jobs are finished."""
        if not self._settling:
            return
        waited = time.monotonic() - self._settling[0][2]
        orphans = [session for session in self._sessions if session.orphan]
        for orphan in orphans:
            if orphan.team.has_tasks or not (orphan.team.idle or waited > HALF_STEP_S):
                return
        live = self._live
        if live and not live.lend() and waited < LEND_S:
            return
        self._tidy()
        orphans = [session for session in self._sessions if session.orphan]
        held = [item for orphan in orphans for item in orphan.arenas.items()]
        held += [(KEY, live.lent)] if live and live.lent else []
        held = held[-wire.DESCRIPTORS_MAX :]
        for session, number, _ in self._settling:
            settled = {"type": "settled", "id": number, "arenas": [key for key, _ in held]}
            session.tell(settled, [arena.fd for _, arena in held])
        self._settling.clear()

    def _lend_early(self) -> None:
        """When a trainer has died, who restores will be here soon."""
        dead = [session for session in self._sessions if session.dead and session.team.live]
        if self._live and dead and all(each.team.idle for each in dead):
            self._live.lend()

    def _adopt(self, session: Session, key: str, number: int) -> None:
        """Let a trainer go on in the arena of one that is dead: nobody else writes to it."""
        adopted = key in session.arenas
        for other in self._sessions:
            is_left = other.orphan and other.team.idle and other.dead
            if not adopted and is_left and key in other.arenas:
                session.arenas[key] = other.arenas.pop(key)
                adopted = True
        session.tell({"type": "adopted", "id": number, "ok": adopted})

    # ---- ends ------------------------------------------------------------------------------

    def _lose(self, session: Session) -> None:
        self._unplug(session)
        if session.token is None:
            session.abandon()
        else:
            session.lose()

    def _bury(self, session: Session) -> None:
        """The trainer's process has died; what it said last is heard first."""
        if session.dead:
            return
        session.dead = True
        self._selector.unregister(session.pidfd)
        self._drain(session)
        self._abandon(session)

    def _abandon(self, session: Session) -> None:
        self._unplug(session)
        session.abandon()

    def _drain(self, session: Session) -> None:
        """Hear what it has said so far. So whoever asks for what others have left is answered when
        their deaths and farewells, if they came before, are heard."""
        for _ in range(_MESSAGES_AT_ONCE):
            if not self._serve(session):
                break

    def _end_silence(self) -> None:
        now = time.monotonic()
        for session in self._sessions:
            session.team.end_silence(SILENCE_S)
            if session.silent_since is not None and now - session.silent_since > SILENCE_S:
                log.warning("trainer %s has not attached again", session.pid)
                session.abandon()

    def _tidy(self) -> None:
        """Drop orphans that nobody will ask for: all but those of the run with the newest state."""
        orphans = [session for session in self._sessions if session.orphan and session.team.idle]
        for orphan in orphans:
            orphan.keep_newest()
        useful = [orphan for orphan in orphans if not self._is_useless(orphan)]
        # Those whose other ranks live are kept with them: they may go on, or die as well.
        kept = {session.team for session in self._sessions if not session.orphan}
        ended = [orphan for orphan in useful if orphan.team not in kept]
        kept |= {orphan.team for orphan in [max(ended, key=_worth, default=None)] if orphan}
        forgotten = [each for each in orphans if each not in useful or each.team not in kept]
        for session in forgotten:
            self._sessions.remove(session)
            if not session.dead:
                self._selector.unregister(session.pidfd)
            session.close()
            if session.team.is_empty:
                session.team.close()
        if forgotten:
            if self._live and not any(session.team.live for session in self._sessions):
                self._live.close()
                self._live = None
            gc.collect()  # the traceback of a failed job may hold a mapping

    def _is_useless(self, orphan: Session) -> bool:
        live = [session for session in self._sessions if not session.orphan]
        committed = [session for session in live if session.team.writer.traffic.copied]
        succeeded = any(_epoch(session) > _epoch(orphan) for session in committed)
        newest = orphan.newest()
        in_peace = orphan.detached and not (newest and newest[2] is SlotState.FAILED)
        return not orphan.arenas or in_peace or succeeded

    def _tell_progress(self) -> None:
        """So that nobody takes a slow disk for one that hangs."""
        now, written = time.monotonic(), self._disk.written
        if now - self._told < PULSE_S or written == self._written_told:
            return
        self._told, self._written_told = now, written
        for session in self._sessions:
            session.tell({"type": "progress"})

    def _look_after_home(self) -> None:
        """Where somebody has taken lock or socket away, those who come from now on get another
        keeper."""
        try:
            self._home.look_after_log()
            if not self._leaving and not self._home.is_found():
                self._leaving = True
                self._selector.unregister(self._home.listener)
                self._home.leave()
        except Exception as error:  # noqa: BLE001 - the sessions go on without it
            log.warning("looking after the socket: %r", error)

    def _wake(self) -> None:
        os.eventfd_write(self._alarm, 1)


def _worth(session: Session) -> tuple[bool, int, int]:
    newest = session.newest()
    return newest is not None, _epoch(session), newest[0] if newest else 0


def _epoch(session: Session) -> int:
    return session.team.writer.epoch


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
