"""A directory as a tier: durable writes, atomic creates, verified nothing (that is the store's).

Order is everything here. A new file is on the medium when it is finished and its directory entry is
synced; `create` makes a small file appear at once and whole, or not at all. Every system call that
changes anything goes through `System`, so that tests can make the N-th one fail, kill, or forget
what was not synced.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from everstep.errors import Missing, Unavailable, Unsupported
from everstep.tiers.files import WRITES_IN_FLIGHT, DiskReader, NewFile, read_whole, stat_of, telling
from everstep.tiers.system import System

LOCK_WAIT_S = 60.0
_LOCK_RETRY_S = 0.01
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)


class Disk:
    """A tier on a local or mounted file system, rooted at a directory. Thread-safe."""

    level = "local"
    """Of what is committed there."""
    is_directory = True
    """Whether `locked` keeps others away, and a file that is there need not be whole."""

    def __init__(self, root: str | os.PathLike[str], system: System | None = None) -> None:
        self.root = Path(root)
        self._system = system or System()
        self._writers = ThreadPoolExecutor(WRITES_IN_FLIGHT, "everstep-write")
        self._known_directories: set[str] = set()
        self._known_files: dict[str, int] = {}

    @property
    def written(self) -> int:
        """Bytes that this one has written of files, about."""
        return self._system.written

    @contextmanager
    def new_file(self, path: str, size: int = 0) -> Iterator[NewFile]:
        """Write the new file `path`. It is durable when it is finished, after this, and
        `sync_entries` was called: several are made so together. On any error it is unlinked, but
        where another was there; Unavailable is raised, or what was raised within. `size`: for
        messages."""
        name = str(self.root / path)
        with telling("writing", self.root / path, size):
            self._make_directories([os.path.dirname(path)])
            file = NewFile(self._system, name, self._writers)
            try:
                yield file
            except BaseException:
                file.abandon()
                self._forget(name)
                raise

    def stream(self, path: str, pieces: Iterable[memoryview], size: int) -> None:
        """Publish the `size` bytes that `pieces` bring, one behind the other, under `path` durably:
        readers see what was there before, or all of it. Nobody changes a piece afterwards. On an
        error nothing has changed; Unavailable is raised, or what `pieces` raised."""
        with telling("writing", self.root / path, size), self._draft(path, pieces, size) as draft:
            self._system.rename(draft, str(self.root / path))
            self._known_files.pop(path, None)
            self._sync_directory(os.path.dirname(path))

    def share(self, other: object, path: str) -> bool:
        """Have the other tier's file of that path without a byte being read: there is a second name
        of it. False where the two are not on one file system, it has no hard links, or another file
        is there. Durable after `sync_entries`. Raises Unavailable."""
        if not isinstance(other, Disk):
            return False
        with telling("linking", self.root / path):
            self._make_directories([os.path.dirname(path)])
            theirs, own = str(other.root / path), str(self.root / path)
            try:
                return self._link(theirs, own) or os.path.samefile(theirs, own)
            except Unsupported:
                return False

    def settle(self, path: str) -> None:
        """Make a file durable that another process may have written, and not synced."""
        with telling("syncing", self.root / path):
            self._sync(str(self.root / path), os.O_RDONLY)
            self._sync_directory(os.path.dirname(path))

    def sync_entries(self, paths: Sequence[str]) -> None:
        """Make it durable that these files are there: one sync for each directory."""
        for directory, path in {os.path.dirname(path): path for path in paths}.items():
            with telling("writing", self.root / path, self.size(path) or 0):
                self._sync_directory(directory)

    def create(self, path: str, data: bytes) -> bool:
        """Publish `data` under `path` at once and durably; False where `path` exists already."""
        with telling("creating", self.root / path, len(data)):
            name = str(self.root / path)
            with self._draft(path, [memoryview(data)], len(data)) as draft:
                created = self._link(draft, name)
            try:
                self._sync_directory(os.path.dirname(path))
            except OSError:
                if created:  # durable or not, nobody knows: none may take it for published
                    self._forget(name)
                    with contextlib.suppress(OSError):
                        self._sync_directory(os.path.dirname(path))
                raise
            return created

    def replace(self, path: str, data: bytes) -> None:
        """Publish `data` under `path` durably; readers see what was there before, or this."""
        self.stream(path, [memoryview(data)], len(data))

    def make_directories(self, directories: Sequence[str]) -> None:
        """Make directories durably, with one sync for all that lie in the same one."""
        with telling("making", self.root / (directories[0] if directories else "")):
            self._make_directories(directories)

    def holds(self, path: str) -> bool:
        """Whether the file exists, and durably: its directory is synced here, once for each file.

        Whoever created it may have died before its own sync.
        """
        if (found := self._stat(path)) is None:
            return False
        if self._known_files.get(path) != found.st_ino:
            with telling("looking for", self.root / path):
                self._sync_directory(os.path.dirname(path))
            self._known_files[path] = found.st_ino
        return True

    def size(self, path: str) -> int | None:
        """Bytes of a file; None where there is none. Raises Unavailable."""
        found = self._stat(path)
        return None if found is None else found.st_size

    def _stat(self, path: str) -> os.stat_result | None:
        with telling("looking for", self.root / path):
            return stat_of(f"{self.root}/{path}")

    def read(self, path: str) -> bytes:
        """The whole of a document; raises Missing, or Corrupt where it is too large to be one."""
        with contextlib.closing(self.open(path)) as reader:
            return read_whole(reader, self.root / path)

    def open(self, path: str, direct: bool = False) -> DiskReader:
        """Open for reading; `direct` bypasses the page cache where file and alignment allow it."""
        with telling("reading", self.root / path):
            try:
                return DiskReader(str(self.root / path), direct)
            except FileNotFoundError:
                raise Missing(f"reading {self.root / path}: there is no such file") from None

    def list(self, directory: str) -> list[str]:
        """The names in a directory, sorted; empty where there is none."""
        with telling("listing", self.root / directory):
            try:
                return sorted(os.listdir(self.root / directory))
            except FileNotFoundError:
                return []

    def holders(self, directory: str, name: str) -> Sequence[str]:
        """What lies in a directory and has a file of this name in it; sorted."""
        place, found = f"{self.root}/{directory}", self.list(directory)
        with telling("looking into", self.root / directory):
            return [each for each in found if stat_of(f"{place}/{each}/{name}")]

    def files(self, directory: str) -> dict[str, tuple[int, float]]:
        """The files in a directory: bytes of each, and when it was last written to, by the clock
        `now`. Raises Unavailable."""
        place, names = f"{self.root}/{directory}", self.list(directory)
        with telling("looking into", self.root / directory):
            found = {name: stat_of(f"{place}/{name}") for name in names}
        regular = ((n, each) for n, each in found.items() if each and stat.S_ISREG(each.st_mode))
        return {name: (each.st_size, each.st_mtime) for name, each in regular}

    def now(self) -> float:
        """The time by the clock that stamps files."""
        return time.time()

    def delete(self, path: str) -> None:
        """Remove a file durably, and its directory where that is empty then.

        No error where it is gone already: but durably too, since whoever removed it may have died
        before its own sync.
        """
        with telling("deleting", self.root / path):
            self._known_files.pop(path, None)
            parent = os.path.dirname(path)
            with contextlib.suppress(FileNotFoundError):
                self._system.unlink(str(self.root / path))
            try:
                self._sync_directory(parent)
            except FileNotFoundError:
                return
            if os.path.dirname(parent):  # never the store's own top directories
                try:
                    self._system.rmdir(str(self.root / parent))
                    self._known_directories.discard(parent)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                        raise

    def forget(self, paths: Sequence[str]) -> None:
        """Remove files on which nothing depends: not durably, and no error where one cannot be."""
        for path in paths:
            self._known_files.pop(path, None)
            self._forget(str(self.root / path))

    def sync(self, directory: str) -> None:
        """Make what is (and is not) in a directory durable; nothing to do where there is none."""
        with telling("syncing", self.root / directory), contextlib.suppress(FileNotFoundError):
            self._sync_directory(directory)

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the store, exclusively to delete, shared to publish: an advisory lock on its root.

        Waits at most LOCK_WAIT_S, then raises Unavailable. A file system without locks has none.
        """
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        with telling("locking", self.root):
            fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + LOCK_WAIT_S
            while not self._try_lock(fd, kind):
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"locking {self.root}: another process has held it for {LOCK_WAIT_S:.0f} s "
                        f"(an everstep gc or rm that was stopped?). End it, then try again"
                    )
                time.sleep(_LOCK_RETRY_S)
            yield
        finally:
            os.close(fd)

    def _try_lock(self, fd: int, kind: int) -> bool:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOLCK):
                raise Unavailable(f"locking {self.root}: {error.strerror}") from error
        return True

    @contextmanager
    def _draft(self, path: str, pieces: Iterable[memoryview], size: int) -> Iterator[str]:
        """The full name of a durable file that holds what `pieces` bring, gone afterwards."""
        draft, at = f"{path}.{secrets.token_hex(4)}.tmp", 0
        try:
            with self.new_file(draft, size) as file:
                for piece in pieces:
                    file.write(piece, at)
                    at += len(piece)
            file.finish()
            yield str(self.root / draft)
        finally:
            self._forget(str(self.root / draft))

    def _link(self, draft: str, name: str) -> bool:
        try:
            self._system.link(draft, name)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise Unsupported(
                f"creating {name}: this file system cannot create a file atomically (no hard "
                f"links: {error.strerror}). Put the store on another one"
            ) from error
        return True

    def _make_directories(self, directories: Sequence[str]) -> None:
        """Make directories below the root durably.

        What exists is synced once by each process too: whoever made it may have died before.
        """
        known = self._known_directories
        unknown = [
            each for each in directories if each not in known or not os.path.isdir(self.root / each)
        ]
        below = [each for each in unknown if each]
        if len(below) < len(unknown):
            self._make_root()
        parents = list(dict.fromkeys(map(os.path.dirname, below)))
        if parents:
            self._make_directories(parents)
        for directory in below:
            self._make_directory(self.root / directory)
        for parent in parents:
            self._sync_directory(parent)
        known.update(unknown)

    def _make_root(self) -> None:
        root = self.root.absolute()
        for path in reversed([root, *root.parents]):
            existed = path.is_dir()
            if not existed:
                self._make_directory(path)
            if not existed or (path == root and not path.is_mount()):
                try:
                    self._sync(str(path.parent))
                except PermissionError:
                    if not existed:
                        raise

    def _make_directory(self, path: Path) -> None:
        try:
            self._system.mkdir(str(path))
        except FileExistsError:
            if not path.is_dir():
                raise NotADirectoryError(
                    errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)
                ) from None

    def _sync_directory(self, directory: str) -> None:
        self._sync(str(self.root / directory))

    def _sync(self, name: str, flags: int = os.O_RDONLY | os.O_DIRECTORY) -> None:
        fd = self._system.open(name, flags)
        try:
            self._system.fsync(fd)
        finally:
            self._system.close(fd)

    def _forget(self, name: str) -> None:
        with contextlib.suppress(OSError):  # gc finds it
            self._system.unlink(name)
