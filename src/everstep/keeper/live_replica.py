"""The live replica's process: who starts it, tells it of commits, and has its state when the
trainer is gone.

    commits ──note──▶ the newest of them, when the worker is free ──▶ restore.replica: a process
    who restores ──lend──▶ an arena with the whole state, as those of dead trainers

Invariants:
* It ends with the keeper, and with the last trainer that wants it.
* It never holds up a commit, nor a slot: what the trainer has filled anew by the time it is read is
  read from the disk.
* One that dies or fails is started again, and at the next commit goes on from base and records.
  After FAILURES_MAX without any progress, or one that would come again each time, there is none.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from everstep.errors import Corrupt, EverstepError, Mismatch, Unsupported, kind_of
from everstep.format.manifest import CheckpointName
from everstep.keeper import wire
from everstep.keeper.arena import Arena
from everstep.keeper.job import Job
from everstep.keeper.workers import Worker
from everstep.store import commit, names
from everstep.tiers.tier import Tier

if TYPE_CHECKING:
    from everstep.keeper.ranks.team import Team

log = logging.getLogger("everstep.keeper")

KEY = "replica"
"""Of its arena, among those that are handed to who restores."""

FAILURES_MAX = 3
_FOR_GOOD = (Unsupported, Mismatch)
_LOOK_S = 0.5


class LiveReplica:
    """One worker after another. Any thread; nothing blocks but its own."""

    def __init__(self, disk: Tier, wake: Callable[[], None]) -> None:
        """`wake` is called when it has answered who wants its state."""
        self._disk = disk
        self._wake = wake
        self._team: Team | None = None
        """Whose log it follows."""
        self._newest: tuple[CheckpointName, Sequence[Job]] | None = None
        """A commit of which the worker has not heard, and the jobs in whose slots it may lie."""
        self._told: CheckpointName | None = None
        """The newest that the worker knows of, of which it may write a base."""
        self._worker: Worker | None = None
        self._has_come = self._is_lending = self._awaits_base = False
        self._failures = 0
        self._is_over = False
        self.lent: Arena | None = None
        """The state, for who restores."""
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="everstep-replica", daemon=True).start()

    def note(
        self, team: "Team", name: CheckpointName, jobs: Sequence[Job], *, takes_replay: bool
    ) -> None:
        """It was committed."""
        with self._changed:
            self._team = team
            self._awaits_base &= takes_replay
            if self._awaits_base or self._is_over:
                return
            self._newest = name, jobs
            self._take_back()
            self._changed.notify()

    def lend(self) -> bool:
        """Ask for the state, of a log to which nobody adds any more; whether there is nothing to
        wait for, as it is `lent`, or will not be."""
        is_followed = self._team is not None and self._team.is_awaited()
        with self._changed:
            self._is_lending = self._has_come and self.lent is None and not is_followed
            self._changed.notify()
            return not self._is_lending

    def close(self) -> None:
        """End the worker; does not wait for it."""
        with self._changed:
            self._is_over = True
            self._take_back()
            self._changed.notify()
            if self._worker:
                self._worker.terminate()

    # ---- its thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._worker = Worker("everstep.restore.replica", str(self._disk.root))
                self._serve(self._worker)
            except (EverstepError, OSError, ValueError) as error:
                if not self._is_over:
                    self._fail(error)
            self._end()

    def _serve(self, worker: Worker) -> None:
        """Let it follow until all is over. Raises what it failed with, OSError where it died."""
        while self._ask(worker):
            message, fds = worker.receive()
            with self._changed:
                self._failures = 0
                self._has_come = message["name"] is not None
                self.lent = next(map(Arena, fds), self.lent)
                self._is_lending &= self._has_come and self.lent is None
            self._tell(message)
            if message["has_base"] and self._team:
                self._team.retain()
            self._wake()

    def _ask(self, worker: Worker) -> bool:
        """Tell it what came, and whether somebody waits; blocks until there is either. False where
        all is over. Raises OSError where it has died."""
        with self._changed:
            while not (self._newest or self._is_lending or self._is_over):
                self._changed.wait(_LOOK_S)
                worker.check()
            if self._is_over:
                return False
            (name, jobs), self._newest = self._newest or (None, ()), None
            self._told = name or self._told
            fds = [job.arena.fd for job in jobs if job.arena.fd >= 0]
            worker.send({"type": "follow", "name": name, "lends": self._is_lending}, fds)
            return True

    def _end(self) -> None:
        with self._changed:
            worker, self._worker = self._worker, None
            self._take_back()
            self._has_come = self._is_lending = False
        if worker:
            worker.close()
        if self._told:
            self._discard(self._told)
        self._wake()

    def _discard(self, name: CheckpointName) -> None:
        """What a worker that died may have written of a base, in vain."""
        # Another process may be making that step whole, and publish it.
        with contextlib.suppress(EverstepError), self._disk.locked(exclusive=True):
            packs = [f"{names.DATA}/{pack}" for pack in self._disk.list(names.DATA)]
            own = [path for path in packs if names.is_new_in(path, name)]
            commit.discard_packs(self._disk, name, own)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._awaits_base = isinstance(error, Corrupt)
            self._failures = FAILURES_MAX if isinstance(error, _FOR_GOOD) else self._failures + 1
            self._is_over |= self._failures >= FAILURES_MAX
        end = ". There will be none any more" if self._is_over else ""
        text = f"{kind_of(error)}: {error}"
        log.error("the replica of %s: %s%s", self._disk.root, text, end)
        said = {"message": text[: wire.TEXT_MAX], "is_end": self._is_over}
        is_wanted = self._is_over or self._awaits_base
        self._tell({"type": "no_replica", **said, "wants_base": is_wanted})

    def _tell(self, message: wire.Message) -> None:
        if self._team:
            self._team.tell_all(message)

    def _take_back(self) -> None:
        if self.lent:
            self.lent.close()
            self.lent = None
