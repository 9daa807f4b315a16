"""Teams: the sessions of all ranks of a run on this node, and the thread that works for them.

A step is written when all ranks have handed in theirs: the heads of the ranks' queues, while they
are of the same step, are joined. A rank that leaves a step out, says so, or dies, ends it for all:
what others have of it is given up, as nobody could ever read it.

Invariants:
* Whatever happens to a rank, the others' jobs end: they are joined, or fail with the reason.
* All ranks of a team have one epoch; the first that claims it does it for all.
* Each job is answered: by another keeper, where an exception that nobody thought of keeps this one
  from it.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from everstep.errors import EverstepError, Unavailable, kind_of
from everstep.keeper import wire
from everstep.keeper.catch_up import CatchUp
from everstep.keeper.existing import was_committed
from everstep.keeper.job import Job
from everstep.keeper.persist import apply_retention, end_window, is_plain, persist
from everstep.keeper.ranks.node_save import NodeSave, call_of
from everstep.keeper.ranks.nodes import Nodes, Place
from everstep.keeper.writer import Outcome, Writer
from everstep.store import catalog, commit, retain
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk

log = logging.getLogger("everstep.keeper")

Task = NodeSave | Callable[[], None]

GROUP_BYTES_MAX = 256 << 20
"""Of records that are committed together."""

TASKS_MAX = 1000
TEXT_MAX = 5000  # characters; one takes up to 12 bytes of a message


class Member(Protocol):
    """What a team asks of the session of one rank. Any thread."""

    pid: int

    def tell(self, message: wire.Message) -> None:
        """Send to the trainer; does not block."""

    def done(self, job: Job, outcome: Outcome) -> None:
        """The job is committed."""

    def fail(self, job: Job, error: Exception) -> None:
        """Nothing came of it."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A step that a rank has left out."""

    step: int
    call: int
    reason: str


