"""What tiers in memory have in common: a file appears whole or not at all, and is as durable then
as it will be. So there is nothing to sync, and no directory to make."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from everstep.tiers.files import Await, extents_of


class WholeFiles:
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

    def _new(self, path: str, size: int) -> Any:
        """With `write(view, offset)`, `finish` and `abandon`."""
        raise NotImplementedError

    def finish(self, path: str, file: Any) -> None:
        """Make a new file appear."""
        file.finish()

    def holders(self, directory: str, name: str) -> Sequence[str]:
        """See Disk."""
        found = self.list(directory)
        return [each for each in found if self.size(f"{directory}/{each}/{name}") is not None]

    def list(self, directory: str) -> list[str]:
        """See Disk."""
        raise NotImplementedError

    def size(self, path: str) -> int | None:
        """See Disk."""
        raise NotImplementedError

    def settle(self, path: str) -> None:
        """Nothing to do."""

    def sync_entries(self, paths: Sequence[str]) -> None:
        """Nothing to do."""

    def make_directories(self, directories: Sequence[str]) -> None:
        """Nothing to do."""

    def sync(self, directory: str) -> None:
        """Nothing to do."""
