"""SaveHandle: what becomes of one save; Metrics: what became of all."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.errors import EverstepError, Unavailable, Unsupported

LEVELS = ("captured", "held")
"""Of every save; then it becomes durable: see SaveHandle.durable."""


@dataclass(frozen=True, slots=True)
class Levels:
    """How far the saves of a run come. durable: where they are committed, in this store: "local",
    or of a bucket "remote". remote_every: see Tiers; None where there is no remote tier.
    is_replicated: whether other nodes hold them."""

    durable: str = "local"
    remote_every: int | None = None
    is_replicated: bool = False

    def further(self, step: int, *, is_tagged: bool) -> tuple[str, ...]:
        """What a save of this step comes to beside being durable here: none waits for another."""
        is_remote = self.remote_every and (is_tagged or step % self.remote_every == 0)
        return ("replicated",) * self.is_replicated + ("remote",) * bool(is_remote)

    def checked(self, level: str | None) -> str:
        """The level that is meant. Raises ValueError for one that nothing reaches in this run."""
        known = (*LEVELS, self.durable, *self.further(0, is_tagged=True))
        if level is not None and level not in known:
            raise ValueError(f"level must be one of {known} in this run, not {level!r}")
        return level or self.durable


class SaveHandle:
    """One save on its way: captured → held → durable.

    captured: the copy is made, the state may be written to. held: the keeper has it, and the
    trainer's death does no harm. local: committed and durable on the disk. Where there are other
    tiers, they are reached each by itself: remote (committed there), replicated (another node holds
    it in its memory). Thread-safe.
    """

    def __init__(
        self, step: int, call: int = 0, durable: str = "local", further: Sequence[str] = ()
    ) -> None:
        """`further`: the levels in other tiers that it is due at."""
        self.step = step
        self.epoch: int | None = None
        """Of the attachment that saves it; None before it is captured."""
        self.call = call
        """Of the calls of step() and save(): which one; the same on all ranks."""
        self.durable = durable
        """The level at which it is committed, in this store: "local", or of a bucket "remote"."""
        self.further = further
        self.problems: dict[str, EverstepError] = {}
        """Why it does not come to a further level."""
        self.level: str | None = None
        self.error: EverstepError | None = None
        self.times = {"called": time.monotonic()}
        """time.monotonic() of the call (under "called") and at which each level was reached."""
        self.bytes: int | None = None
        """That were written for it, once it is local."""
        self._confirm: Callable[[], str | None] | None = None
        self._changed = threading.Condition()

    def done(self) -> bool:
        """Whether it has come as far as it will: durable, or failed."""
        return self.error is not None or self._has(self.durable)

    def wait(self, level: str | None = None, timeout: float | None = None) -> None:
        """Block until `level` is reached (None: until it is durable). Raises the save's error, or
        TimeoutError after `timeout` seconds (in another thread than the one that trains: up to one
        more)."""
        known = (*LEVELS, self.durable, *self.further)
        if level is not None and level not in known:
            raise ValueError(f"level must be one of {known} for step {self.step}, not {level!r}")
        deadline = None if timeout is None else time.monotonic() + timeout
        is_captured = self._await("captured", deadline)
        confirm = self._confirm  # others may let go of it
        problem = confirm() if is_captured and confirm and self.error is None else None
        is_there = is_captured and self._await(level, deadline)
        level = level or self.durable
        if not is_there:
            raise TimeoutError(
                f"waiting for step {self.step} to be {level}: it is "
                f"{self.level or 'being copied'} after {timeout:.3g} s"
            )
        error = self.error or self.problems.get(level)
        if error is not None and not self._has(level):
            raise error
        if problem and not self._has(self.durable):
            raise Unsupported(problem)

    def confirm_with(self, check: Callable[[], str | None] | None) -> None:
        """For everstep: how to check the copy when somebody has waited for it, and may change
        tensors next."""
        self._confirm = check

    def advance(self, level: str, error: EverstepError | None = None) -> None:
        """For everstep: the save has reached `level`; a level never falls. `error`: what went wrong
        all the same."""
        with self._changed:
            self.error = error or self.error
            if not self._has(level):
                self.level = level
                self.times[level] = time.monotonic()
            self._changed.notify_all()

    def go_to(self, level: str) -> None:
        """For everstep: it is durable in that tier alone."""
        with self._changed:
            text = f"step {self.step} is in the {level} tier alone, to which it was routed"
            self.problems[self.durable] = Unavailable(text)
            others = (each for each in self.further if each != level)
            self.further, self.durable = (*others, self.durable), level
            self.advance(level)

    def fail(self, error: EverstepError, level: str | None = None) -> None:
        """For everstep: the save will come no further, or not to this further level."""
        with self._changed:
            if level is None:
                self.error = error
            else:
                self.problems[level] = error
            self._changed.notify_all()

    def _await(self, level: str | None, deadline: float | None) -> bool:
        """Whether it came so far, or failed, before that. None: until it is durable somewhere."""

        def is_over() -> bool:
            wanted = level or self.durable
            return self.error is not None or wanted in self.problems or self._has(wanted)

        with self._changed:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(is_over, left)

    def _has(self, level: str) -> bool:
        """What is durable counts as held, what is held as captured."""
        if level in self.times or level in self.further:
            return level in self.times
        return self.durable in self.times or (level == "captured" and "held" in self.times)

    def __repr__(self) -> str:
        outcome = f"error={self.error!r}" if self.error else f"level={self.level!r}"
        return f"SaveHandle(step={self.step}, {outcome})"


@dataclass(slots=True)
class Metrics:
    """Counters of one Checkpointer. Durations in seconds."""

    saves: int = 0
    commits: int = 0
    skips: int = 0
    spills: int = 0
    """Captures that went to the second memory (Tiers.spill)."""
    failures: int = 0
    bytes_written: int = 0
    stall_seconds: float = 0.0
    """In save() and step(), and in holding updates: what this process's training thread waited for.
    On CUDA the device may wait in addition, for copies of what an update is about to change: no
    host clock sees that, and to ask the device would make the host wait too."""
    stall_seconds_max: float = 0.0
    hold_seconds: float = 0.0
    """The part of it spent in the optimizers' pre-hooks."""
    user_seconds: float = 0.0
    """The part of it spent in state_dict() methods of the user's own."""
    restore_seconds: float = 0.0
    durable_seconds: list[float] = field(default_factory=list, repr=False)
    """From the call to the commit, of the newest 1000 saves."""
    replica_step: int | None = None
    """Of a log's replica: the newest step that it is known to have come to; the processor time that
    its process has taken; how often it failed; and how many bases it wrote."""
    replica_seconds: float = 0.0
    replica_failures: int = 0
    replica_bases: int = 0
    tiers: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """By level ("remote", "replicated"): what went to that tier so far (copied, given_up, bytes,
    seconds, waiting, newest), as of the newest step that reached it or never will."""
    last_error: str | None = None

    def figures(self) -> dict[str, float]:
        """Those that `everstep top` shows."""
        shown = ("saves", "skips", "failures", "stall_seconds")
        return {name: getattr(self, name) for name in shown}
