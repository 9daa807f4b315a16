"""A tier in this process's memory, up to a budget: what a partner holds of another node.

A file is there when it is finished. Its bytes count from the moment that memory is taken for them,
and as long as they are in the tier.
"""

import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from everstep.errors import Corrupt, Missing, Unavailable
from everstep.tiers.bucket import Url
from everstep.tiers.disk import DOCUMENT_BYTES_MAX
from everstep.tiers.whole import WholeFiles


@dataclass(frozen=True, slots=True)
class _File:
    data: bytearray | bytes
    written: float = field(default_factory=time.time)


class Memory(WholeFiles):
    """A tier of at most `budget_bytes`, beyond which it raises Unavailable. Thread-safe. See Disk
    for what methods promise; here, durable means for as long as this process lives."""

    level = "replicated"
    """Of what is committed there."""

    def __init__(self, budget_bytes: int, name: str = "here") -> None:
        self.root = Url(f"memory://{name}")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._files: dict[str, _File] = {}
        self._lock = threading.RLock()

    def create(self, path: str, data: bytes) -> bool:
        """Publish `data` under `path`; False where `path` exists already."""
        with self._lock:
            if path in self._files:
                return False
            self.replace(path, data)
            return True

    def replace(self, path: str, data: bytes) -> None:
        """Publish `data` under `path`."""
        with self._lock:
            self.reserve(path, len(data))
            self.put(path, bytes(data))

    def holds(self, path: str) -> bool:
        """Whether the file is there."""
        return path in self._files

    def size(self, path: str) -> int | None:
        """Bytes of a file; None where there is none."""
        found = self._files.get(path)
        return None if found is None else len(found.data)

    def age_s(self, path: str) -> float | None:
        """Since a file was written; None where there is none."""
        found = self._files.get(path)
        return None if found is None else max(0.0, time.time() - found.written)

    def read(self, path: str, limit: int = DOCUMENT_BYTES_MAX) -> bytes:
        """The whole of a small file; raises Missing, or Corrupt where it exceeds `limit` bytes."""
        data = self.open(path).view
        if len(data) > limit:
            raise Corrupt(
                f"reading {self.root / path}: {len(data)} bytes, at most {limit} make sense"
            )
        return bytes(data)

    def open(self, path: str, direct: bool = False) -> "MemoryReader":
        """Open for reading; what is deleted meanwhile stays until it is closed."""
        del direct
        found = self._files.get(path)
        if found is None:
            raise Missing(f"reading {self.root / path}: there is no such file")
        return MemoryReader(self.root / path, memoryview(found.data).toreadonly())

    def list(self, directory: str) -> list[str]:
        """The names in a directory, sorted."""
        prefix = f"{directory}/" if directory else ""
        with self._lock:
            below = [path.removeprefix(prefix) for path in self._files if path.startswith(prefix)]
        return sorted({path.partition("/")[0] for path in below})

    def bytes_in(self, directory: str) -> int:
        """Of the files in a directory, together."""
        prefix = f"{directory}/"
        with self._lock:
            return sum(
                len(file.data)
                for path, file in self._files.items()
                if path.startswith(prefix) and "/" not in path.removeprefix(prefix)
            )

    def delete(self, path: str) -> None:
        """Remove a file; no error where it is gone already."""
        with self._lock:
            if found := self._files.pop(path, None):
                self.used_bytes -= len(found.data)

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the tier, for others of this process."""
        del exclusive
        with self._lock:
            yield

    def keep_only(self, paths: Container[str]) -> None:
        """Delete all other files."""
        with self._lock:
            self.forget([path for path in self._files if path not in paths])

    # ---- for its new files -----------------------------------------------------------------

    def _new(self, path: str, size: int) -> "NewInMemory":
        return NewInMemory(self, path, size)

    def reserve(self, path: str, size: int) -> None:
        """Take memory for so many bytes more. Raises Unavailable."""
        with self._lock:
            if self.used_bytes + size > self.budget_bytes:
                raise Unavailable(
                    f"writing {self.root / path} ({size} bytes): {self.used_bytes} of "
                    f"{self.budget_bytes} bytes are in use"
                )
            self.used_bytes += size

    def release(self, size: int) -> None:
        """So many bytes are not needed any more."""
        with self._lock:
            self.used_bytes -= size

    def put(self, path: str, data: bytearray | bytes) -> None:
        """This is the file from now on; memory was taken for it."""
        with self._lock:
            self.delete(path)
            self._files[path] = _File(data)


class NewInMemory:
    """A new file on its way. For one thread."""

    def __init__(self, memory: Memory, path: str, size: int) -> None:
        """Raises Unavailable where there is no room."""
        self._memory, self._path = memory, path
        memory.reserve(path, size)
        self._data: bytearray | None = bytearray(size)

    def room(self, offset: int, size: int) -> memoryview:
        """The memory of these bytes, to be filled, and released before more is asked for. Raises
        Unavailable."""
        assert self._data is not None
        if (more := offset + size - len(self._data)) > 0:
            self._memory.reserve(self._path, more)
            self._data.extend(bytes(more))
        return memoryview(self._data)[offset : offset + size]

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view` there. Raises Unavailable."""
        with self.room(offset, len(view)) as room:
            room[:] = view

    def finish(self) -> None:
        """Make it appear."""
        assert self._data is not None
        data, self._data = self._data, None
        self._memory.put(self._path, data)

    def abandon(self) -> None:
        """Let its memory go, unless it was finished."""
        data, self._data = self._data, None
        if data is not None:
            self._memory.release(len(data))


class MemoryReader:
    """A file in memory. `read_into` is thread-safe."""

    def __init__(self, name: Url, view: memoryview) -> None:
        self._name = name
        self.view = view
        self.size = len(view)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `offset`."""
        if offset + len(view) > self.size:
            raise Corrupt(
                f"reading {self._name}: it ends at byte {self.size}, "
                f"{offset + len(view) - self.size} bytes before the end of what the manifest names"
            )
        view[:] = self.view[offset : offset + len(view)]

    def close(self) -> None:
        """Nothing to release."""
