"""A session: what the keeper has of one attachment of one trainer, of which its team makes
checkpoints.

    attached ──socket lost──▶ silent ──too long──▶ orphan ──▶ dropped, or adopted by a successor
        ▲                      │  └────death───────▶ ▲
        └──attaches again──────┘   death or detach ──┘

Invariants:
* An announced or sealed slot has at most one job, and only that job's end makes the slot free for
  another capture: the trainer writes to it again as soon as it is DONE. The lock covers both ends
  of that.
* Sending never blocks: a trainer that does not read loses its connection, attaches again, and is
  told anew how things stand.
* Slots that a trainer is filling are freed only when its process is dead.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Collection

from everstep.errors import Conflict
from everstep.format.packs import in_groups
from everstep.keeper import wire
from everstep.keeper.arena import OPTIMIZER, SPILL, SUBMITTED, Arena, Row, SlotState
from everstep.keeper.job import ALL, Gap, Job
from everstep.keeper.ranks.team import Team
from everstep.keeper.spill import Spill
from everstep.keeper.wire import TEXT_MAX
from everstep.keeper.writer import Outcome

log = logging.getLogger("everstep.keeper")


class Session:
    """One attachment of a trainer: its socket, its process, its arenas and its jobs.

    Main thread, but for what says otherwise.
    """

    def __init__(self, pid: int, hello: wire.Message, place: wire.Place, team: Team) -> None:
        """Of the trainer with that `pid`, whose connection comes by `resume`. Raises OSError where
        it is gone, and ValueError, KeyError or TypeError for a greeting that is none."""
        self.local = place.local
        self.token = hello.get("token")
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.connection: socket.socket | None = None
        self.team = team
        self.arenas: dict[str, Arena] = {}
        self.orphan = False
        self.detached = False
        self.dead = False
        self.silent_since: float | None = None
        self._figures: wire.Message = {}
        """What the trainer counts, for who looks on."""
        self.spill: Spill | None = None
        self._jobs: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._send_lock = threading.RLock()
        try:
            team.join(place, self, hello)
        except (ValueError, KeyError, TypeError):
            os.close(self.pidfd)
            raise
        tiers = hello.get("tiers") or {}
        if directory := tiers.get("spill"):
            self.spill = Spill(self, directory, tiers.get("spill_bytes"), len(place.ranks))

    def tell(self, message: wire.Message, fds: list[int] | None = None) -> None:
        """Send to the trainer, or lose it where it does not read. Any thread; does not block."""
        with self._send_lock:
            if self.connection:
                try:
                    wire.send(self.connection, message, fds)
                except OSError:
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)  # the main thread sees the end

    def hear(self, message: wire.Message) -> None:
        """Take a message that concerns this session alone. Raises ValueError for what is none."""
        match message:
            case {"type": "job", "arena": str(key)}:
                self._figures = dict(message.get("figures") or {})
                if arena := self.arenas.get(key):
                    self.scan(arena)
            case {"type": "copied", "sequence": int(sequence), "bytes": int(count)}:
                if job := self._jobs.get(sequence):
                    job.advance(wire.number(count))
            case {"type": "confirm", "sequence": int(sequence), "problem": str() | None as problem}:
                if job := self._jobs.get(sequence):
                    job.answer(problem and problem[:TEXT_MAX])
            case {"type": "gap", "step": int(step), "call": int(call), "reason": str(reason)}:
                gap = Gap(wire.number(step), wire.number(call), reason[:TEXT_MAX])
                self.team.offer(self.local, gap)
            case {"type": "release", "arena": str(key)}:  # closed when its jobs are done
                if arena := self.arenas.pop(key, None):
                    self.team.put(arena.close)
            case _:
                raise ValueError("no message that a trainer sends")

    # ---- arenas ----------------------------------------------------------------------------

    def take_arena(self, key: str, fd: int) -> None:
        """Map an arena that the trainer gives (again); owns `fd`. Raises Corrupt, OSError."""
        arena = Arena(fd)
        if key in self.arenas:
            arena.close()
        else:
            self.arenas[key] = arena

    def look_at(self, keys: Collection[str]) -> None:
        """Tell what became of the jobs of these arenas, as a former keeper may have died before it
        could, and take those that have none: together, as they are in one order."""
        given = [self.arenas[key] for key in keys]
        for arena in given:
            self._report(arena)
        self.scan(*given, is_found=True)
        for key, arena in self.spilled():
            if key not in keys:  # it may not have heard of it
                self.tell({"type": "spill", "arena": key}, [arena.fd])

    def scan(self, *arenas: Arena, is_found: bool = False) -> None:
        """Take every slot that was announced or sealed, and has no job yet; and see what has become
        of those that have one. `is_found`: a former keeper may have had them."""
        found = [(*job, arena) for arena in arenas for job in arena.submitted()]
        for sequence, slot, arena in sorted(found, key=lambda each: each[0]):
            with self._lock:
                state = arena.state(slot)  # the trainer may have sealed it meanwhile
                if state not in SUBMITTED or arena.sequence_of(slot) != sequence:
                    continue  # the job has just ended
                job = self._jobs.get(sequence)
                # Spilled from here, or to here; or torn, and of a keeper that died.
                if job.arena is not arena if job else state is SlotState.TORN:
                    arena.set_state(slot, SlotState.FREE)
                    continue
                is_new = job is None
                job = job or Job(arena, slot, sequence)
                self._jobs[sequence] = job
            if state is SlotState.SEALED and not job.complete:
                job.advance(ALL)
                if self.orphan:
                    job.answer(None)
                self.tell({"type": "held", "sequence": job.sequence})
            elif state is SlotState.TORN:
                who = f"process {self.pid} died" if self.dead else f"process {self.pid} stopped"
                job.give_up(f"{who} while its state was copied (job {sequence})")
            if is_new:
                self.team.offer(self.local, job, is_found=is_found)
        self._look_at_spill()

    def newest(self) -> tuple[int, str, SlotState] | None:
        """Sequence and arena of the newest complete state, and that of its slot."""
        found = []
        for key, arena in list(self.arenas.items()):
            slot = arena.newest_complete()
            if slot is not None and (row := arena.row(slot)):
                found.append((row.sequence, key, arena.state(slot)))
        return max(found, default=None)

    def status(self) -> wire.Message:
        """For who looks on."""
        with self._lock:
            jobs = list(self._jobs.values())
        saves = [
            {
                "step": job.step,
                "level": "held" if job.complete else "copying",
                "bytes": row.image_size if (row := job.arena.row(job.slot)) else 0,
            }
            for job in jobs
        ]
        own = [arena for arena in list(self.arenas.values()) if not arena.is_file]
        memory = sum(arena.size for arena in own)
        said = {"pid": self.pid, "lives": not self.dead, "is_attached": not self.orphan}
        return said | {"memory_bytes": memory, "saves": saves, "figures": self._figures}

    def keep_newest(self) -> None:
        """Close all arenas but the one with the newest state, and those that are kept; the session
        must be idle."""
        if self.spill:
            self.spill.close()
        found = self.newest()
        kept = found[1] if found else next(reversed(self.arenas), None)
        for key in [key for key in self.arenas if key != kept and not key.startswith(OPTIMIZER)]:
            self.arenas.pop(key).close()

    def _report(self, arena: Arena) -> None:
        for slot in range(arena.slot_count):
            if (row := arena.row(slot)) is None:
                continue
            job, message = self._jobs.get(row.sequence), {"sequence": row.sequence}
            match arena.state(slot):
                case SlotState.SEALED if job and not job.answered.is_set():
                    self.tell(message | {"type": "held"})
                    if job.written:
                        self.tell(message | {"type": "written"})
                case SlotState.DONE:
                    size = row.image_size
                    self.tell(message | {"type": "local", "bytes": size, "seconds": 0.0})
                case SlotState.FAILED:
                    text = f"step {row.step} could not be written; the keeper's log says why"
                    self.tell(message | {"type": "failed", "kind": "Unavailable", "message": text})

    # ---- its end ---------------------------------------------------------------------------

    def lose(self) -> None:
        """The socket is gone; the trainer may come back, or die, or never be heard of again."""
        self.disconnect()
        self.silent_since = time.monotonic()

    def resume(self, connection: socket.socket, reply: wire.Message) -> None:
        """The trainer has attached, for the first time or again; it hears the reply before all
        else."""
        with self._send_lock:
            self.disconnect()
            self.connection = connection
            self.tell(reply)
        self.silent_since = None
        self.orphan = False
        self.team.return_of(self.local)

    def abandon(self) -> None:
        """Nobody will answer any more: finish what is sealed. May be called again on its death."""
        self.orphan = True
        self.silent_since = None
        self.disconnect()
        arenas = list(self.arenas.values())
        if self.dead:
            for arena in arenas:
                arena.end_unfinished()
        self.scan(*arenas)
        for job in list(self._jobs.values()):
            if job.over and not job.answered.is_set():  # else it may still be heard of
                job.answer(None)
        self.team.lose(self.local, f"process {self.pid} has died" if self.dead else "it has left")

    def disconnect(self) -> None:
        """Close the socket."""
        with self._send_lock:
            if self.connection:
                self.connection.close()
                self.connection = None

    def close(self) -> None:
        """Release arenas and descriptors; the session must be idle."""
        if self.spill:
            self.spill.close()
        self.disconnect()
        self.team.leave(self.local)
        for arena in self.arenas.values():
            arena.close()
        self.arenas.clear()
        os.close(self.pidfd)

    # ---- for the team's thread -------------------------------------------------------------

    def end(self, job: Job, outcome: Outcome | Exception) -> None:
        """A job is committed, or nothing came of it."""
        if isinstance(outcome, Outcome):
            self._note_commit(job, outcome)
        else:
            self._fail(job, outcome)

    def _fail(self, job: Job, error: Exception) -> None:
        job.wait_until_over()  # until then the trainer writes to the slot
        said = wire.failure(error)
        level = logging.ERROR if job.complete else logging.INFO  # the trainer knows why
        log.log(level, "job %s of trainer %s: %s", job.sequence, self.pid, said)
        # A torn copy is worth nothing, and one that conflicts must not be taken for the checkpoint
        # of its name. Any other state that was not committed is whole in memory.
        is_torn = job.problem is not None or not job.complete
        is_worthless = is_torn or isinstance(error, Conflict)
        state = SlotState.FREE if is_worthless else SlotState.FAILED
        self._end(job, state, {"type": "failed", "sequence": job.sequence, **said})

    def _note_commit(self, job: Job, outcome: Outcome) -> None:
        message = {
            "type": "local",
            "sequence": job.sequence,
            "warning": (outcome.warning or "")[:TEXT_MAX],
            "is_part": outcome.is_part,
            "is_routed": outcome.is_routed,
            "bytes": outcome.bytes,
            "seconds": outcome.seconds,
        }
        rows = [(row, len(row[0]) + 1) for row in outcome.seen.items() if len(row[0]) <= TEXT_MAX]
        for some in in_groups(rows, TEXT_MAX):
            self.tell({"type": "still", "seen": dict(some)})
        self._end(job, SlotState.DONE, message)

    def _end(self, job: Job, state: SlotState, message: wire.Message) -> None:
        """The trainer is told when its slot can be used again. What has a place in the spill is
        told before that is given back: no other keeper could tell it."""
        job.take()
        if job.arena.is_file:
            self.tell(message)
        with self._lock:
            del self._jobs[job.sequence]
            job.arena.set_state(job.slot, state)
        if not job.arena.is_file:
            self.tell(message)
        self._look_at_spill()

    # ---- the spill -------------------------------------------------------------------------

    def waiting_jobs(self) -> tuple[list[Job], bool]:
        """Of arenas without a free slot: the sealed jobs whose turn has not come; and whether any
        job is worked on. For the spill's thread, as are those below."""
        with self._lock:
            jobs = list(self._jobs.values())
        full = {
            arena.identity
            for arena in list(self.arenas.values())
            if not arena.is_file and arena.free_slot() is None
        }
        waiting = [job for job in jobs if not job.is_taken and job.arena.identity in full]
        sealed = [job for job in waiting if job.complete]
        return sealed, any(job.is_taken for job in jobs)

    def spilled(self) -> list[tuple[str, Arena]]:
        """The arenas there."""
        return [(key, each) for key, each in list(self.arenas.items()) if key.startswith(SPILL)]

    def move(self, job: Job, row: Row, arena: Arena) -> None:
        """The image of a job lies in that arena as well: it is read from there from now on, and the
        slot that it lay in is free. Nothing is done where it has ended since, or is worked on."""
        with self._lock:
            before, at = job.arena, job.slot
            if job.is_taken:
                return
            table, descriptor = before.table(at, row), before.descriptor(at, row)
            arena.seal(0, row, bytes(table), bytes(descriptor))
            if not job.move(arena, 0):
                arena.set_state(0, SlotState.FREE)
                return
            before.set_state(at, SlotState.FREE)
        self.tell({"type": "spilled", "sequence": job.sequence})

    def _look_at_spill(self) -> None:
        if self.spill and not self.orphan:  # else nobody needs memory
            self.spill.look()
