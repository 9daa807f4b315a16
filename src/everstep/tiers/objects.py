"""What tiers have in common whose files are there whole and for good, or not at all: there is
nothing to sync. They are read by ranges, each by a request of its own."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from everstep.errors import Missing
from everstep.tiers.files import read_whole


class Url(str):
    """Where a store lies that is no directory; `/` goes below it, as with a path."""

    def __truediv__(self, path: str) -> "Url":
        return Url(f"{self.rstrip('/')}/{path}")


class Objects(ABC):
    """A bucket, this process's memory, or a partner. See Disk for what methods promise."""

    root: Url
    is_directory = False

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file; None where there is none."""

    @abstractmethod
    def read_range(self, path: str, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`. Raises Corrupt where the file is short, Missing."""

    @abstractmethod
    def list(self, directory: str) -> list[str]:
        """The names in a directory, sorted."""

    def open(self, path: str, direct: bool = False) -> "RangeReader":
        del direct
        if (size := self.size(path)) is None:
            raise Missing(f"reading {self.root / path}: there is no such file")
        return RangeReader(self, path, size)

    def read(self, path: str) -> bytes:
        return read_whole(self.open(path), self.root / path)

    def holds(self, path: str) -> bool:
        return self.size(path) is not None

    def holders(self, directory: str, name: str) -> Sequence[str]:
        found = self.list(directory)
        return [each for each in found if self.size(f"{directory}/{each}/{name}") is not None]

    def share(self, other: object, path: str) -> bool:
        del other, path
        return False

    def sync(self, paths: str | Sequence[str]) -> None:
        del paths

    settle = sync_entries = make_directories = sync

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        del exclusive
        yield


@dataclass(slots=True)
class RangeReader:
    """A file of such a tier. `read_into` is thread-safe."""

    tier: Objects
    path: str
    size: int

    def read_into(self, offset: int, view: memoryview) -> None:
        if len(view):
            self.tier.read_range(self.path, offset, view)

    def close(self) -> None:
        """Nothing to release."""
