"""Saves: the captures that are on their way, their handles, and what becomes of them.

Handles rise and fall here and nowhere else: by the copying and sealing threads (captured, failed),
by the client's thread (held, local, failed, the keeper lost), and by the one that tells the keeper
whether a copy was clean (failed).
"""

import contextlib
import logging
import queue
import threading
import time

from everstep.capture.copier import Capture
from everstep.capture.plan import Still
from everstep.capture.pool import Pool
from everstep.capture.trust import Trust
from everstep.errors import KINDS, EverstepError, Unavailable, Unsupported, kind_of
from everstep.handle import LEVELS, Levels, Metrics, SaveHandle
from everstep.keeper.client import Client
from everstep.keeper.wire import Message

log = logging.getLogger("everstep")

_TORN_MAX = 64
_DURATIONS_MAX = 1000
_LOOK_S = 1.0
_TOLD_MAX = 10
"""Failures in a row that are logged one by one; then each hundredth is."""


PARTNER_S = 20.0
"""How long a call waits for the save before it to be held by another node."""

STALLED = (
    "nothing is being saved. Does the disk hang? Training goes on, and waits no more before "
    "something is saved again"
)


class Skipped(Unavailable):
    """A save that when_full="skip" left out."""


class Saves:
    """All saves of one Checkpointer. Thread-safe."""

    _client: Client
    _pool: Pool

    def __init__(self, metrics: Metrics, trust: Trust, levels: Levels) -> None:
        """`trust` is told of each call that comes to nothing, and of what keeps a replica from
        following."""
        self.levels = levels
        self.newest: SaveHandle | None = None
        self.still = Still()
        self.calls = 0
        """Of step() and save(). All count, whatever comes of them: by their numbers ranks know
        which of their saves belong together."""
        self._trust = trust
        self._failures_in_row = 0
        self._metrics = metrics
        self._begun: dict[int, Capture] = {}
        self._partner_is_away = False
        self._spreading: dict[int, SaveHandle] = {}
        """By step: what other tiers have not, or not all, yet."""
        self._torn: dict[int, str] = {}
        self._failing = threading.RLock()
        self._written: queue.SimpleQueue[Capture | None] = queue.SimpleQueue()

    def attach(self, client: Client, pool: Pool) -> None:
        """Whom to answer, and whom to tell of free memory; before the first save."""
        self._client, self._pool = client, pool
        threading.Thread(target=self._answer_all, name="everstep-answer", daemon=True).start()

    def note(self, handle: SaveHandle) -> None:
        """This is the newest from now on."""
        self.newest = handle
        if handle.further:
            self._spreading[handle.step] = handle
            self._drop_settled()
        self._metrics.saves += 1

    def close(self) -> None:
        """End the answering thread when it has nothing left."""
        self._written.put(None)

    def begin(self, capture: Capture) -> None:
        """The capture is about to be copied."""
        capture.handle.confirm_with(capture.await_check)
        self._begun[capture.slot.sequence] = capture

    @property
    def pending(self) -> bool:
        """Whether a save has neither become durable nor failed."""
        return bool(self._begun)

    def wait(self, level: str, timeout: float | None) -> None:
        """See Checkpointer.wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        begun = [capture.handle for capture in list(self._begun.values())]
        rows = [(handle, level if level in LEVELS else None) for handle in begun]
        spreading = list(self._spreading.values())
        rows += [(handle, level) for handle in spreading if level in handle.further]
        for handle, awaited in rows:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with contextlib.suppress(EverstepError):
                handle.wait(awaited, left)
        newest = self.newest
        if newest and newest.error and not isinstance(newest.error, Skipped):
            raise newest.error
        if newest and level != self.levels.durable and (problem := newest.problems.get(level)):
            raise problem

    def await_partner(self) -> None:
        """Block until the save before this one is held by the other node, so that the loss of this
        one loses one step, never two; a few seconds at most, and not again before it answers. For
        the thread that trains."""
        newest = self.newest
        if newest is None or "replicated" not in newest.further or self._partner_is_away:
            return
        try:
            newest.wait("replicated", PARTNER_S)
        except (EverstepError, TimeoutError) as error:
            if newest.error is None:
                self._partner_is_away = True
                log.warning(
                    "%s. Training waits for the other node no more before it answers", error
                )

    def await_durable(self, handle: SaveHandle) -> None:
        """Block until a save is durable, as long as patience lasts. Raises the save's error, or
        Unavailable. For the thread that trains."""
        since = time.monotonic()
        while not handle.done() and self._client.patience.lasts(since):
            with contextlib.suppress(TimeoutError):
                handle.wait(timeout=_LOOK_S)
        if not handle.done():
            raise Unavailable(f"waiting for step {handle.step} to be durable: {STALLED}")
        handle.wait()

    def on_event(self, message: Message) -> None:
        """What the keeper says of a save, or of itself. Client's thread."""
        kind = message["type"]
        if "sequence" not in message:
            self._on_news(message)
            return
        capture = self._begun.get(message["sequence"])
        if capture is None:
            if kind == "written":  # asked again, by another keeper
                sequence = message["sequence"]
                self._client.confirm(sequence, self._torn.get(sequence))
            return
        if kind == "held":
            capture.handle.advance("held")
        elif kind == "written":
            self._written.put(capture)
        elif kind == "spilled":
            self._metrics.spills += 1
            self._pool.notify()
        elif kind == "local":
            self._on_commit(capture, message)
        elif kind == "failed":
            error = KINDS.get(message["kind"], Unavailable)(message["message"])
            self.fail(capture.handle, error)
            self.forget(capture)
            self._pool.retire_old()

    def _answer_all(self) -> None:
        """Tell the keeper whether each copy was clean, as soon as that is known. It writes one
        after the other, so that none waits here for another."""
        while capture := self._written.get():
            try:
                self._answer(capture)
            except Exception:
                log.exception("telling the keeper whether step %s is clean", capture.step)
            del capture  # it holds its arena

    def _answer(self, capture: Capture) -> None:
        problem: str | None = f"saving step {capture.step}: the copy could not be checked"
        try:
            problem = capture.await_check()
        finally:
            self._client.confirm(capture.slot.sequence, problem)
        if problem:  # not left to the keeper's answer, which may be lost with it
            self._note_torn(capture, problem)
            self.fail(capture.handle, Unsupported(problem))
            self.forget(capture)

    def _on_commit(self, capture: Capture, message: Message) -> None:
        handle = capture.handle
        self._failures_in_row = 0
        is_part = bool(message.get("is_part"))  # of a later checkpoint, with which it is committed
        self._metrics.commits += not is_part
        self._metrics.bytes_written += message["bytes"]
        error = Unavailable(message["warning"]) if message.get("warning") else None
        if error:  # durable, but not tagged
            log.error("%s", error)
            self._metrics.last_error = str(error)
        handle.bytes = message["bytes"]
        if message.get("is_routed"):
            handle.go_to("remote")
        handle.advance(handle.durable, error)
        durations = self._metrics.durable_seconds
        durations.append(handle.times[handle.durable] - handle.times["called"])
        del durations[:-_DURATIONS_MAX]
        self.forget(capture)
        self._pool.retire_old()

    def _on_news(self, message: Message) -> None:
        """Of the keeper itself, or of what it does for no save in particular."""
        if message["type"] == "lost":
            self._pool.notify()
            if message["is_final"]:
                self._on_loss(message["message"])
        elif message["type"] == "found":
            self._pool.notify()
        elif message["type"] == "still":
            self.still.hear(message["seen"])
        elif message["type"] == "level":
            self._on_level(message)
        elif message["type"] == "tier":
            traffic = message["traffic"]
            self._metrics.tiers[traffic["level"]] = traffic
            log.warning("%s. What is due in %s waits", traffic["problem"], traffic["place"])
        elif message["type"] in ("replica", "no_replica"):
            self._on_replica(message)

    def _on_level(self, message: Message) -> None:
        handle, level = self._spreading.get(message["step"]), message["level"]
        self._metrics.tiers[level] = message["traffic"]
        if handle is None or handle.epoch != message["epoch"] or level not in handle.further:
            return
        if kind := message.get("kind"):
            handle.fail(KINDS.get(kind, Unavailable)(message["message"]), level)
        else:
            handle.advance(level)
            if level == "replicated":
                self._note_replica(handle)
        self._drop_settled()

    def _note_replica(self, newest: SaveHandle) -> None:
        """The other node holds this one, and none that came before it any more."""
        self._partner_is_away = False
        for step, handle in list(self._spreading.items()):
            if step < newest.step and "replicated" not in handle.times:
                text = f"step {step}: the other node holds step {newest.step} in its place"
                handle.fail(Unavailable(text), "replicated")

    def _drop_settled(self) -> None:
        """Of what has come everywhere, or failed, nothing more is heard."""
        for step, handle in list(self._spreading.items()):
            settled = handle.times.keys() | handle.problems.keys()
            if handle.error or settled.issuperset(handle.further):
                self._spreading.pop(step, None)

    def _on_replica(self, message: Message) -> None:
        metrics = self._metrics
        if message["type"] == "replica":
            metrics.replica_step = message["name"] and message["name"][0]
            metrics.replica_seconds = message["seconds"]
            metrics.replica_bases += message["has_base"]
        else:
            metrics.replica_failures += 1
            metrics.last_error = message["message"]
            self._trust.note_replica(wants_base=message["wants_base"], is_end=message["is_end"])
            end = ". There will be none any more" if message["is_end"] else ""
            log.warning("the replica: %s%s", message["message"], end)

    def _note_torn(self, capture: Capture, problem: str) -> None:
        """Another keeper that asks again is told, too."""
        self._torn[capture.slot.sequence] = problem
        for sequence in list(self._torn)[:-_TORN_MAX]:
            del self._torn[sequence]

    def _on_loss(self, reason: str) -> None:
        """Nothing that is on its way waits for another keeper any more."""
        for capture in list(self._begun.values()):
            # What is not copied by now will not be sealed, and no other keeper finds it.
            if problem := capture.await_check() if capture.copied.is_set() else None:
                self._note_torn(capture, problem)
            self.fail(capture.handle, Unavailable(f"saving step {capture.step}: {reason}"))
            self.forget(capture)

    def forget(self, capture: Capture) -> None:
        """Nothing more comes of it. Any thread."""
        if self._begun.pop(capture.slot.sequence, None):
            capture.handle.confirm_with(None)  # one that is kept must not keep the arena
        self._pool.notify()

    def skip(self, handle: SaveHandle) -> None:
        """There was no memory for it."""
        self._metrics.skips += 1
        text = (
            f"saving step {handle.step}: skipped, because earlier saves are still being written. "
            f"Save less often "
            f"(every=), give more memory (memory_bytes=), or wait instead (when_full='wait')"
        )
        if self._metrics.skips == 1 or self._metrics.skips % 100 == 0:
            log.warning("%s. Skipped so far: %s", text, self._metrics.skips)
        self.fail(handle, Skipped(text), is_told=True)

    def fail(self, handle: SaveHandle, error: EverstepError, *, is_told: bool = False) -> None:
        """It will come no further: on the handle, and, unless the user is told in another way, in
        the log and in the metrics. Any thread."""
        with self._failing:  # the keeper, and who looked at the copy, may say it at the same time
            if handle.error is not None:
                return
            if not is_told:
                self._metrics.failures += 1
                self._metrics.last_error = str(error)
                self._failures_in_row += 1
                if self._failures_in_row <= _TOLD_MAX or self._failures_in_row % 100 == 0:
                    log.error("step %s was not saved: %s: %s", handle.step, kind_of(error), error)
            self._trust.note_failure(handle.call, error)
            handle.fail(error)  # last: who waits for it may look at all else
