"""Teams: the sessions of all ranks of a run on this node, and the thread that works for them.

A step is written when all ranks have handed in theirs: the heads of the ranks' queues, while they
are of the same step, are joined. A rank that leaves a step out, says so, or dies, ends it for all:
what others have of it is given up, as nobody could ever read it.

Invariants:
* Whatever happens to a rank, the others' jobs end: they are joined, or fail with the reason.
* All ranks of a team have one epoch; the first that claims it does it for all.
* Each job is answered: where an exception that nobody thought of keeps this keeper from it, it ends
  at once. Those who are attached start another one, which looks at what is sealed; where that ends
  as well, and so on, they are told.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from everstep.errors import EverstepError, Unavailable, kind_of
from everstep.format.manifest import CheckpointName
from everstep.keeper import wire
from everstep.keeper.copies import RemoteCopies, Replica
from everstep.keeper.encoder import Encoder
from everstep.keeper.existing import was_committed
from everstep.keeper.job import Gap, Job
from everstep.keeper.live_replica import LiveReplica
from everstep.keeper.persist import apply_retention, begin_window, is_plain, persist
from everstep.keeper.ranks.node_save import NodeSave
from everstep.keeper.ranks.nodes import Nodes
from everstep.keeper.router import Router
from everstep.keeper.writer import Outcome, Writer
from everstep.store import catalog, commit, retain
from everstep.store.copy import Copier
from everstep.tiers.peer import Address, Peer
from everstep.tiers.tier import Tier, Union

if TYPE_CHECKING:
    from everstep.keeper.session import Session

log = logging.getLogger("everstep.keeper")

Task = NodeSave | Callable[[], None]

GROUP_BYTES_MAX = 256 << 20
"""Of records that are committed together."""

AWAY_S = 10.0
"""How long another node's keeper is awaited, when it has died and another one starts."""


