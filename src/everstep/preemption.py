"""SIGTERM, as schedulers send it before they kill: save what is due, wait until it is durable,
go. The last step is of one process the next, of several one that all save.

Ranks hear of the signal at different moments, and some perhaps not at all; they must save the same
step, or there is none. So the first one that is asked decides in step(s) that s + 1 is the last,
says so in the ranks' store, and goes on to it. Training is synchronous: when another one calls
step(s + 1), it has been through an update that the first one took part in, after it said so. Hence
a look at the store in each step() is enough, and nobody waits for anybody.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from everstep.errors import Unavailable
from everstep.sharding.world import World

log = logging.getLogger("everstep")


class Preemption:
    """Handles SIGTERM for one Checkpointer, in the main thread of its process.

    Where the program had no handler of its own, the process ends by the same signal when all is
    durable: at once if the newest completed step is saved or on its way, else after the save at the
    next step (of several ranks at the one on which they agree). A handler of the program's own is
    called as before, and decides when to end.
    """

    def __init__(
        self, world: World, is_saved: Callable[[], bool], wait_local: Callable[[], None]
    ) -> None:
        """Takes the signal over, where that is possible and nobody ignores it on purpose."""
        self.is_last = False
        """Whether the run ends after the step that it is at."""
        self._is_requested = False
        self._last: int | None = None
        self._world = world
        self._is_saved = is_saved
        self._wait_local = wait_local
        self._previous: Any = None
        self._is_installed = False
        self._pid = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            log.info("SIGTERM is not handled: the Checkpointer was not made in the main thread")
            return
        self._previous = signal.getsignal(signal.SIGTERM)
        if self._previous not in (signal.SIG_IGN, None):
            signal.signal(signal.SIGTERM, self._on_signal)
            self._is_installed = True

    def uninstall(self) -> None:
        """Give the signal back, unless somebody has taken it over since."""
        if not self._is_installed or threading.current_thread() is not threading.main_thread():
            return
        self._is_installed = False  # from now on, a signal that still comes is passed on
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous)

    def comes_with(self, step: int) -> bool:
        """Whether this step is the last one, or comes after it. All ranks call it for each step, in
        the thread that trains."""
        if not self._world.is_alone and self._is_agreed(step):
            self._is_requested = self.is_last = True  # the others cannot go on without this rank
        return self.is_last

    @property
    def ends_process(self) -> bool:
        """Whether the process has to end by the signal once all is durable."""
        return self._is_requested and self._previous is signal.SIG_DFL

    def end(self, wait: bool = True) -> None:
        """End by the signal that came, when all is durable. Main thread; returns only if a handler
        lets it."""
        if wait:
            self._wait_quietly()
        _end_now()

    def _is_agreed(self, step: int) -> bool:
        if self._last is None:
            asked = self._is_requested
            try:
                self._last = self._world.decide("the last step", step + 1 if asked else None)
            except Unavailable as error:
                if not asked:
                    return False
                log.warning("%s. This rank ends with step %s", error, step)
                self._last = step
        return self._last is not None and step >= self._last

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_ours = os.getpid() == self._pid and self._is_installed  # no forked worker, nor closed
        if is_ours:
            self._is_requested = True
            self.is_last |= self._world.is_alone
        if callable(self._previous):
            self._previous(number, frame)
        elif not is_ours:
            _end_now()
        elif self._world.is_alone and self._is_saved():
            # No waiting here: the signal may have hit the main thread inside a lock that waiting
            # needs.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            threading.Thread(target=self._end_later, name="everstep-preempt").start()

    def _end_later(self) -> None:
        self._wait_quietly()
        os.kill(os.getpid(), signal.SIGTERM)

    def _wait_quietly(self) -> None:
        try:
            self._wait_local()
        except Exception:
            log.exception("saving before the end by SIGTERM")


def _end_now() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
