"""SaveHandle: what becomes of one save; Metrics: what became of all."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.errors import EverstepError, Unsupported

LEVELS = ("captured", "held")
"""Of every save; then it becomes durable: see SaveHandle.durable."""


class SaveHandle:
    """One save on its way: captured → held → durable.

    captured: the copy is made, the state may be written to. held: the keeper has it, and the
    trainer's death does no harm. local: committed and durable on the disk; remote: in the bucket,
    where the store is one. Thread-safe.
    """

    def __init__(self, step: int, call: int = 0, durable: str = "local") -> None:
        self.step = step
        self.call = call
        """Of the calls of step() and save(): which one; the same on all ranks."""
        self.durable = durable
        """The level at which it is committed, in this store: "local", or of a bucket "remote"."""
        self.level: str | None = None
        self.error: EverstepError | None = None
        self.times: dict[str, float] = {}
        """time.monotonic() of the call (under "called") and at which each level was reached."""
        self.bytes: int | None = None
        """That were written for it, once it is local."""
        self._confirm: Callable[[], str | None] | None = None
        self._changed = threading.Condition()
        self.times["called"] = time.monotonic()

    def done(self) -> bool:
        """Whether it has come as far as it will: durable, or failed."""
        return self.error is not None or self._has(self.durable)

    def wait(self, level: str | None = None, timeout: float | None = None) -> None:
        """Block until `level` is reached (None: until it is durable). Raises the save's error, or
        TimeoutError after `timeout` seconds (in another thread than the one that trains: up to one
        more)."""
        level = checked_level(level, self.durable)
        deadline = None if timeout is None else time.monotonic() + timeout
        is_captured = self._await("captured", deadline)
        confirm = self._confirm  # others may let go of it
        problem = confirm() if is_captured and confirm and self.error is None else None
        if not is_captured or not self._await(level, deadline):
            raise TimeoutError(
                f"waiting for step {self.step} to be {level}: it is "
                f"{self.level or 'being copied'} after {timeout} s"
            )
        if self.error is not None and not self._has(level):
            raise self.error
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

    def fail(self, error: EverstepError) -> None:
        """For everstep: the save will come no further."""
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _await(self, level: str, deadline: float | None) -> bool:
        """Whether it came so far, or failed, before that."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.error is not None or self._has(level),
                None if deadline is None else max(0.0, deadline - time.monotonic()),
            )

    def _has(self, level: str) -> bool:
        """What is durable counts as held, what is held as captured."""
        return any(each in self.times for each in (level, self.durable)) or (
            level == "captured" and "held" in self.times
        )

    def __repr__(self) -> str:
        outcome = f"error={self.error!r}" if self.error else f"level={self.level!r}"
        return f"SaveHandle(step={self.step}, {outcome})"


def checked_level(level: str | None, durable: str) -> str:
    """The level that is meant. Raises ValueError for one that nothing reaches in a store whose
    saves become `durable`."""
    known = (*LEVELS, durable)
    if level is not None and level not in known:
        raise ValueError(f"level must be one of {known} in this store, not {level!r}")
    return level or durable


@dataclass(slots=True)
class Metrics:
    """Counters of one Checkpointer. Durations in seconds."""

    saves: int = 0
    commits: int = 0
    skips: int = 0
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
    catch_ups: int = 0
    """Steps of a log that were made whole in the background; the newest of them, and in seconds."""
    catch_up_failures: int = 0
    catch_up_seconds: float = 0.0
    whole_step: int | None = None
    last_error: str | None = None

    def add_stall(self, seconds: float) -> None:
        """Count one call."""
        self.stall_seconds += seconds
        self.stall_seconds_max = max(self.stall_seconds_max, seconds)

    def add_durable(self, seconds: float) -> None:
        """Remember one duration, of the newest 1000."""
        self.durable_seconds.append(seconds)
        del self.durable_seconds[:-1000]
