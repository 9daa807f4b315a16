"""What tiers in memory have in common: a file appears whole or not at all, and is as durable then
as it will be. So there is nothing to sync, and no directory to make."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from everstep.errors import Unavailable
from everstep.tiers.files import Await, extents_of


class WholeFiles(ABC):
    """See Disk for what methods promise."""

    shows_whole_files = True
    has_locks = True  # who deletes is who writes

    def write(
        self, path: str, data: Sequence[memoryview], await_bytes: Await = lambda end: None
    ) -> None:
        """Write the new file `path`."""
        self.finish(path, self.begin(path, data, await_bytes))

    def begin(
        self, path: str, data: Sequence[memoryview], await_bytes: Await = lambda end: None
    ) -> Any:
        """As `write`, but it is not there before `finish`."""
        with self.new_file(path, sum(map(len, data))) as file:
            for extent, offset in extents_of(data):
                await_bytes(offset + len(extent))
                file.write(extent, offset)
        return file

    def stream(self, path: str, pieces: Iterable[memoryview], size: int) -> None:
        """Publish what `pieces` bring."""
        with self.new_file(path, size) as file:
            at = 0
            for piece in pieces:
                file.write(piece, at)
                at += len(piece)
        file.finish()

    @contextmanager
    def new_file(self, path: str, size: int = 0) -> Iterator[Any]:
        """Write the new file piece by piece; on any error it does not appear. `size`: for which
        memory is taken at once."""
        file = self._new(path, size)
        try:
            yield file
        except BaseException:
            file.abandon()
            raise

    @abstractmethod
    def _new(self, path: str, size: int) -> Any:
        """With `write(view, offset)`, `finish` and `abandon`."""

    def finish(self, path: str, file: Any) -> None:
        """Make a new file appear."""
        file.finish()

    def holders(self, directory: str, name: str) -> Sequence[str]:
        """See Disk."""
        found = self.list(directory)
        return [each for each in found if self.size(f"{directory}/{each}/{name}") is not None]

    @abstractmethod
    def list(self, directory: str) -> list[str]:
        """See Disk."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """See Disk."""

    @abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """See Disk."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """See Disk."""

    def forget(self, paths: Sequence[str]) -> None:
        """Remove files on which nothing depends: no error where one cannot be."""
        for path in paths:
            with contextlib.suppress(Unavailable):
                self.delete(path)

    @contextmanager
    def claim(self, path: str) -> Iterator[None]:
        """Hold the new file `path`, which is gone again when this ends."""
        self.replace(path, b"")
        try:
            yield
        finally:
            self.forget([path])

    def is_claimed(self, path: str) -> bool:
        """Whether `path` is held."""
        return self.size(path) is not None

    def settle(self, path: str) -> None:
        """Nothing to do."""

    def sync_entries(self, paths: Sequence[str]) -> None:
        """Nothing to do."""

    def make_directories(self, directories: Sequence[str]) -> None:
        """Nothing to do."""

    def sync(self, directory: str) -> None:
        """Nothing to do."""