class Team:
    """The ranks of one run on this node, by their local number. Any thread, but for what says
    otherwise."""

    def __init__(self, disk: Disk, hello: wire.Message, wake: Callable[[], None]) -> None:
        """As the first of its ranks greets. `wake` is called when the queue has become empty.
        Raises ValueError, KeyError or TypeError for a greeting that is none."""
        self._place = Place.of(hello.get("team"))
        self.id, self.size = self._place.id, len(self._place.ranks)
        keep = retain.Keep(**hello["keep"]) if hello["keep"] else None
        self.writer = Writer(disk, keep if self._place.commits else None)
        self._nodes: Nodes | None = None
        if self._place.nodes > 1:
            self._nodes = Nodes(self.writer, self._place, self._is_awaited)
        self.committed = 0
        self._wake = wake
        self._members: dict[int, Member] = {}
        self._queues: list[deque[Job | Gap]] = [deque() for _ in range(self.size)]
        self._gone: dict[int, str] = {}
        self._claimed: dict[int, int] = {}
        self._settled: set[int] = set()
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._tasks = Tasks()
        every = wire.number(hello["catch_up"]) if hello.get("catch_up") else 0
        every = every if self._place.commits else 0
        is_resumed = hello["epoch"] is not None
        self._catch_up = self._catch_up_every(every, is_resumed) if every else None
        threading.Thread(target=self._work, name="everstep-team", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running, or waits for another rank."""
        with self._lock:
            return not self._tasks and not any(self._queues)

    @property
    def has_tasks(self) -> bool:
        """Whether its thread has something to do; steps that wait for other ranks do not count."""
        return bool(self._tasks)

    @property
    def is_overloaded(self) -> bool:
        """Whether no more tasks should be taken."""
        return len(self._tasks) >= TASKS_MAX * self.size

    @property
    def is_empty(self) -> bool:
        """Whether no rank is left."""
        return not self._members

    def join(self, local: int, member: Member, hello: wire.Message) -> None:
        """A rank has attached. Raises ValueError, KeyError or TypeError where it cannot be."""
        here = wire.number((hello.get("team") or {"here": 1})["here"])
        number = wire.number(hello.get("claims", 0))
        epoch = None if hello["epoch"] is None else wire.number(hello["epoch"])
        parent = CheckpointName(*map(wire.number, hello["parent"])) if hello["parent"] else None
        with self._lock:
            if here != self.size or not 0 <= local < here or local in self._members:
                raise ValueError(f"local rank {local} of {here}: is taken, or not of {self.size}")
            self._members[local] = member
            self._gone.pop(local, None)
        if epoch is not None:
            self._tasks.put(lambda: self._take_over(number, epoch, parent))

    def leave(self, local: int) -> None:
        """Its session is closed: it has no jobs any more."""
        with self._lock:
            self._members.pop(local, None)
        self.lose(local, "it has left")

    def lose(self, local: int, reason: str) -> None:
        """Nothing more comes from this rank; what it has handed in counts."""
        with self._lock:
            self._gone[local] = reason
            ended = self._match()
        self._end(ended)

    def return_of(self, local: int) -> None:
        """The rank has attached again."""
        with self._lock:
            self._gone.pop(local, None)

    def end_silence(self, seconds: float) -> None:
        """Wait no longer than that for ranks that have never attached (to this keeper)."""
        if len(self._members) < self.size and time.monotonic() - self._began > seconds:
            for local in set(range(self.size)) - self._members.keys() - self._gone.keys():
                self.lose(local, "it has not attached")

    def offer(self, local: int, job: Job | Gap) -> None:
        """The next job of a rank, or that it left a step out."""
        with self._lock:
            self._queues[local].append(job)
            ended = self._match()
            is_early = len(self._members) < self.size or _step(job) in self._settled
        self._end(ended)
        if is_early and isinstance(job, Job):  # the others may have nothing left to hand in
            self._tasks.put(lambda: self._end_committed(_step(job)))

    def put(self, task: Task) -> None:
        """Do it after what is queued."""
        self._tasks.put(task)

    def close(self) -> None:
        """End the thread; nothing is queued any more."""
        if self._catch_up:
            self._catch_up.close()
        self._tasks.close()
        self.writer.hasher.shutdown(wait=False)

    def end_window(self) -> None:
        """Nothing more comes of a checkpoint that is spread over steps."""
        self._tasks.put(lambda: end_window(self.writer))

    # ---- joining ---------------------------------------------------------------------------

    def _match(self) -> list[tuple[int, Job, str]]:
        """Queue what is whole; with the lock held. Returns what can never become so: the rank, its
        job, and why."""
        ended: list[tuple[int, Job, str]] = []
        while any(self._queues):
            heads = [queue[0] if queue else None for queue in self._queues]
            waited_for = [local for local, head in enumerate(heads) if head is None]
            if any(local not in self._gone for local in waited_for):
                break
            steps = {local: _step(head) for local, head in enumerate(heads) if head is not None}
            newest = max(steps.values())
            late = [local for local, step in steps.items() if step < newest]
            if not late and not waited_for and all(isinstance(head, Job) for head in heads):
                jobs = [queue.popleft() for queue in self._queues]
                self._tasks.put(NodeSave(jobs, self._place, self._nodes))  # type: ignore[arg-type]
                continue
            reasons = [
                *(f"local rank {local} is gone: {self._gone[local]}" for local in waited_for),
                *(
                    f"local rank {local} left it out: {head.reason}"
                    for local, head in enumerate(heads)
                    if isinstance(head, Gap) and local in (late or steps)
                ),
            ]
            if self._nodes:
                heads_ended = [heads[local] for local in (late or steps)]
                reason = reasons[0] if reasons else "not all of its ranks have it"
                self._tasks.put(lambda ended=heads_ended, reason=reason: self._tell(ended, reason))  # type: ignore[misc]
            for local in late or steps:
                job = self._queues[local].popleft()
                if isinstance(job, Job):
                    others = sorted(steps.keys() - set(late))
                    reason = reasons[0] if reasons else f"local ranks {others} left it out"
                    ended.append((local, job, reason))
        return ended

    def _end(self, ended: list[tuple[int, Job, str]]) -> None:
        """Each in the order of the queue: what is written is not delayed by it."""
        for local, job, reason in ended:
            error = Unavailable(f"saving step {_step(job)}: {reason}. Without it there is no step")
            self._tasks.put(lambda local=local, job=job, error=error: self._fail(local, job, error))  # type: ignore[misc]

    def _tell(self, ended: list[Job | Gap], reason: str) -> None:
        """Other nodes need not wait for these."""
        said = {
            (_step(head), head.call if isinstance(head, Gap) else call_of(head)) for head in ended
        }
        for step, call in sorted(said):
            if self._nodes:
                self._nodes.tell_absence(step, call, reason)

    def _end_committed(self, step: int) -> None:
        """What a former keeper has committed need not wait for other ranks."""
        with self._lock:
            waiting = [
                (local, job)
                for local, queue in enumerate(self._queues)
                for job in queue
                if isinstance(job, Job) and _step(job) == step
            ]
        for local, job in waiting:
            if found := was_committed(self.writer, job):
                with self._lock:
                    self._settled.add(step)  # that of others may come later
                    is_there = any(each is job for each in self._queues[local])
                    kept = [each for each in self._queues[local] if each is not job]
                    self._queues[local] = deque(kept)
                if is_there and (member := self._members.get(local)):
                    with _answering():
                        member.done(job, found)

    def _fail(self, local: int, job: Job, error: Exception) -> None:
        member = self._members.get(local)
        if member is None:
            return
        with _answering():
            # Its keeper may have died when it had committed the step, and told only some.
            found = None if self._place.is_alone else was_committed(self.writer, job)
            if found:
                member.done(job, found)
            else:
                member.fail(job, error)

    # ---- its thread ------------------------------------------------------------------------

    def claim(self, message: wire.Message, local: int, member: Member) -> None:
        """Claim an epoch for this trainer, and answer; later in the team's thread. The ranks of a
        team make the same claims: each gets what the first one got."""
        with self._lock:  # what it left out before counts no more: it may save these steps again
            jobs = [each for each in self._queues[local] if isinstance(each, Job)]
            self._queues[local] = deque(jobs)
        self._tasks.put(lambda: self._claim(message, member))

    def _claim(self, message: wire.Message, member: Member) -> None:
        reply: dict[str, Any] = {"type": "claimed", "id": message["id"]}
        writer = self.writer
        try:
            number = wire.number(message.get("number", 0))
            fork = wire.number(message["fork"])
            parent = None if message["parent"] is None else wire.number(message["parent"])
            if self._place.is_alone or number not in self._claimed:
                writer.parent = None if parent is None else CheckpointName(fork, parent)
                writer.epoch = self._epoch(parent, fork, number)
                writer.run = commit.open_store(writer.disk)
                writer.unclaimed = None
                self._claimed = {number: writer.epoch}
                self._settled.clear()
                if self._nodes:
                    self._nodes.note_claim()
            reply["epoch"] = self._claimed[number]
        except EverstepError as error:
            text = str(error)[:TEXT_MAX]
            writer.unclaimed = text if isinstance(error, Unavailable) else None
            reply |= {"kind": kind_of(error), "message": text}
        except Exception as error:
            log.exception("a claim of trainer %s", member.pid)
            reply |= {"kind": "Unavailable", "message": f"the keeper failed: {error!r}"[:TEXT_MAX]}
        member.tell(reply)

    def _epoch(self, parent: int | None, fork: int, number: int) -> int:
        """A new one; of several ranks the one that this claim got before (from a keeper that has
        died), or that rank 0's node claims."""
        disk, place = self.writer.disk, self._place
        if place.is_alone:
            return commit.claim_epoch(disk, parent, fork)
        attachment = place.named(number)
        if self._nodes and not place.commits:
            return self._nodes.await_epoch(attachment)
        known = catalog.find_attachment(disk, attachment)
        return known or commit.claim_epoch(disk, parent, fork, attachment)

    def _is_awaited(self) -> bool:
        """Whether a trainer lives. Any thread."""
        with self._lock:
            return bool(self._members.keys() - self._gone.keys())

    def _take_over(self, number: int, epoch: int, parent: CheckpointName | None) -> None:
        """A rank has claimed an epoch at a former keeper: the newest counts for all."""
        self._claimed.setdefault(number, epoch)
        if epoch > (self.writer.epoch or 0):
            self.writer.epoch, self.writer.parent = epoch, parent
            self._find_parent()

    def _find_parent(self) -> None:
        """A former keeper may have committed for this epoch since it was claimed."""
        try:
            names = catalog.committed(self.writer.disk)
        except EverstepError as error:
            log.warning("looking for the newest checkpoint: %s", error)
            return
        mine = [name for name in names if name.epoch == self.writer.epoch]
        self.writer.parent = max(mine, default=self.writer.parent)

    def _work(self) -> None:
        while task := self._tasks.take():
            try:
                if isinstance(task, NodeSave):
                    with _answering():
                        self._persist(task)
                else:
                    task()
            except Exception:
                log.exception("a task of a team")
            del task  # it holds an arena
            if self._tasks.finish():
                self._wake()

    def _persist(self, first: NodeSave) -> None:
        """Commit a step, and with it the records that are gathered meanwhile."""
        if self.writer.epoch is None and not self.writer.unclaimed:
            self._end_save(first, Unavailable("saving: this trainer has claimed no epoch"))
            return
        group = self._tasks.gather(first)
        committed = self.committed
        for save, outcome in persist(self.writer, group, self._announce_written):
            self._end_save(save, outcome)
        if self.committed > committed:
            apply_retention(self.writer)

    def _announce_written(self, save: NodeSave) -> None:
        for local, job in enumerate(save.jobs):
            if member := self._members.get(local):
                member.tell({"type": "written", "sequence": job.sequence})

    def _end_save(self, save: NodeSave, outcome: Outcome | Exception) -> None:
        if self._nodes and isinstance(outcome, Exception):
            step, call = _step(save.jobs[0]), save.call
            self._nodes.tell_absence(step, call, str(outcome), kind_of(outcome))
        elif self._nodes and isinstance(outcome, Outcome):
            self._nodes.note_commit(outcome.name)
        for local, job in enumerate(save.jobs):
            member = self._members.get(local)
            if member is None:
                continue
            if isinstance(outcome, Outcome):
                member.done(job, outcome)
            else:
                member.fail(job, outcome)
        if isinstance(outcome, Outcome) and not outcome.is_part:
            self.committed += 1
            if self._catch_up:
                self._catch_up.note(outcome.name, outcome.takes_replay)

    def _catch_up_every(self, every: int, is_resumed: bool) -> CatchUp:
        """What was kept for the sake of later steps may go when one of them is whole."""
        return CatchUp(
            self.writer.disk,
            every,
            is_resumed=is_resumed,
            tell=self._tell_all,
            on_whole=lambda: self._tasks.put(lambda: apply_retention(self.writer)),
        )

    def _tell_all(self, message: wire.Message) -> None:
        for member in list(self._members.values()):
            member.tell(message)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Around what a trainer waits for. After an exception that nobody thought of it would wait for
    ever: so the keeper ends at once. Those who are attached start another one, which looks at what
    is sealed; where that ends as well, and so on, they are told."""
    try:
        yield
    except Exception:
        log.exception("answering a trainer; this keeper ends, another one will be started")
        os._exit(1)


def _step(job: Job | Gap) -> int:
    """A job whose row is not whole counts as older than all: it fails alone."""
    if isinstance(job, Gap):
        return job.step
    row = job.arena.row(job.slot)
    return row.step if row else -1


class Tasks:
    """A queue for one thread that takes, and any that put."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._is_busy = self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """How many are waiting or in work: what was taken together counts as one."""
        return len(self._tasks) + self._is_busy

    def put(self, task: Task) -> None:
        """At the end."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def close(self) -> None:
        """There will be no more: `take` ends."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self) -> Task | None:
        """The next one; blocks. None where there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._is_closed)
            self._is_busy = bool(self._tasks)
            return self._tasks.popleft() if self._tasks else None

    def finish(self) -> bool:
        """What was taken is done. Whether nothing is left."""
        with self._changed:
            self._is_busy = False
            return not self._tasks

    def gather(self, first: NodeSave) -> Iterator[NodeSave]:
        """The jobs of a group: `first`, and the records that wait behind it. Only records are taken
        together, and only sealed ones are added. For the thread that takes, which asks for the next
        when it has written the one before it."""
        yield first
        size = first.size
        while is_plain(first) and size < GROUP_BYTES_MAX:
            job = self._tasks[0] if self._tasks else None
            if not (isinstance(job, NodeSave) and job.is_complete and is_plain(job)):
                return
            self._tasks.popleft()
            size += job.size
            yield job
