"""The ranks of one contender: a worker process for each, asked together. No torch here."""

import socket
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from everstep.cli.bench.driver import Driver
from everstep.cli.bench.machine import MemoryWatch, processes


class Gang:
    """Like a Driver, of several workers. What one of them fails at, all fail at."""

    def __init__(self, root: Path, settings: dict[str, Any], ranks: int) -> None:
        self._root = root
        told = {**settings, "ranks": ranks, "port": _free_port()}
        self._drivers = [
            Driver(root, {**told, "rank": rank}, "ranks_worker", f"-{rank}")
            for rank in range(ranks)
        ]

    def ask(self, do: str, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Call a method of all ranks; their replies as one. Raises WorkerFailed, and then has
        ended them all: who waits for one that failed would wait for ever."""
        with ThreadPoolExecutor(len(self._drivers)) as pool:
            asked = [pool.submit(d.ask, do, timeout_s, **request) for d in self._drivers]
            ended, _ = wait(asked, return_when=FIRST_EXCEPTION)
            failures = [error for future in ended if (error := future.exception())]
            if failures:
                for driver in self._drivers:
                    driver.kill()
                raise failures[0]
            return {key: merged([one.result()[key] for one in asked]) for key in asked[0].result()}

    def ask_watched(self, do: str, timeout_s: float, **request: Any) -> dict[str, Any]:
        """The same, with the peak memory of all ranks and of all that they started in the reply."""
        started = {pid for d in self._drivers for pid in processes(d.pid, str(self._root))}
        with MemoryWatch(sorted(started)) as watch:
            reply = self.ask(do, timeout_s, **request)
        return {**reply, "memory_bytes": watch.peak_bytes}

    def stop(self) -> None:
        """End all workers and all that they started."""
        with ThreadPoolExecutor(len(self._drivers)) as pool:
            list(pool.map(Driver.stop, self._drivers))


def merged(values: Sequence[Any]) -> Any:
    """The same figure of all ranks: the slowest, for lists one by one; what only holds where it
    holds for all; words of the first; of processes (by their number) all, each once."""
    match values[0]:
        case bool():
            return all(values)
        case int() | float():
            return max(values)
        case list():
            return [merged(row) for row in zip(*values, strict=True)]
        case dict():
            keys = dict.fromkeys(key for row in values for key in row)
            return {key: merged([row[key] for row in values if key in row]) for key in keys}
        case _:
            return values[0]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
