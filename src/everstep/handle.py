"""SaveHandle: what becomes of one save; Metrics: what became of all."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.errors import EverstepError, Unsupported

LEVELS = ("captured", "held", "local", "replicated", "remote")


class SaveHandle:
    """One save on its way: captured → held → local (→ replicated → remote).

    captured: the copy is made, the state may be written to. held: the keeper has it, and the
    trainer's death does no harm. local: committed and durable on the disk. Thread-safe.
    """

    def __init__(self, step: int, call: int = 0) -> None:
        self.step = step
        self.call = call
        """Of the calls of step() and save(): which one; the same on all ranks."""
        self.level: str | None = None
        self.error: EverstepError | None = None
        self.times: dict[str, float] = {}
        """time.monotonic() of the call (under "called") and at which each level was reached."""
        self.bytes: int | None = None
        """That were written for it, once it is local."""
        self.squeezed: float | None = None
        """Of a record that is local: which part of its gradients' bytes was not written, as they
        were packed; 0 to 1."""
        self._confirm: Callable[[], str | None] | None = None
        self._changed = threading.Condition()
        self.times["called"] = time.monotonic()

    def done(self) -> bool:
        """Whether it has come as far as it will: durable, or failed."""
        return self.error is not None or self.level in LEVELS[2:]

    def wait(self, level: str = "local", timeout: float | None = None) -> None:
        """Block until `level` is reached. Raises the save's error, or TimeoutError after `timeout`
        seconds (in another thread than the one that trains: up to one more)."""
        check_level(level)
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
        if problem and self.level != "local":
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
        return self.level is not None and LEVELS.index(self.level) >= LEVELS.index(level)

    def __repr__(self) -> str:
        outcome = f"error={self.error!r}" if self.error else f"level={self.level!r}"
        return f"SaveHandle(step={self.step}, {outcome})"


def check_level(level: str) -> None:
    """Raises ValueError for one that nothing reaches."""
    if level not in LEVELS[:3]:
        raise ValueError(f"level must be one of {LEVELS[:3]}, not {level!r}")


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
