"""The parent's end of a contender: its worker processes, one for each rank, asked together.

Requests and replies are lines of JSON. Workers sleep whenever they are not asked.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine

REPOSITORY = Path(__file__).parent.parent
TIMEOUT_S = 600.0
CLOSE_S = 60.0
LOG_TAIL_BYTES = 2000


class WorkerFailed(Exception):
    """A contender could not do what it was asked; the others go on."""


class Gang:
    """The workers of one contender. What one of them fails at, all fail at."""

    def __init__(
        self, root: Path, settings: dict[str, Any], ranks: int = 1, code: str | None = None
    ) -> None:
        """`root`: the contender's directory. `settings`: see worker.Worker. `code`: the directory
        from which everstep is imported, in place of the one that is installed."""
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._logs = [root.parent / f"{root.name}-{rank}.log" for rank in range(ranks)]
        told = {"root": str(root), "ranks": ranks, "port": _free_port(), **settings}
        paths = [code, str(REPOSITORY), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._workers = []
        for rank, log_path in enumerate(self._logs):
            command = [sys.executable, "-P", "-m", "benchmarks.worker"]
            with log_path.open("ab") as log:
                worker = subprocess.Popen(
                    [*command, json.dumps({**told, "rank": rank})],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                )
            self._workers.append(worker)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Call a method of all workers and return their replies as one. Raises WorkerFailed, and
        then has ended all of them: who waits for one that failed would wait for ever."""
        line = json.dumps({"do": do, **request}).encode() + b"\n"
        for worker in self._workers:
            assert worker.stdin is not None
            with contextlib.suppress(OSError):  # it has ended; reading says so
                worker.stdin.write(line)
                worker.stdin.flush()
        try:
            replies = self._replies()
        except WorkerFailed as error:
            self.kill()
            raise WorkerFailed(f"{do}: {error}") from None
        return {key: merged([reply[key] for reply in replies]) for key in replies[0]}

    def ask_watched(self, do: str, **request: Any) -> dict[str, Any]:
        """The same, with the peak memory of the workers and of all that they started."""
        pids = [worker.pid for worker in self._workers]
        with machine.peak_memory(machine.processes(pids, str(self._root))) as peak_bytes:
            reply = self.ask(do, **request)
        return {**reply, "memory_bytes": peak_bytes()}

    def kill(self) -> None:
        """End the workers with SIGKILL, as a crash does. A keeper lives on."""
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def stop(self) -> None:
        """End the workers and the keeper of their store."""
        if any(worker.poll() is None for worker in self._workers):
            with contextlib.suppress(WorkerFailed):
                self.ask("close")
        for worker in self._workers:
            try:
                worker.communicate(timeout=CLOSE_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.communicate()
        for pid in machine.processes([], str(self._root)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        machine.await_end_of_keeper(self._root)

    def _replies(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + TIMEOUT_S
        unread = {rank: b"" for rank in range(len(self._workers))}
        ranks_by_fd = {
            worker.stdout.fileno(): rank
            for rank, worker in enumerate(self._workers)
            if worker.stdout is not None
        }
        replies: dict[int, dict[str, Any]] = {}
        while unread:
            waiting = [fd for fd, rank in ranks_by_fd.items() if rank in unread]
            ready = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise WorkerFailed(f"no answer after {TIMEOUT_S:.0f} s")
            for fd in ready:
                rank = ranks_by_fd[fd]
                more = os.read(fd, 1 << 16)
                if not more:
                    tail = self._logs[rank].read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
                    raise WorkerFailed(f"rank {rank}'s process ended.\n{tail}")
                unread[rank] += more
                if unread[rank].endswith(b"\n"):
                    reply = replies[rank] = json.loads(unread.pop(rank))
                    if "failed" in reply:
                        raise WorkerFailed(reply["failed"])
        return [replies[rank] for rank in sorted(replies)]


def merged(values: Sequence[Any]) -> Any:
    """The same figure of all ranks as one: the slowest, for lists one by one; what only holds where
    it holds for all; words of the first."""
    match values[0]:
        case bool():
            return all(values)
        case int() | float():
            return max(values)
        case list():
            return [merged(row) for row in zip(*values, strict=True)]
        case dict():
            return {key: merged([row[key] for row in values]) for key in values[0]}
        case _:
            return values[0]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
