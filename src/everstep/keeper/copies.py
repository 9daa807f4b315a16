"""Copies of what is committed to another tier, while training goes on.

One thread for each tier, so that one that hangs delays nobody else. What is due there is sought in
the store when it begins: a keeper that comes after one that died goes on where that was. The newest
goes first, with what it goes back to; of what a slow link cannot take, the oldest untagged steps
are given up, and counted.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from everstep.errors import Conflict, EverstepError, Unavailable, Unsupported
from everstep.keeper import wire
from everstep.keeper.measured import Speed
from everstep.store import catalog, retain
from everstep.store.copy import copy_checkpoint, lead
from everstep.store.names import CheckpointName
from everstep.store.presence import Presence
from everstep.tiers.tier import Tier

log = logging.getLogger("everstep.keeper")

BACKLOG_MAX = 8
"""Untagged steps that wait for a tier; the store keeps them until they are there, or given up."""

STALLED_S = 600.0
"""After so long without anything copied a keeper waits for the tier no longer, when its trainers
have left; the next one goes on."""

_TOLD_MAX = 256
_WATCH_S = 0.5
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.5, 15.0


@dataclass(slots=True)
class Traffic:
    """What went to a tier so far. `newest`: the step that it has; `problem`: why nothing goes."""

    copied: int = 0
    given_up: int = 0
    bytes: int = 0
    seconds: float = 0.0
    waiting: int = 0
    newest: int | None = None
    newest_at: float | None = None
    """time.time() at which that was told."""
    problem: str | None = None


class Copies:
    """What goes from the store to one other tier. Any thread."""

    def __init__(
        self,
        disk: Tier,
        tier: Tier,
        level: str,
        every: int,
        keep: retain.Keep | None,
        tell: Callable[[wire.Message], None],
        claims: Tier,
        watches: bool = False,
    ) -> None:
        """`level`: of what is there. `every`: such steps are due, and tagged ones. `keep`: the
        tier's own retention. `tell`: the trainers, of each step that is there or never will be.
        `watches`: another node's keeper copies, and this one only tells of it."""
        self.traffic = Traffic()
        self.speed = Speed()
        self.claims = claims
        """The same tier, for who waits less long for it: it has the claims of epochs, too."""
        self.conflict: Conflict | None = None
        """Another writer has taken the tier over: nothing more of this run's counts."""
        self.told: deque[wire.Message] = deque(maxlen=_TOLD_MAX)
        self._disk, self._tier, self._level = disk, tier, level
        self.source = disk
        """What is copied: the store, or where each node has one of its own all of them as one."""
        self._watches = watches
        self._had_newest = False
        self._every, self._keep, self._tell = every, keep, tell
        self._cache: retain.NeedsCache = {}
        self._presence = Presence(tier)
        self._waiting: set[CheckpointName] = set()
        self._changed = threading.Condition()
        self._is_busy = True
        self._moved = time.monotonic()
        self._is_closed = threading.Event()
        threading.Thread(target=self._work, name=f"everstep-{level}", daemon=True).start()

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

    def note(self, name: CheckpointName) -> None:
        """A step was committed. Does not block."""
        if not self._is_due(name):
            return
        with self._changed:
            self._waiting.add(name)
            self._changed.notify_all()
        if self._is_closed.is_set():
            self._give_up(name, self.conflict or Unavailable(str(self.traffic.problem)))

    def show(self, is_needed: bool) -> None:
        """Let others know that somebody writes to the tier: while trainers need the keeper, or
        something is on its way. Does not block."""
        self._presence.show(not self._is_closed.is_set() and (is_needed or self.is_awaited))

    def status(self) -> wire.Message:
        """For who looks on."""
        with self._changed:
            self.traffic.waiting = len(self._waiting)
        return {"level": self._level, "place": str(self._tier.root), **asdict(self.traffic)}

    def close(self, patience_s: float = 0.0) -> None:
        """End the thread; what it is copying is broken off at the next block of bytes."""
        self._is_closed.set()
        self._presence.end(patience_s)
        with self._changed:
            self._changed.notify_all()

    # ---- its thread ------------------------------------------------------------------------

    def _work(self) -> None:
        pause_s, is_begun = _PAUSE_S_MIN, False
        while not self._is_closed.is_set():
            try:
                if not is_begun:
                    self._begin()
                    is_begun = True
                if name := self._next():
                    self._copy(name)
                self.traffic.problem, pause_s = None, _PAUSE_S_MIN
            except (Conflict, Unsupported) as error:
                self._end(error)
                return
            except Unavailable as error:
                self._note_problem(error)
                self._is_closed.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
            except _Closed:
                return
            except Exception as error:
                log.exception("copying to %s", self._tier.root)
                self._end(Unavailable(f"copying to {self._tier.root}: {error!r}"))
                return

    def _begin(self) -> None:
        """Find what is due and not there: of a run that goes on, the newest of it."""
        there = set(catalog.committed(self._tier))
        tagged = set(catalog.read_tags(self._disk).values())
        run = catalog.lineage(self._disk)
        run = [name for name in run if name.step % self._every == 0 or name in tagged]
        wanted = {name for name in run if name in tagged} | set(run[-BACKLOG_MAX:])
        with self._changed:
            self._waiting |= wanted - there
        for name in sorted(wanted & there):
            self._reached(name)

    def _next(self) -> CheckpointName | None:
        """The newest that is due; waits for one. What is too much is given up first."""
        with self._changed:
            self._is_busy = False
            self._changed.wait_for(lambda: self._waiting or self._is_closed.is_set())
            self._is_busy = not self._is_closed.is_set()
            if not self._waiting:
                return None
        tagged = set(catalog.read_tags(self._disk).values())
        with self._changed:
            untagged = sorted(self._waiting - tagged)
            newest, oldest_tagged = max(self._waiting), min(self._waiting & tagged, default=None)
        for name in untagged[:-BACKLOG_MAX]:
            self._give_up(name, Unavailable(f"step {name.step} was given up: {self._slow()}"))
        # In every second turn a tagged one: else new ones would hold it up for ever.
        is_tagged_due = oldest_tagged and self._had_newest
        self._had_newest = not is_tagged_due
        return oldest_tagged if is_tagged_due else newest

    def _copy(self, name: CheckpointName) -> None:
        """Raises Conflict where another writer has taken the tier over, Unavailable."""
        if self._watches:
            self._watch(name)
            return
        began = time.monotonic()
        try:
            lead(self._disk, self._tier)
            tags = [tag for tag, at in catalog.read_tags(self._disk).items() if at == name]
            copied = copy_checkpoint(
                self.source, self._tier, name, tags=tags, progress=self._look_up
            )
        except (Conflict, Unavailable, Unsupported, _Closed):
            raise
        except EverstepError as error:  # deleted meanwhile, or damaged
            self._give_up(name, error)
            return
        seconds = time.monotonic() - began
        self.traffic.bytes += copied.bytes
        self.traffic.seconds += seconds
        self.speed.note(copied.bytes, seconds)
        with self._changed:
            there = {name, *copied.checkpoints} & self._waiting
            self._waiting -= there
        for each in sorted(there):
            self._reached(each)
        if self._keep:
            retain.apply(self._tier, self._keep, self._cache)

    def _watch(self, name: CheckpointName) -> None:
        """Wait until another node's keeper has copied it."""
        if not catalog.is_there(self._tier, name):
            self._is_closed.wait(_WATCH_S)
            return
        with self._changed:
            self._waiting.discard(name)
        self._reached(name)

    def _reached(self, name: CheckpointName) -> None:
        self.traffic.copied += 1
        if name.step >= (self.traffic.newest or 0):
            self.traffic.newest, self.traffic.newest_at = name.step, time.time()
        self._say(name)

    def _give_up(self, name: CheckpointName, error: EverstepError) -> None:
        with self._changed:
            self._waiting.discard(name)
        self.traffic.given_up += 1
        log.warning("copying step %s to %s: %s", name.step, self._tier.root, error)
        self._say(name, error)

    def _say(self, name: CheckpointName, error: EverstepError | None = None) -> None:
        said = wire.failure(error) if error else {}
        at = {"level": self._level, "step": name.step, "epoch": name.epoch}
        self.told.append({"type": "level", "traffic": self.status(), **at, **said})
        self._tell(self.told[-1])

    def _end(self, error: EverstepError) -> None:
        """Nothing goes there any more."""
        self._note_problem(error)
        self.conflict = error if isinstance(error, Conflict) else None
        self._is_closed.set()
        for name in self.pinned:
            self._give_up(name, error)

    def _note_problem(self, error: EverstepError) -> None:
        if self.traffic.problem is None:
            log.warning("%s. What is due in %s waits", error, self._tier.root)
        self.traffic.problem = str(error)

    def _look_up(self, done: int, total: int) -> None:
        del done, total
        self._moved = time.monotonic()
        if self._is_closed.is_set():
            raise _Closed

    def _slow(self) -> str:
        return (
            f"{self._tier.root} takes fewer bytes than come, and {BACKLOG_MAX} newer steps wait. "
            f"Say remote_every= for fewer"
        )

    def _is_due(self, name: CheckpointName) -> bool:
        return self.takes(name.step) or name in catalog.read_tags(self._disk).values()

    def takes(self, step: int) -> bool:
        """Whether this step goes there without a tag. Any thread."""
        return step % self._every == 0


class _Closed(Exception):
    """Nobody needs the copy any more."""
