"""Copies of what is committed, in other tiers, while training goes on: in the remote one, and in
the memory of the next node.

One thread for each tier, so that one that hangs delays nobody else. The newest goes first, with
what it goes back to; of what a slow link cannot take, the oldest untagged steps are given up, and
counted.
"""

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from everstep.errors import Conflict, Corrupt, EverstepError, Missing, Unavailable, Unsupported
from everstep.format.manifest import CheckpointName
from everstep.keeper import wire
from everstep.keeper.measured import Traffic
from everstep.store import catalog, names, retain
from everstep.store.copy import Copier
from everstep.store.presence import Presence
from everstep.tiers.objects import Url
from everstep.tiers.peer import Peer
from everstep.tiers.route import next_copy
from everstep.tiers.tier import Tier, Union

log = logging.getLogger("everstep.keeper")

BACKLOG_MAX = 8
"""Untagged steps that wait for a tier; the store keeps them until they are there, or given up."""

STALLED_S = 600.0
"""After so long without anything copied a keeper waits for the tier no longer, when its trainers
have left; the next one goes on."""

_TOLD_MAX = 256
_WATCH_S = 0.5
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.5, 15.0


class Copies(ABC):
    """What goes to one other tier. Any thread."""

    backlog_max = BACKLOG_MAX

    def __init__(self, level: str, place: Path | Url, tell: Callable[[wire.Message], None]) -> None:
        """`level`: of what is there. `tell`: the trainers, of each step that is there or never will
        be."""
        self.traffic = Traffic(level, str(place))
        self.conflict: Conflict | None = None
        """Another writer has taken the tier over: nothing more of this run's counts."""
        self._told: deque[wire.Message] = deque(maxlen=_TOLD_MAX)
        self._tell = tell
        self._waiting: set[CheckpointName] = set()
        self._changed = threading.Condition()
        self._had_newest = self._is_busy = False
        self._moved = time.monotonic()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"everstep-{level}", daemon=True)

    def begin(self) -> None:
        """Start the thread, where it has not begun."""
        if self._thread.ident is None:
            self._is_busy = True
            self._thread.start()

    def note(self, name: CheckpointName) -> None:
        """A step was committed. Does not block."""
        if not self._is_due(name):
            return
        with self._changed:
            self._waiting.add(name)
            self._changed.notify_all()
        if self._is_closed.is_set():
            self._give_up(name, self.conflict or Unavailable(str(self.traffic.problem)))

    def status(self) -> wire.Message:
        """For who looks on."""
        with self._changed:
            return self.traffic.status(len(self._waiting))

    def news(self) -> Iterator[wire.Message]:
        """What a trainer that comes has missed."""
        yield from list(self._told)
        if self.traffic.problem:
            yield {"type": "tier", "traffic": self.status()}

    def close(self) -> None:
        """End the thread; what it is copying is broken off at the next block of bytes."""
        self._is_closed.set()
        with self._changed:
            self._changed.notify_all()

    # ---- what tiers do differently ---------------------------------------------------------

    @abstractmethod
    def _copy(self, name: CheckpointName) -> tuple[Sequence[CheckpointName], int]:
        """Copy it, with what it goes back to; which ones are there now, and the bytes written.
        Raises Conflict where another writer has taken the tier over, Unavailable where it is to be
        tried again."""

    def _is_due(self, name: CheckpointName) -> bool:
        return True

    def _tagged(self) -> set[CheckpointName]:
        return set()

    def _left(self) -> set[CheckpointName]:
        return set()

    # ---- its thread ------------------------------------------------------------------------

    def _work(self) -> None:
        pause_s, is_begun = _PAUSE_S_MIN, False
        while not self._is_closed.is_set():
            try:
                if not is_begun:
                    left = self._left()
                    with self._changed:
                        self._waiting |= left
                    is_begun = True
                if name := self._next():
                    self._bring(name)
                self.traffic.problem, pause_s = None, _PAUSE_S_MIN
            except (Conflict, Unsupported) as error:
                self._end(error)
                return
            except Unavailable as error:
                self._note_problem(error)
                self._is_closed.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
            except Exception as error:
                log.exception("copying to %s", self.traffic.place)
                self._end(Unavailable(f"copying to {self.traffic.place}: {error!r}"))
                return

    def _next(self) -> CheckpointName | None:
        """The newest that is due; waits for one. What is too much is given up first."""
        with self._changed:
            self._is_busy = False
            self._changed.wait_for(lambda: self._waiting or self._is_closed.is_set())
            self._is_busy = not self._is_closed.is_set()
            if not self._waiting:
                return None
        tagged = self._tagged()
        with self._changed:
            name, dropped = next_copy(
                self._waiting, tagged, self.backlog_max, had_newest=self._had_newest
            )
            self._had_newest = name == max(self._waiting)
        for each in dropped:
            text = (
                f"step {each.step} was given up: {self.traffic.place} takes fewer bytes than come, "
                f"and newer steps wait. Save less often, or say remote_every= for fewer"
            )
            self._give_up(each, Unavailable(text))
        return name

    def _bring(self, name: CheckpointName) -> None:
        began = time.monotonic()
        try:
            found, size = self._copy(name)
        except (Conflict, Unavailable, Unsupported):
            raise
        except EverstepError as error:  # deleted meanwhile, or damaged
            self._give_up(name, error)
            return
        if size:
            self.traffic.wrote(size, time.monotonic() - began)
        with self._changed:
            there = self._waiting.intersection(found)
            self._waiting -= there
        for each in sorted(there):
            self.reached(each)

    def reached(self, name: CheckpointName) -> None:
        """It is there. Any thread."""
        with self._changed:
            self.traffic.reached(name.step)
        self._say(name)

    def _give_up(self, name: CheckpointName, error: EverstepError) -> None:
        with self._changed:
            self._waiting.discard(name)
        self.traffic.given_up += 1
        level = logging.INFO if self.traffic.problem else logging.WARNING  # that has been told
        log.log(level, "copying step %s to %s: %s", name.step, self.traffic.place, error)
        self._say(name, error)

    def _say(self, name: CheckpointName, error: EverstepError | None = None) -> None:
        said = wire.failure(error) if error else {}
        at = {"level": self.traffic.level, "step": name.step, "epoch": name.epoch}
        self._told.append({"type": "level", "traffic": self.status(), **at, **said})
        self._tell(self._told[-1])

    def _end(self, error: EverstepError) -> None:
        self._note_problem(error)
        self.conflict = error if isinstance(error, Conflict) else None
        self._is_closed.set()
        with self._changed:
            waiting = set(self._waiting)
        for name in waiting:
            self._give_up(name, error)

    def _note_problem(self, error: EverstepError) -> None:
        is_new, self.traffic.problem = self.traffic.problem is None, str(error)
        if is_new and not self._is_closed.is_set():
            log.warning("%s. What is due in %s waits", error, self.traffic.place)
            self._tell({"type": "tier", "traffic": self.status()})

    def _look_up(self, done: int, total: int) -> None:
        del done, total
        self._moved = time.monotonic()
        if self._is_closed.is_set():
            raise Unavailable(f"copying to {self.traffic.place}: nobody needs it any more")


