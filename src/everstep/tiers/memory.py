"""A tier in this process's memory, up to a budget: what a partner holds of another node.

A file is there when all of it has come, and not before. Its bytes count from the moment that memory
is taken for them, and as long as they are in the tier.
"""

import threading
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager

from everstep.errors import Missing, Unavailable
from everstep.tiers.files import cut_short
from everstep.tiers.objects import Objects, Url


class Memory(Objects):
    """A tier of at most `budget_bytes`, beyond which it raises Unavailable. Thread-safe. Has what a
    copy needs: see Disk for what methods promise; here, durable means as long as this process
    lives."""

    def __init__(self, budget_bytes: int) -> None:
        self.root = Url("memory://here")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._files: dict[str, bytearray] = {}
        self._lock = threading.RLock()

    def stream(self, path: str, pieces: Iterable[memoryview], size: int) -> None:
        with self._lock:
            if self.used_bytes + size > self.budget_bytes:
                raise Unavailable(
                    f"writing {self.root / path} ({size} bytes): {self.used_bytes} of "
                    f"{self.budget_bytes} bytes are in use"
                )
            self.used_bytes += size
        try:
            data, at = bytearray(size), 0
            for piece in pieces:
                data[at : at + len(piece)] = piece
                at += len(piece)
        except BaseException:
            with self._lock:
                self.used_bytes -= size
            raise
        with self._lock:
            self.delete(path)
            self._files[path] = data

    def create(self, path: str, data: bytes) -> bool:
        with self._lock:
            if path in self._files:
                return False
            self.replace(path, data)
            return True

    def replace(self, path: str, data: bytes) -> None:
        self.stream(path, [memoryview(data)], len(data))

    def size(self, path: str) -> int | None:
        found = self._files.get(path)
        return None if found is None else len(found)

    def read_range(self, path: str, offset: int, view: memoryview) -> None:
        data, end = self._files.get(path), offset + len(view)
        if data is None:
            raise Missing(f"reading {self.root / path}: there is no such file")
        if end > len(data):
            raise cut_short(self.root / path, len(data), end - len(data))
        view[:] = memoryview(data)[offset:end]

    def list(self, directory: str) -> list[str]:
        prefix = f"{directory}/" if directory else ""
        with self._lock:
            below = [path.removeprefix(prefix) for path in self._files if path.startswith(prefix)]
        return sorted({path.partition("/")[0] for path in below})

    def delete(self, path: str) -> None:
        with self._lock:
            self.used_bytes -= len(self._files.pop(path, b""))

    def keep_only(self, paths: Container[str]) -> None:
        """Delete all other files."""
        with self._lock:
            for path in [path for path in self._files if path not in paths]:
                self.delete(path)

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the tier, for others of this process."""
        del exclusive
        with self._lock:
            yield
