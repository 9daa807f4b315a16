"""Host catch-up: now and then the newest durable step of a log is made whole, in the background.

    commits of records ──(each `every`-th)──▶ a thread of the session ──▶ restore.worker: a process
    with torch, at the lowest priority, that writes a whole state beside the log (state.json)

Invariants:
* One worker at a time in a keeper, and so for a store on a node. It ends with its session, and with
  the keeper, whose death closes the pipe that the worker watches.
* None is started for a store that is gone, or that another writer has taken over.
* A worker that dies is started again, ATTEMPTS_MAX times at most. One that fails is not: the next
  begins when it is due. After FAILURES_MAX failures in a row, or one that would come again each
  time, there are no more.
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
from everstep.tiers.disk import Disk

log = logging.getLogger("everstep.keeper")

ATTEMPTS_MAX = 3
FAILURES_MAX = 3
PAUSE_S = 1.0
"""Before a worker that died is started again; twice that before the next."""
WORK_S_MAX = 3600.0
_FOR_GOOD = ("Unsupported", "Mismatch")
DROPS_LOG = "drop-log"
"""Tells the worker that its state stands for the log even where it is not exact."""
_TEXT_MAX = 5000
_TURN = threading.Lock()

Answer = dict[str, Any]
"""What the worker said: step, epoch, exact, ends_chain, bytes, seconds; or kind and message of its
error."""


class CatchUp:
    """Decides for one session when its log is caught up with, and sees to it. Thread-safe; nothing
    here blocks but its own thread, which is started when it is needed first."""

    def __init__(
        self,
        disk: Disk,
        every: int,
        *,
        is_resumed: bool,
        keep_exact: bool = True,
        tell: Callable[[Message], None],
        on_whole: Callable[[], None],
    ) -> None:
        """`every`: checkpoints that take a replay, from one whole state to the next. `is_resumed`:
        a former keeper knew how many there are since the last. `keep_exact`: see Checkpointer.
        `tell`: the trainer; `on_whole`: what came before may not be needed any more."""
        self._disk = disk
        self._every = every
        self._options = [] if keep_exact else [DROPS_LOG]
        self._tell = tell
        self._on_whole = on_whole
        self._lag = every if is_resumed else 0
        self._newest: CheckpointName | None = None
        self._chain = 0
        self._failures = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._worker: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()

    def note(self, name: CheckpointName, takes_replay: bool) -> None:
        """A checkpoint was committed: one that is rebuilt by a replay, or a whole state."""
        with self._changed:
            if not takes_replay:
                self._chain += 1
            self._lag = self._lag + 1 if takes_replay else 0
            self._newest = name if takes_replay else None
            if self._is_due() and self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="everstep-catch-up", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Start no worker any more, and end the one that runs; does not wait for it."""
        with self._changed:
            self._is_closed = True
            if worker := self._worker:
                worker.terminate()
            self._changed.notify_all()

    def _is_due(self) -> bool:
        return self._newest is not None and self._lag >= self._every

    # ---- its thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while self._failures < FAILURES_MAX:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._is_due())
                if self._is_closed:
                    return
                chain, taken = self._chain, self._lag
            try:
                with _TURN:
                    self._note_outcome(self._make_whole())
            except Exception:
                log.exception("catching up in %s", self._disk.root)
                self._failures += 1
            with self._changed:
                if chain == self._chain:  # else a base came, which is newer
                    self._lag -= taken

    def _make_whole(self) -> Answer | None:
        """None where there was nothing to do any more."""
        for attempt in range(ATTEMPTS_MAX):
            with self._changed:
                if attempt:
                    self._changed.wait_for(lambda: self._is_closed, PAUSE_S * attempt)
                name = self._newest
                if self._is_closed or name is None:
                    return None
            if not self._may_begin(name):
                return None
            answer = self._work(name)
            if answer and answer.get("kind") == Missing.__name__ and not self._is_there(name):
                log.info("no catch-up: retention was quicker: %s", answer["message"])
                return None
            if answer or self._is_closed:
                return answer
            log.warning("the worker that made %s of %s whole has died", name, self._disk.root)
        text = f"making a step of {self._disk.root} whole: the worker died {ATTEMPTS_MAX} times"
        return {"kind": "Unavailable", "message": text}

    def _may_begin(self, name: CheckpointName) -> bool:
        """Whether the step is there, and its writer the newest. What a worker that died left goes
        first."""
        try:
            commit.check_epoch(self._disk, name.epoch, name.step)
            if not self._is_there(name):
                return False
            if self._disk.size(names.state_path(name)) is not None:
                return False  # a base ends there, which is as good
            if self._disk.list(names.CLAIMS):
                with self._disk.locked(exclusive=True):
                    claims.clear(self._disk)
        except EverstepError as error:
            log.info("no catch-up: %s", error)
            return False
        return True

    def _is_there(self, name: CheckpointName) -> bool:
        return self._disk.size(names.manifest_path(name)) is not None

    def _work(self, name: CheckpointName) -> Answer | None:
        """Run a worker; what it said, or None where it died."""
        alive, held = os.pipe()  # the worker ends when nobody holds the other end any more
        try:
            with self._changed:
                if self._is_closed:
                    return None
                self._worker = subprocess.Popen(
                    [
                        sys.executable,
                        *("-P", "-m", "everstep.restore.worker", str(self._disk.root), str(name)),
                        *self._options,
                    ],
                    stdin=alive,
                    stdout=subprocess.PIPE,
                    cwd="/",
                    # What cannot be exact anyway is not worth a context on the device.
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                    start_new_session=True,
                    text=True,
                )
            return _answer(self._worker)
        except OSError as error:
            return {"kind": "Unavailable", "message": f"starting a worker: {error}"}
        finally:
            self._worker = None
            os.close(alive)
            os.close(held)

    def _note_outcome(self, answer: Answer | None) -> None:
        if answer is None:
            return
        if "kind" not in answer:
            self._failures = 0
            log.info(
                "step %s made whole in %.1f s, %s",
                answer["step"],
                answer["seconds"],
                "exactly" if answer["exact"] else "but for last bits",
            )
            self._tell({"type": "whole", **answer})
            if not self._is_closed:
                self._on_whole()
            return
        self._failures = FAILURES_MAX if answer["kind"] in _FOR_GOOD else self._failures + 1
        is_end = self._failures >= FAILURES_MAX
        text = f"{answer['kind']}: {answer['message']}"[:_TEXT_MAX]
        log.error("catching up failed: %s%s", text, ". There will be no more" if is_end else "")
        self._tell({"type": "not_whole", "message": text, "is_end": is_end})


def _answer(worker: "subprocess.Popen[str]") -> Answer | None:
    """Wait for a worker's end; what it said last."""
    try:
        said, _ = worker.communicate(timeout=WORK_S_MAX)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.communicate()
        return {"kind": "Unavailable", "message": f"the worker took more than {WORK_S_MAX} s"}
    for line in reversed(said.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None
