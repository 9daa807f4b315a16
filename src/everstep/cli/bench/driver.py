"""The parent's end of a bench worker: starts it, asks it, and gives up on it after a time."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from everstep.cli.bench.machine import MemoryWatch, processes

_LOG_TAIL_BYTES = 2000
_CLOSE_S = 60.0


class WorkerFailed(Exception):
    """A contender could not do what it was asked; the others go on."""


class Driver:
    """One worker process. It sleeps whenever it is not asked."""

    def __init__(
        self, root: Path, settings: dict[str, Any], module: str = "worker", label: str = ""
    ) -> None:
        """`root` is a directory of its own, `settings` what the worker of this module takes."""
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._log = root.parent / f"{root.name}{label}.log"
        told = {"root": str(root), **settings}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"everstep.cli.bench.{module}", json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def ask(self, do: str, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Call a method of the worker and return its reply. Raises WorkerFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended; reading says so
        reply: dict[str, Any] = json.loads(self._read_line(do, timeout_s))
        if "failed" in reply:
            raise WorkerFailed(f"{do}: {reply['failed']}")
        return reply

    def ask_watched(self, do: str, timeout_s: float, **request: Any) -> dict[str, Any]:
        """The same, with the peak memory of the worker and of all that it started in the reply."""
        with MemoryWatch(processes(self._process.pid, str(self._root))) as watch:
            reply = self.ask(do, timeout_s, **request)
        return {**reply, "memory_bytes": watch.peak_bytes}

    @property
    def pid(self) -> int:
        """The worker's process."""
        pid: int = self._process.pid
        return pid

    def kill(self) -> None:
        """End the worker and what it started, at once; who waits for its answer is told so."""
        for pid in processes(self._process.pid, ""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End the worker and all that it started, its keeper too."""
        started = processes(self._process.pid, str(self._root))
        with contextlib.suppress(WorkerFailed):
            self.ask("close", _CLOSE_S)
        try:
            self._process.communicate(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        for pid in set(started) & set(processes(0, str(self._root))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _read_line(self, do: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        fd = self._process.stdout.fileno()
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                self._process.kill()
                raise WorkerFailed(f"{do}: no answer after {timeout_s:.0f} s")
            more = os.read(fd, 1 << 16)
            if not more:
                raise WorkerFailed(f"{do}: its process ended.\n{self._log_tail()}")
            line += more
        return line

    def _log_tail(self) -> str:
        return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
