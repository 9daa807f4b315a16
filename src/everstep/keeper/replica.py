"""The newest of what a node commits, in the memory of the next one.

A thread tells that node's keeper, which takes it from this one's store (keeper/serve.py): this
node's packs, all tables and the manifest. What was committed meanwhile is left out but for the
newest: the partner holds no more than one checkpoint, with what that goes back to, and the one that
arrives.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from everstep.errors import EverstepError, Unavailable
from everstep.keeper import wire
from everstep.keeper.copies import Traffic
from everstep.store.names import CheckpointName
from everstep.tiers.peer import Peer

log = logging.getLogger("everstep.keeper")

LEVEL = "replicated"


class Replica:
    """Of what this node commits. Any thread."""

    def __init__(self, partner: Peer, tell: Callable[[wire.Message], None]) -> None:
        """`tell`: the trainers, of each step that is there, or that could not be copied."""
        self.traffic = Traffic()
        self._partner, self._tell = partner, tell
        self._noted: set[CheckpointName] = set()
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="everstep-replica", daemon=True).start()

    def note(self, name: CheckpointName) -> None:
        """A step was committed. Does not block."""
        with self._changed:
            self._noted.add(name)
            self._changed.notify_all()

    def status(self) -> wire.Message:
        """For who looks on."""
        return {"level": LEVEL, "place": str(self._partner.root), **asdict(self.traffic)}

    def close(self) -> None:
        """End the thread; what it is copying is broken off."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while noted := self._take():
            began = time.monotonic()
            try:
                copied = self._partner.hold(str(max(noted)), self._look_up)
            except Exception as error:  # noqa: BLE001 - each reaches its handle
                self._fail(max(noted), error)
                continue
            self.traffic.problem = None
            self.traffic.bytes += copied["bytes"]
            self.traffic.seconds += time.monotonic() - began
            there = {str(max(noted)), *copied["checkpoints"]}
            for name in sorted(name for name in noted if str(name) in there):
                self.traffic.copied += 1
                self.traffic.newest, self.traffic.newest_at = name.step, time.time()
                self._say(name, {})
        self._partner.close()

    def _take(self) -> set[CheckpointName]:
        """What was committed; waits for it. Empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._noted or self._is_closed)
            noted, self._noted = self._noted, set()
            return set() if self._is_closed else noted

    def _fail(self, name: CheckpointName, error: Exception) -> None:
        """Training goes on; what is committed next is tried again."""
        if self._is_closed:
            return
        level = logging.INFO if self.traffic.problem else logging.WARNING
        self.traffic.problem = str(error)
        self.traffic.given_up += 1
        if not isinstance(error, EverstepError):
            log.exception("copying to %s", self._partner.root)
        log.log(level, "%s: no other node holds step %s", error, name.step)
        self._say(name, wire.failure(error))

    def _say(self, name: CheckpointName, more: wire.Message) -> None:
        at = {"level": LEVEL, "step": name.step, "epoch": name.epoch}
        self._tell({"type": "level", "traffic": self.status(), **at, **more})

    def _look_up(self, done: int, total: int) -> None:
        if self._is_closed:
            raise Unavailable(f"copying {done} of {total} bytes: it was closed")