class Team:
    """The ranks of one run on this node, by their local number. Any thread, but for what says
    otherwise."""

    def __init__(
        self,
        disk: Tier,
        place: wire.Place,
        hello: wire.Message,
        wake: Callable[[], None],
        remote: RemoteCopies | None,
        live: LiveReplica | None,
    ) -> None:
        """As the first of its ranks greets. `wake` is called when the queue has become empty.
        `remote`: to the remote tier, of what this node commits. `live`: the replica that follows
        what they commit.
        Raises ValueError, KeyError or TypeError for a greeting that is none."""
        self.place = place
        self.size = len(self.place.ranks)
        keep = retain.Keep(**hello["keep"]) if hello["keep"] else None
        deletes = self.place.commits or self.place.own_store
        encoder = Encoder((hello.get("tiers") or {}).get("codecs", "auto"))
        self.writer = Writer(disk, keep if deletes else None, remote=remote, encoder=encoder)
        route = (hello.get("tiers") or {}).get("route", "local")
        self._router: Router | None = None
        if route in ("auto", "remote") and remote and self.place.is_alone:
            self._router = Router(route, self.writer, remote)
        self._nodes: Nodes | None = None
        if self.place.nodes > 1:
            self._nodes = Nodes(self.writer, self.place, self.is_awaited)
        self.replica: Replica | None = None
        self._wake = wake
        self._sessions: dict[int, Session] = {}
        self._queues: list[deque[Job | Gap]] = [deque() for _ in range(self.size)]
        self._gone: dict[int, str] = {}
        self._began = time.monotonic()
        self._tasks: deque[Task] = deque()
        self._is_busy = self._is_closed = False
        self._changed = threading.Condition()
        self.live = live
        if remote and not self.place.own_store:
            remote.begin()
        if hello.get("partners"):
            self.meet(hello["partners"])
        threading.Thread(target=self._work, name="everstep-team", daemon=True).start()

    def meet(self, partners: wire.Message) -> None:
        """Where the keepers of all nodes are, by number: of those with stores of their own, to read
        them; of the next one, whether it holds what this one commits. Raises ValueError, KeyError,
        TypeError or IndexError."""
        place, found, own = self.place, dict(enumerate(partners["nodes"])), None
        known = {node: Address(*said) for node, said in found.items() if said}
        if self._nodes and place.own_store:
            memories = [Peer(address) for address in known.values()]
            away_s = 0.0 if place.commits else AWAY_S  # who commits asks again by itself
            others = [(node, address) for node, address in known.items() if node != place.node]
            is_awaited, disk = self.is_awaited, self.writer.disk
            stores = {n: Peer(a, "store", away_s=away_s, is_awaited=is_awaited) for n, a in others}
            self._nodes.stores = stores
            every = Union([disk, *stores.values(), *memories])
            own = Copier(every, disk, place.parts_of(place.node))
            if self.writer.remote:
                self.writer.remote.copier.source = every
                self.writer.remote.begin()
        following = known.get((place.node + 1) % place.nodes)
        if partners["replicates"] and following and self.replica is None:
            self.replica = Replica(Peer(following), own, self.tell_all)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running, or waits for another rank."""
        with self._changed:
            return not self.has_tasks and not any(self._queues)

    @property
    def has_tasks(self) -> bool:
        """Whether its thread has something to do; steps that wait for other ranks do not count."""
        return bool(self._tasks) or self._is_busy

    @property
    def is_empty(self) -> bool:
        """Whether no rank is left."""
        return not self._sessions

    def status(self) -> wire.Message:
        """For who looks on: what comes to the store, as of other tiers."""
        waiting = len(self._tasks) + max(map(len, self._queues))
        return self.writer.traffic.status(waiting)

    def join(self, place: wire.Place, session: "Session", hello: wire.Message) -> None:
        """A rank has attached. Raises ValueError, KeyError or TypeError where it cannot be."""
        epoch = None if hello["epoch"] is None else wire.number(hello["epoch"])
        local = place.local
        with self._changed:
            if place.ranks != self.place.ranks or local in self._sessions:
                raise ValueError(f"local rank {local} of {place.ranks}: is taken, or of others")
            self._sessions[local] = session
        if epoch is not None:
            self.put(lambda: self._take_over(epoch))

    def leave(self, local: int) -> None:
        """Its session is closed: it has no jobs any more."""
        with self._changed:
            self._sessions.pop(local, None)
        self.lose(local, "it has left")

    def lose(self, local: int, reason: str) -> None:
        """Nothing more comes from this rank, nor of what it has spread over steps; what it has
        handed in counts."""
        with self._changed:
            self._gone[local] = reason
            self._match()
            self.put(lambda: begin_window(self.writer, None))

    def return_of(self, local: int) -> None:
        """The rank has attached."""
        with self._changed:
            self._gone.pop(local, None)

    def end_silence(self, seconds: float) -> None:
        """Wait no longer than that for ranks that have never attached (to this keeper)."""
        if len(self._sessions) < self.size and time.monotonic() - self._began > seconds:
            for local in set(range(self.size)) - self._sessions.keys() - self._gone.keys():
                self.lose(local, "it has not attached")

    def offer(self, local: int, job: Job | Gap, *, is_found: bool = False) -> None:
        """The next job of a rank, or that it left a step out. `is_found`: a former keeper may have
        committed it, and have told others of it, who hand in nothing more."""
        with self._changed:
            self._queues[local].append(job)
            self._match()
        if is_found and self.size > 1 and isinstance(job, Job):
            self.put(lambda: self._end_committed(local, job))

    def put(self, task: Task) -> None:
        """Do it after what is queued."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; nothing is queued any more."""
        if self.replica:
            self.replica.close()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.writer.hasher.shutdown(wait=False)

    # ---- joining ---------------------------------------------------------------------------

    def _match(self) -> None:
        """Queue what is whole, and the end of what can never become so, in the order of the queue:
        what is written is not delayed by it. With the lock held."""
        while any(self._queues):
            heads = {local: queue[0] for local, queue in enumerate(self._queues) if queue}
            missing = [local for local in range(self.size) if local not in heads]
            if any(local not in self._gone for local in missing):
                break
            newest = max(head.step for head in heads.values())
            late = {local: head for local, head in heads.items() if head.step < newest}
            taken = late or heads
            for local in taken:
                self._queues[local].popleft()
            jobs = [head for head in heads.values() if isinstance(head, Job)]
            if len(jobs) == self.size and not late:
                self.put(NodeSave(jobs, self.place, self._nodes))
                continue
            reasons = [
                *(f"local rank {local} is gone: {self._gone[local]}" for local in missing),
                *(
                    f"local rank {local} left it out: {head.reason}"
                    for local, head in taken.items()
                    if isinstance(head, Gap)
                ),
                f"local ranks {sorted(heads.keys() - late.keys())} left it out",
            ]
            if self._nodes:
                for step, call in sorted({(head.step, head.call) for head in taken.values()}):
                    self._nodes.leave_out(step, call, reasons[0])
            if jobs or self._nodes:  # else a disk that hangs would let tasks pile up for nothing
                self.put(lambda taken=taken, reason=reasons[0]: self._give_up(taken, reason))  # type: ignore[misc]

    def _give_up(self, heads: Mapping[int, Job | Gap], reason: str) -> None:
        """Other ranks, also those of other nodes, need not wait for these, nor they for others."""
        if self._nodes:
            self._nodes.tell_left_out()
        for local, job in heads.items():
            session = self._sessions.get(local)
            if session is None or isinstance(job, Gap):
                continue
            text = f"saving step {job.step}: {reason}. Without it there is no step"
            session.end(job, was_committed(self.writer, job) or Unavailable(text))

    def _end_committed(self, local: int, job: Job) -> None:
        """What a former keeper has committed need not wait for other ranks."""
        if found := was_committed(self.writer, job):
            with self._changed:
                if job not in self._queues[local]:
                    return
                self._queues[local].remove(job)
            if session := self._sessions.get(local):
                session.end(job, found)

    # ---- its thread ------------------------------------------------------------------------

    def claim(self, message: wire.Message, local: int, session: "Session") -> None:
        """Claim an epoch for this trainer, and answer; later in the team's thread. The ranks of a
        team make the same claims: each gets what the first one got."""
        with self._changed:  # what it left out before counts no more: it may save these steps again
            jobs = [each for each in self._queues[local] if isinstance(each, Job)]
            self._queues[local] = deque(jobs)
        self.put(lambda: self._claim(message, session))

    def _claim(self, message: wire.Message, session: "Session") -> None:
        reply: wire.Message = {"type": "claimed", "id": message["id"]}
        writer = self.writer
        try:
            number, said = wire.number(message["number"]), message["parent"]
            writer.parent = None if said is None else CheckpointName(*map(wire.number, said))
            epoch = self._epoch(writer.parent, number)
            if epoch != writer.epoch:
                writer.epoch, writer.run = epoch, None
                if self._nodes:
                    self._nodes.tell_left_out()
            reply |= {"epoch": epoch, "number": number}
        except Exception as error:
            if not isinstance(error, EverstepError):
                log.exception("a claim of trainer %s", session.pid)
            reply |= wire.failure(error)
        session.tell(reply)

    def _epoch(self, parent: CheckpointName | None, number: int) -> int:
        """A new one; of several ranks the one that this claim got before (from a keeper that has
        died), or that rank 0's node claims."""
        disk, place = self.writer.disk, self.place
        remote = self.writer.remote.tier if self.writer.remote else None
        if place.is_alone:
            return commit.claim_epoch(disk, parent, remote=remote)
        attachment = place.named(number)
        if self._nodes and not place.commits:
            return self._nodes.await_epoch(attachment)
        return commit.claim_epoch(disk, parent, attachment, remote)

    def is_awaited(self) -> bool:
        """Whether a trainer lives. Any thread."""
        with self._changed:
            return bool(self._sessions.keys() - self._gone.keys())

    def _take_over(self, epoch: int) -> None:
        """A rank has claimed an epoch at a former keeper, which may have committed for it since:
        the newest counts for all."""
        writer = self.writer
        if epoch <= writer.epoch:
            return
        writer.epoch, writer.parent = epoch, None
        try:
            own = [name for name in catalog.committed(writer.disk) if name.epoch == epoch]
            claim = catalog.read_epoch(writer.disk, epoch)
            parent = None if claim.parent is None else CheckpointName(claim.fork, claim.parent)
            writer.parent = max(own, default=parent)
            if self.replica and own:
                self.replica.note(max(own))
        except EverstepError as error:
            log.warning("looking for the newest checkpoint: %s", error)

    def _work(self) -> None:
        while task := self._take():
            try:
                if isinstance(task, NodeSave):
                    self._persist(task)
                else:
                    task()
            except Exception:  # who waits for an answer would do so for ever
                log.exception("a task of a team; this keeper ends, another one will be started")
                os._exit(1)
            del task  # it holds an arena

    def _take(self) -> Task | None:
        """The next one, after the one before it is done; blocks. None where there will be none."""
        with self._changed:
            self._is_busy = False
            if not self._tasks:
                self._wake()
            self._changed.wait_for(lambda: self._tasks or self._is_closed)
            self._is_busy = bool(self._tasks)
            task = self._tasks.popleft() if self._tasks else None
        if isinstance(task, NodeSave):
            task.take()
        return task

    def _group(self, first: NodeSave) -> Iterator[NodeSave]:
        """`first`, and the records that wait behind it. Only records are taken together, and only
        sealed ones are added: the next when the one before it is written. Where there is a second
        memory, what waits in the arena must be free to move there."""
        yield first
        spills = any(each.spill for each in self._sessions.values())
        save, size = first, 0
        while is_plain(save) and (size := size + save.size) < GROUP_BYTES_MAX and self._tasks:
            following = self._tasks[0]
            if not isinstance(following, NodeSave) or not is_plain(following):
                return
            jobs = following.jobs
            if not all(j.complete and (j.arena.is_file or not spills) for j in jobs):
                return
            self._tasks.popleft()
            following.take()
            yield (save := following)

    def _persist(self, first: NodeSave) -> None:
        if self.writer.remote and (taken := self.writer.remote.conflict):
            self._end_save(first, taken)
            return
        if self._router and (routed := self._router.persist(first, self._announce_written)):
            self._end_save(first, routed)
            return
        before, is_record = self.writer.traffic.copied, is_plain(first)
        for save, outcome in persist(self.writer, self._group(first), self._announce_written):
            self._end_save(save, outcome)
        if committed := self.writer.traffic.copied - before:
            apply_retention(self.writer, committed if is_record else 0)

    def _announce_written(self, save: NodeSave) -> None:
        for local, job in enumerate(save.jobs):
            if session := self._sessions.get(local):
                session.tell({"type": "written", "sequence": job.sequence})

    def _end_save(self, save: NodeSave, outcome: Outcome | Exception) -> None:
        if self._nodes and isinstance(outcome, Exception):
            text, kind = str(outcome), kind_of(outcome)
            self._nodes.leave_out(save.jobs[0].step, save.call, text, kind)
            self._nodes.tell_left_out()
        elif self._nodes and isinstance(outcome, Outcome):
            self._nodes.note_commit(outcome.name)
        for local, job in enumerate(save.jobs):
            if session := self._sessions.get(local):
                session.end(job, outcome)
        if isinstance(outcome, Outcome) and not outcome.is_part:
            self._note_commit(save, outcome)

    def _note_commit(self, save: NodeSave, outcome: Outcome) -> None:
        remote = self.writer.remote
        if remote and outcome.is_routed:
            remote.reached(outcome.name)
            return
        if remote:
            remote.note(outcome.name)
        self.writer.traffic.reached(outcome.name.step)
        if self.replica:
            self.replica.note(outcome.name)
        if self.live:
            self.live.note(self, outcome.name, save.jobs, takes_replay=outcome.takes_replay)

    def retain(self) -> None:
        """What was kept for the sake of later steps may go, as one of them is whole now."""
        self.put(lambda: apply_retention(self.writer))

    def tell_all(self, message: wire.Message) -> None:
        """Tell the trainers of all ranks."""
        for session in list(self._sessions.values()):
            session.tell(message)
