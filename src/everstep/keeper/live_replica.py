"""The live replica's process: who starts it, tells it of commits, and has its state when the
trainer is gone.

    commits ──note──▶ the newest of them, when the worker is free ──▶ restore.worker: a process
    who restores ──lend──▶ an arena with the whole state, as those of dead trainers

Invariants:
* It ends with the keeper, whose death closes the socket that the worker reads, and with the last
  trainer that wants it.
* It never holds up a commit, nor a slot: what the trainer has filled anew by the time it is read is
  read from the disk.
* One that dies is started again, and goes on from base and records. After FAILURES_MAX without any
  progress, or one that would come again each time, there is none.
"""

import contextlib
import logging
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from everstep.errors import Corrupt, EverstepError
from everstep.format.manifest import CheckpointName
from everstep.keeper import wire
from everstep.keeper.arena import Arena
from everstep.keeper.job import Job
from everstep.store import commit, names
from everstep.tiers.tier import Tier

if TYPE_CHECKING:
    from everstep.keeper.ranks.team import Team

log = logging.getLogger("everstep.keeper")

KEY = "replica"
"""Of its arena, among those that are handed to who restores."""

FAILURES_MAX = 3
NOTES_MAX = 64
_FOR_GOOD = ("Unsupported", "Mismatch")


_Note = tuple[CheckpointName, Sequence[Job]]
"""A commit, and the jobs in whose slots it may still lie."""


class LiveReplica:
    """One worker after another. Any thread; nothing blocks but its own."""

    def __init__(self, disk: Tier, wake: Callable[[], None]) -> None:
        """`wake` is called when it has answered who wants its state."""
        self._disk = disk
        self._wake = wake
        self._team: Team | None = None
        """Whose log it follows."""
        self._notes: deque[_Note] = deque(maxlen=NOTES_MAX)
        self._newest: _Note | None = None
        self._told: CheckpointName | None = None
        """The newest that the worker knows of, of which it may write a base."""
        self._connection: socket.socket | None = None
        self._worker: subprocess.Popen[bytes] | None = None
        self._is_busy = self._has_come = self._is_lending = self._awaits_base = False
        self._failures = 0
        self._is_over = False
        self.lent: Arena | None = None
        """The state, for who restores."""
        self._lock = threading.RLock()
        threading.Thread(target=self._run, name="everstep-replica", daemon=True).start()

    def note(
        self, team: "Team", name: CheckpointName, jobs: Sequence[Job], *, takes_replay: bool
    ) -> None:
        """It was committed."""
        with self._lock:
            self._team = team
            self._awaits_base &= takes_replay
            if self._awaits_base:
                return
            self._newest = name, jobs
            self._notes.append(self._newest)
            self._take_back()
            self._go_on()

    def lend(self) -> bool:
        """Ask for the state; whether there is nothing to wait for any more, as it is `lent`, or
        will not be."""
        with self._lock:
            if self.lent or not self._has_come:
                return True
            self._is_lending = True
            self._go_on()
            return False

    def close(self) -> None:
        """End the worker; does not wait for it."""
        with self._lock:
            self._is_over = True
            self._take_back()
            if self._worker:
                self._worker.terminate()

    # ---- its thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            try:
                connection = self._start()
            except OSError as error:
                self._fail("Unavailable", f"its process cannot be started: {error}")
                continue
            with connection, contextlib.suppress(OSError, ValueError):
                while received := wire.receive(connection):
                    self._hear(*received)
            self._end()

    def _start(self) -> socket.socket:
        """A worker, and the socket to it. Raises OSError."""
        with self._lock:
            self._worker, own = wire.start_worker("everstep.restore.worker", str(self._disk.root))
            if self._is_over:
                self._worker.terminate()
            self._connection, self._is_busy = own, False
            if self._newest and not self._notes:
                self._notes.append(self._newest)
            self._go_on()
        return own

    def _end(self) -> None:
        """The worker is gone."""
        with self._lock:
            worker, self._worker, self._connection = self._worker, None, None
            self._take_back()
            self._has_come = False
        if worker:
            worker.wait()
        if self._told:
            self._discard(self._told)
        if not self._is_over:
            self._fail("Unavailable", "its process has died")
        self._wake()

    def _discard(self, name: CheckpointName) -> None:
        """What a worker that died may have written of a base, in vain."""
        # Another process may be making that step whole, and publish it.
        with contextlib.suppress(EverstepError), self._disk.locked(exclusive=True):
            packs = [f"{names.DATA}/{pack}" for pack in self._disk.list(names.DATA)]
            own = [path for path in packs if names.is_new_in(path, name)]
            commit.discard_packs(self._disk, name, own)

    def _hear(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case {"type": "lent"}:
                with self._lock:
                    self._is_lending = False
                    self._has_come &= bool(fds)
                    for fd in fds:
                        with contextlib.suppress(EverstepError, OSError):
                            self.lent = Arena(fd)
                self._wake()
            case {"type": "replica", "name": name, "has_base": has_base}:
                with self._lock:
                    self._failures = 0
                    self._has_come = name is not None
                self._tell(message)
                if has_base and self._team:
                    self._team.retain()
            case {"type": "failed", "kind": str(kind), "message": str(text)}:
                self._fail(kind, text)
                self._wake()
        with self._lock:
            self._is_busy = False
            self._go_on()

    def _fail(self, kind: str, text: str) -> None:
        with self._lock:
            self._has_come = self._is_lending = False
            self._awaits_base = kind == Corrupt.__name__
            self._failures = FAILURES_MAX if kind in _FOR_GOOD else self._failures + 1
            self._is_over |= self._failures >= FAILURES_MAX
            if self._is_over and self._worker:
                self._worker.terminate()
        end = ". There will be none any more" if self._is_over else ""
        log.error("the replica of %s: %s%s", self._disk.root, text, end)
        is_wanted = self._is_over or self._awaits_base
        said = {"message": f"{kind}: {text}"[: wire.TEXT_MAX], "is_end": self._is_over}
        self._tell({"type": "no_replica", **said, "wants_base": is_wanted})

    def _tell(self, message: wire.Message) -> None:
        if self._team:
            self._team.tell_all(message)

    # ---- with the lock held ----------------------------------------------------------------

    def _go_on(self) -> None:
        """Tell the worker what came, or that somebody waits, when it has answered what was
        before."""
        if self._is_busy or self._connection is None:
            return
        if self._notes:
            self._send_notes(self._connection)
        elif self._is_lending:
            self._send(self._connection, {"type": "lend"}, [])

    def _send_notes(self, connection: socket.socket) -> None:
        arenas = {job.arena.identity: job.arena for _, jobs in self._notes for job in jobs}
        sent = [key for key, arena in arenas.items() if arena.fd >= 0 and not arena.is_spill]
        sent = sent[-wire.DESCRIPTORS_MAX :]
        numbers = {key: number for number, key in enumerate(sent)}
        saves = []
        for name, jobs in self._notes:
            rows = [[numbers.get(job.arena.identity), job.slot, job.sequence] for job in jobs]
            saves.append([*name, [] if any(number is None for number, *_ in rows) else rows])
        self._told, _ = self._notes[-1]
        self._notes.clear()
        fds = [arenas[key].fd for key in sent]
        self._send(connection, {"type": "follow", "saves": saves}, fds)

    def _send(self, connection: socket.socket, message: wire.Message, fds: list[int]) -> None:
        """A worker that is gone is found by the thread that listens."""
        with contextlib.suppress(OSError):
            wire.send(connection, message, fds)
        self._is_busy = True

    def _take_back(self) -> None:
        if self.lent:
            self.lent.close()
            self.lent = None
