"""Host catch-up: now and then the newest durable step of a log is made whole, in the background.

    commits of records ──(each `every`-th)──▶ a thread of the team ──▶ restore.worker: a process
    with torch, at the lowest priority, that writes a whole state beside the log (state.json)

Invariants:
* One worker at a time in a keeper, and so for a store on a node. It ends with its team, and with
  the keeper, whose death closes the pipe that the worker watches.
* None is started for a store that is gone, or that another writer has taken over.
* One that fails, or dies, is not tried again: the next begins when it is due. After FAILURES_MAX in
  a row, or one that would come again each time, there are no more.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from everstep.errors import EverstepError, Missing
from everstep.keeper.wire import Message
from everstep.store import claims, commit, names
from everstep.store.names import CheckpointName
from everstep.tiers.tier import Tier

log = logging.getLogger("everstep.keeper")

FAILURES_MAX = 3
WORK_S_MAX = 3600.0
_FOR_GOOD = ("Unsupported", "Mismatch")
_TEXT_MAX = 5000
_TURN = threading.Lock()

Answer = dict[str, Any]
"""What a worker said: step, epoch, exact, bytes, seconds; or kind and message of its error."""


class CatchUp:
    """Decides for one team when its log is caught up with, and sees to it. Thread-safe; nothing
    here blocks but its own thread, which is started when it is needed first."""

    def __init__(
        self,
        disk: Tier,
        every: int,
        *,
        is_resumed: bool,
        tell: Callable[[Message], None],
        on_whole: Callable[[], None],
    ) -> None:
        """`every`: checkpoints that take a replay, from one whole state to the next. `is_resumed`:
        a former keeper knew how many there are since the last. `tell`: the trainers; `on_whole`:
        what came before may not be needed any more."""
        self._disk = disk
        self._every = every
        self._tell = tell
        self._on_whole = on_whole
        self._lag = every if is_resumed else 0
        self._newest: CheckpointName | None = None
        self._failures = 0
        self._is_busy = self._is_closed = False
        self._worker: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def note(self, name: CheckpointName, takes_replay: bool) -> None:
        """A checkpoint was committed: one that is rebuilt by a replay, or a whole state."""
        with self._lock:
            self._lag = self._lag + 1 if takes_replay else 0
            self._newest = name
            if self._is_due() and not self._is_busy:
                self._is_busy = True
                threading.Thread(target=self._run, name="everstep-catch-up", daemon=True).start()

    def close(self) -> None:
        """Start no worker any more, and end the one that runs; does not wait for it."""
        with self._lock:
            self._is_closed = True
            if worker := self._worker:
                worker.terminate()

    def _is_due(self) -> bool:
        return self._lag >= self._every and self._failures < FAILURES_MAX and not self._is_closed

    # ---- its thread ------------------------------------------------------------------------

    def _run(self) -> None:
        with _TURN:
            while name := self._begin():
                if answer := self._make_whole(name):
                    self._note_outcome(answer)

    def _begin(self) -> CheckpointName | None:
        """What is to be made whole now; None where nothing is: a base may have come while another
        team had its turn."""
        with self._lock:
            self._is_busy = self._is_due()
            self._lag = 0 if self._is_busy else self._lag
            return self._newest if self._is_busy else None

    def _make_whole(self, name: CheckpointName) -> Answer | None:
        """None where there was nothing to do any more."""
        try:
            if not self._may_begin(name):
                return None
            answer = self._work(name)
        except Exception as error:
            log.exception("catching up in %s", self._disk.root)
            answer = {"kind": "Unavailable", "message": repr(error)}
        if self._is_closed or answer.get("kind") == Missing.__name__:
            log.info("no catch-up with %s: it ended, or retention was quicker", name)
            return None
        return answer

    def _may_begin(self, name: CheckpointName) -> bool:
        """Whether the step is there, no base ends there, and its writer is the newest. What a
        worker that died left goes first."""
        disk = self._disk
        try:
            commit.check_epoch(disk, name.epoch, name.step)
            has_log = disk.size(names.manifest_path(name)) is not None
            if not has_log or disk.size(names.state_path(name)) is not None:
                return False
            if disk.list(names.CLAIMS):
                with disk.locked(exclusive=True):
                    claims.clear(disk)
        except EverstepError as error:
            log.info("no catch-up: %s", error)
            return False
        return True

    def _work(self, name: CheckpointName) -> Answer:
        """Run a worker; what it said last. Raises OSError where it cannot be started."""
        program = ("-P", "-m", "everstep.restore.worker", str(self._disk.root), str(name))
        alive, held = os.pipe()  # the worker ends when nobody holds the other end any more
        try:
            with self._lock:
                if self._is_closed:
                    return {}
                self._worker = subprocess.Popen(
                    [sys.executable, *program],
                    stdin=alive,
                    stdout=subprocess.PIPE,
                    cwd="/",
                    # What cannot be exact anyway is not worth a context on the device.
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                    start_new_session=True,
                    text=True,
                )
            said, _ = self._worker.communicate(timeout=WORK_S_MAX)
        except subprocess.TimeoutExpired:
            assert self._worker
            self._worker.kill()
            self._worker.communicate()
            said = ""
        finally:
            self._worker = None
            os.close(alive)
            os.close(held)
        for line in reversed(said.splitlines()):
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
        return {"kind": "Unavailable", "message": f"the worker that made {name} whole has died"}

    def _note_outcome(self, answer: Answer) -> None:
        if "kind" not in answer:
            self._failures = 0
            self._tell({"type": "whole", **answer})
            if not self._is_closed:
                self._on_whole()
            return
        self._failures = FAILURES_MAX if answer["kind"] in _FOR_GOOD else self._failures + 1
        is_end = self._failures >= FAILURES_MAX
        text = f"{answer['kind']}: {answer['message']}"[:_TEXT_MAX]
        log.error("catching up failed: %s%s", text, ". There will be no more" if is_end else "")
        self._tell({"type": "not_whole", "message": text, "is_end": is_end})