class RemoteCopies(Copies):
    """What goes from the store to the remote tier. What is due there is sought in the store when it
    begins: a keeper that comes after one that died goes on where that was."""

    def __init__(
        self,
        disk: Tier,
        tier: Tier,
        every: int,
        keep: retain.Keep | None,
        tell: Callable[[wire.Message], None],
        watches: bool = False,
    ) -> None:
        """`every`: such steps are due, and tagged ones. `keep`: the tier's own retention.
        `watches`: another node's keeper copies, and this one only tells of it. Nothing is copied
        before `begin`."""
        super().__init__("remote", tier.root, tell)
        self.copier = Copier(disk, tier, progress=self._look_up)
        """Of the store, or where each node has one of its own, of all that they have as one."""
        self.tier = tier
        self._watches = watches
        self._every, self._keep = every, None if watches else keep
        self._cache: retain.NeedsCache = {}
        self._presence = Presence(tier)

    @property
    def is_awaited(self) -> bool:
        """Whether something that is due is on its way there."""
        with self._changed:
            is_idle = not self._waiting and not self._is_busy
        is_stalled = time.monotonic() - self._moved > STALLED_S
        return not (is_idle or is_stalled or self._is_closed.is_set())

    @property
    def pinned(self) -> frozenset[CheckpointName]:
        """What the store must keep until it is copied."""
        with self._changed:
            return frozenset(self._waiting)

    def takes(self, step: int) -> bool:
        """Whether this step goes there without a tag."""
        return step % self._every == 0

    def show(self, is_needed: bool) -> None:
        """Let others know that somebody writes to the tier: while trainers need the keeper, or
        something is on its way. Does not block."""
        self._presence.show(not self._is_closed.is_set() and (is_needed or self.is_awaited))

    def close(self, patience_s: float = 0.0) -> None:
        """See Copies; so long at most, until others know that nobody writes there."""
        super().close()
        self._presence.end(patience_s)

    def _is_due(self, name: CheckpointName) -> bool:
        with contextlib.suppress(EverstepError):  # else it may have a tag
            return self.takes(name.step) or name in self._tagged()
        return True

    def _tagged(self) -> set[CheckpointName]:
        return set(self._tags().values())

    def _tags(self) -> dict[str, CheckpointName]:
        """Those that can be read: who looks at the store is told of the others."""
        return catalog.read_tags(self.copier.source, are_all_needed=False)

    def _left(self) -> set[CheckpointName]:
        there, tagged = set(catalog.committed(self.tier)), self._tagged()
        run = catalog.lineage(self.copier.source)
        run = [name for name in run if self.takes(name.step) or name in tagged]
        wanted = {name for name in run if name in tagged} | set(run[-BACKLOG_MAX:])
        for name in sorted(wanted & there):
            self.reached(name)
        return wanted - there

    def _copy(self, name: CheckpointName) -> tuple[Sequence[CheckpointName], int]:
        if self._watches:
            is_there = catalog.is_there(self.tier, name)
            self._is_closed.wait(0.0 if is_there else _WATCH_S)
            return [name] * is_there, 0
        self.copier.lead()
        tags = [tag for tag, at in self._tags().items() if at == name]
        try:
            copied = self.copier.copy(name, tags)
        except (Missing, Corrupt) as error:
            if isinstance(source := self.copier.source, Union) and (away := source.problem):
                raise away from error  # the node that has it may come back
            raise
        return [name, *copied.checkpoints], copied.bytes

    def _bring(self, name: CheckpointName) -> None:
        super()._bring(name)
        self.tidy()

    def tidy(self) -> None:
        """Delete there what its retention does not cover. Any thread."""
        if self._keep:
            retain.tidy(self.tier, self._keep, self._cache)


class Replica(Copies):
    """What the next node holds in its memory of what this one commits: its keeper takes it from
    this one's store (keeper/serve.py), the newest alone, with what that goes back to."""

    backlog_max = 1

    def __init__(
        self, partner: Peer, own: Copier | None, tell: Callable[[wire.Message], None]
    ) -> None:
        """`own`: to this node's own store, of what belongs there, from wherever that is."""
        super().__init__("replicated", partner.root, tell)
        self._partner, self._own = partner, own
        self._restored: CheckpointName | None = None
        self.begin()

    def restored(self, name: CheckpointName) -> None:
        """The run goes on from there. A node that was lost has nothing of it by then, and of the
        others' nobody holds what that one did: both are as before after this. Does not block."""
        self._restored = name
        self.note(name)

    def _copy(self, name: CheckpointName) -> tuple[Sequence[CheckpointName], int]:
        if self._own and name == self._restored:
            self._own.copy(name)
        said = self._partner.hold(str(name), self._look_up)
        new = map(names.parse_checkpoint, said["checkpoints"])
        return [name, *(each for each in new if each)], said["bytes"]
