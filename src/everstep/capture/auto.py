"""The strategy `auto`: `log`, or `spread` (which is `full` where one step is enough), by what was
measured, and the reason in words.

It starts with whole states. What a save costs goes with its bytes, so that a log is begun where
records and bases have much fewer of them for each step than states; it is ended where that did not
come true, and where steps turned out to take longer than they did with whole states.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from everstep.capture.captured import Captured, loose_bytes
from everstep.capture.log import BREAKS_MAX, Log
from everstep.capture.rank_agreement import Ranks
from everstep.capture.spread import Spread
from everstep.errors import EverstepError, Unsupported
from everstep.handle import SaveHandle
from everstep.redo.refusals import Refused
from everstep.state.optimizers import OptimizerState
from everstep.state.view import Collected

log = logging.getLogger("everstep")

SAVES_MIN = 50
CHEAPER = 0.6
"""A log is begun where it takes less than this part of the bytes of whole states, ..."""
DEARER = 0.8
"""... and ended where it takes more than this, ..."""
SLOWER = 1.15
"""... or where steps take longer by this factor than they did with whole states."""

_STAYS = "strategy auto keeps to whole states: %s"
_RESUMED = ("saves_seen", "state_bytes", "record_bytes")


@dataclass(slots=True)
class Balance:
    """What was measured, and which way it tips."""

    every: int
    is_log: bool = False
    reason: str = "full: nothing is measured yet"
    _seen: int = 0
    _state_bytes: int = 0
    _record_bytes: float = 0.0
    _refusal: str | None = None
    _seconds: dict[bool, deque[float]] = field(
        default_factory=lambda: {False: deque(maxlen=200), True: deque(maxlen=200)}
    )

    def refuse(self, why: str) -> None:
        """A log does not fit this run."""
        self._refusal = why
        self._switch(False, f"full: {why}")

    def note_state(self, size: int, gradients: int) -> None:
        """A whole state of that many bytes is being saved; a record would have had about as many
        bytes as the parameters that take part in training."""
        self._state_bytes = size
        if not self.is_log:
            self._record_bytes = gradients
            self._seen += 1

    def note_record(self, size: int) -> None:
        """A record was captured; as far as is known, one takes that many bytes on the disk."""
        self._record_bytes += 0.2 * (size - self._record_bytes)
        self._seen += 1

    def note_step(self, seconds: float) -> None:
        """From one step() to the next, in which all that saving takes from training shows."""
        self._seconds[self.is_log].append(seconds)

    def resume(self, figures: Any) -> None:
        """Go on from what figures() was when the step was saved that is restored now; unless
        something was measured since, or a log had been refused."""
        if self._state_bytes or self._refusal or not isinstance(figures, dict):
            return
        seen, state, record = (figures.get(key) for key in _RESUMED)
        if figures.get("refusal") is None and type(seen) is type(state) is type(record) is int:
            self._seen, self._state_bytes, self._record_bytes = seen, state, record
            self.is_log, self.reason = figures.get("is_log") is True, str(figures.get("reason"))

    def decide(self, distance: int) -> bool:
        """Whether the next is part of a log. `distance`: from one base to the next."""
        wanted, reason = self.weigh(distance)
        if wanted != self.is_log:
            self._switch(wanted, reason)
        else:
            self.reason = reason
        return self.is_log

    def follow(self, is_log: bool) -> None:
        """Do what the first of several ranks has decided."""
        if is_log != self.is_log and not (is_log and self._refusal):
            self._switch(is_log, f"{'log' if is_log else 'full'}: as the first rank measured")

    def weigh(self, distance: int) -> tuple[bool, str]:
        """Which way it tips, and why."""
        if self._refusal or self._seen < SAVES_MIN or not self._state_bytes:
            return self.is_log, self.reason
        full = self._state_bytes / self.every
        bases = self._state_bytes / distance
        part = (self._record_bytes + bases) / full
        unit, name = (1e6, "MB") if full >= 1e6 else (1e3, "kB")
        figures = (
            f"{name} a step: {self._record_bytes / unit:.1f} in records and {bases / unit:.1f} in "
            f"bases, or {full / unit:.1f} in whole states"
        )
        if not self.is_log:
            is_log = part < CHEAPER
            return is_log, f"{'log' if is_log else 'full'}: {figures}"
        if part > DEARER:
            return False, f"full: {figures}"
        if (slower := self._slower()) > SLOWER:
            self._refusal = f"steps took {slower:.2f} times as long with a log; {figures}"
            return False, f"full: {self._refusal}"
        return True, self.reason

    def figures(self) -> dict[str, Any]:
        """For `everstep show`."""
        return {
            "reason": self.reason,
            "is_log": self.is_log,
            "refusal": self._refusal,
            "saves_seen": self._seen,
            "state_bytes": self._state_bytes,
            "record_bytes": round(self._record_bytes),
            **{
                f"step_{name}_s": round(median(self._seconds[is_log]), 6)
                for name, is_log in (("full", False), ("log", True))
                if self._seconds[is_log]
            },
        }

    def _slower(self) -> float:
        """How much longer a step takes with a log; 1 while too few were seen."""
        with_log, without = self._seconds[True], self._seconds[False]
        if min(len(with_log), len(without)) < SAVES_MIN:
            return 1.0
        return median(with_log) / median(without)

    def _switch(self, is_log: bool, reason: str) -> None:
        self._seen = 0
        self.reason = reason
        if is_log != self.is_log:
            log.warning("strategy auto goes to %s", reason)
        self.is_log = is_log


class Auto:
    """Hands each step to the strategy that is chosen. For the thread that trains."""

    def __init__(
        self, make_log: Callable[[], Log], spread: Spread, every: int, ranks: Ranks | None = None
    ) -> None:
        """`make_log` may raise Unsupported: then there is nothing to choose. `ranks`: of several,
        which go by what the first of them decides."""
        self._ranks = ranks
        self._spread = spread
        self._balance = Balance(every)
        self._log: Log | None = None
        self._called: float | None = None
        try:
            self._log = make_log()
        except Unsupported as error:
            log.info(_STAYS, error)
            self._balance.refuse(str(error))
            if isinstance(error, Refused):
                spread.stay_whole(str(error))

    @property
    def _active(self) -> Log | Spread:
        return self._log if self._log and self._balance.is_log else self._spread

    @property
    def is_recording(self) -> bool:
        """Whether optimizer calls are to be noted."""
        return self._active.is_recording

    def before_step(
        self, optimizer: OptimizerState, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """See Recorder. Only while recording."""
        self._active.before_step(optimizer, args, kwargs)

    def after_step(self, optimizer: OptimizerState) -> None:
        """See Recorder. Only while recording."""
        self._active.after_step(optimizer)

    def refuse(self, problem: str) -> None:
        """See Recorder."""
        self._active.refuse(problem)

    def wants(self, step: int) -> bool:
        """Whether something of this step, which is not due, is captured all the same."""
        self._note_call()
        return self._active.wants(step)

    def current(self, step: int, collect: Callable[[], Collected]) -> SaveHandle | None:
        """The handle of the last save, if it is of this step and of just this state."""
        return self._active.current(step, collect)

    def choose(
        self, step: int, collected: Collected, *, asked: bool = False, tagged: bool = False
    ) -> Captured | None:
        """What to capture for `step`; None where it is nothing."""
        if not asked and step % self._balance.every == 0:
            self._note_call()
        self._decide(step, collected)
        try:
            return self._active.choose(step, collected, asked=asked, tagged=tagged)
        except Unsupported as error:
            if self._active is self._log:
                self._leave_log(str(error), error)
                return Captured(collected)
            if not isinstance(error, Refused):
                raise
            log.warning(_STAYS, error)
            self._balance.refuse(str(error))
            self._spread.stay_whole(str(error))
            is_due = step % self._balance.every == 0
            return Captured(collected) if is_due or asked or tagged else None

    def begun(self, captured: Captured, handle: SaveHandle) -> None:
        """This is being captured."""
        met = captured.collected.loose
        loose = loose_bytes(leaf for leaf in met if leaf.owner is None)
        if captured.record is not None and self._log:
            self._balance.note_record(self._log.interval.record_bytes)
        elif captured.commits and self._active is self._spread:
            state, gradients = self._spread.sizes
            self._balance.note_state(state + loose_bytes(met), gradients + loose)
        self._active.begun(captured, handle)
        if self._log and not self._log.is_on and self._balance.is_log:
            lasting = self._log.lasting
            self._leave_log(lasting or f"a log was wrong {BREAKS_MAX} times, as the warnings say")
            if lasting:
                self._spread.stay_whole(lasting)

    def note_whole(self, step: int) -> None:
        """See Log."""
        if self._log:
            self._log.note_whole(step)

    def note_failure(self, call: int, error: EverstepError) -> None:
        """See Log."""
        if self._log:
            self._log.note_failure(call, error)

    def awaits(self, call: int) -> bool:
        """See Log."""
        return self._active is self._log and self._log.awaits(call)

    def describe(self) -> dict[str, Any]:
        """What `everstep show` prints of the choice."""
        return {**self._active.describe(), "auto": self._balance.figures()}

    def resume(self, chosen: Mapping[str, Any]) -> None:
        """A step is restored, with which describe() said this."""
        self._balance.resume(chosen.get("auto"))

    def distrust(self, names: Collection[str]) -> None:
        """See Recorder."""
        self._active.distrust(names)

    def change_keeper(self) -> None:
        """The last one died."""
        self._active.change_keeper()

    def end_chain(self) -> None:
        """Nothing can follow what was captured last."""
        self._active.end_chain()

    def close(self) -> None:
        """Record nothing any more."""
        for strategy in (self._log, self._spread):
            if strategy:
                strategy.close()

    def _decide(self, step: int, collected: Collected) -> None:
        was_log = self._balance.is_log
        if self._log is None:
            return
        distance = self._log.interval.steps
        if not was_log and self._balance.weigh(distance)[0]:
            try:
                self._log.check(collected)
            except Refused as error:
                log.info(_STAYS, error)
                self._log.end()
                self._balance.refuse(str(error))
        if self._ranks is None:
            self._balance.decide(distance)
        else:
            every, balance = self._balance.every, self._balance
            wanted = self._ranks.decide(step, every, lambda: balance.weigh(distance)[0], was_log)
            balance.follow(wanted)
        if self._balance.is_log != was_log:
            (self._log if was_log else self._spread).pause()

    def _leave_log(self, why: str, error: Unsupported | None = None) -> None:
        assert self._log
        self._log.end()
        self._log.pause()
        self._balance.refuse(why)
        if isinstance(error, Refused):
            self._spread.stay_whole(why)

    def _note_call(self) -> None:
        """A step came."""
        now = time.monotonic()
        if self._called is not None:
            self._balance.note_step(now - self._called)
        self._called = now
