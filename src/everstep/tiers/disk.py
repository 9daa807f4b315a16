"""A directory as a tier: durable writes, atomic creates, verified nothing (that is the store's).

Order is everything here. `write` returns when the file's bytes and its directory entry are on the
medium; `create` makes a small file appear at once and whole, or not at all. Every system call goes
through `System`, so that tests can make the N-th one fail, kill, or forget what was not synced.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from everstep.errors import Corrupt, Missing, Unavailable, Unsupported

EXTENT_BYTES = 8 << 20
WRITES_IN_FLIGHT = 2
DOCUMENT_BYTES_MAX = 1 << 30
_PAGE_BYTES = 4096
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class System:
    """The system calls that a Disk makes. Stateless; errors are OSError."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """open(2)."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """close(2)."""
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        """pwrite(2); releases the GIL."""
        return os.pwrite(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        """fallocate(2): reserve `size` bytes, so that a full disk says so before the writes."""
        if _libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def fsync(self, fd: int) -> None:
        """fsync(2), of a file or a directory."""
        os.fsync(fd)

    def link(self, old: str, new: str) -> None:
        """link(2): fails with EEXIST where `new` is there."""
        os.link(old, new)

    def unlink(self, path: str) -> None:
        """unlink(2)."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """mkdir(2), for the owner only."""
        os.mkdir(path, 0o700)

    def rmdir(self, path: str) -> None:
        """rmdir(2)."""
        os.rmdir(path)


_libc = ctypes.CDLL(None, use_errno=True)


class Reader(Protocol):
    """An open file of a tier."""

    size: int

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`; may be called from several threads. Raises Corrupt at a short file."""

    def close(self) -> None:
        """Release it."""


class Disk:
    """A tier on a local or mounted file system, rooted at a directory. Thread-safe."""

    def __init__(self, root: str | os.PathLike[str], system: System | None = None) -> None:
        self.root = Path(root)
        self._system = system or System()
        self._known_directories: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def write(self, path: str, data: Sequence[memoryview]) -> None:
        """Write the new file `path` as the concatenation of `data`; blocks until it is durable.

        Buffers that start on a page and are a multiple of one long go by direct I/O, several
        extents in flight. On any error nothing usable is left behind, and Unavailable is raised.
        """
        size = sum(map(len, data))
        with self._telling("writing", path, size):
            self._make_directories(os.path.dirname(path))
            name = str(self.root / path)
            try:
                self._write_file(name, data, size)
            except OSError:
                self._forget(name)
                raise
            self._sync_directory(os.path.dirname(path))

    def create(self, path: str, data: bytes) -> bool:
        """Publish `data` under `path` at once and durably; False where `path` exists already."""
        with self._telling("creating", path, len(data)):
            self._make_directories(os.path.dirname(path))
            name = str(self.root / path)
            draft = f"{name}.{secrets.token_hex(4)}.tmp"
            try:
                self._write_buffered(draft, [memoryview(data)], len(data))
                try:
                    self._system.link(draft, name)
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                        raise Unsupported(
                            f"creating {name}: this file system cannot create a file atomically (no hard "
                            f"links: {error.strerror}). Put the store on another one"
                        ) from error
                    raise
            finally:
                self._forget(draft)
            self._sync_directory(os.path.dirname(path))
            return True

    def read(self, path: str, limit: int = DOCUMENT_BYTES_MAX) -> bytes:
        """The whole of a small file; raises Missing, or Corrupt where it is larger than `limit` bytes."""
        reader = self.open(path)
        try:
            if reader.size > limit:
                raise Corrupt(
                    f"reading {self.root / path}: {reader.size} bytes, at most {limit} make sense here"
                )
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
            return bytes(data)
        finally:
            reader.close()

    def open(self, path: str, direct: bool = False) -> "DiskReader":
        """Open a file for reading; `direct` passes the page cache by where file system and alignment allow."""
        try:
            return DiskReader(str(self.root / path), direct)
        except FileNotFoundError:
            raise Missing(f"reading {self.root / path}: there is no such file") from None
        except OSError as error:
            raise Unavailable(f"reading {self.root / path}: {error.strerror}") from error

    def list(self, directory: str) -> list[str]:
        """The names in a directory, sorted; empty where there is none."""
        try:
            return sorted(os.listdir(self.root / directory))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unavailable(f"listing {self.root / directory}: {error.strerror}") from error

    def delete(self, path: str) -> None:
        """Remove a file (and its directory, where that is empty then); no error where it is gone already."""
        with self._telling("deleting", path, 0):
            try:
                self._system.unlink(str(self.root / path))
                self._sync_directory(os.path.dirname(path))
            except FileNotFoundError:
                pass
            parent = os.path.dirname(path)
            if os.path.dirname(parent):  # never the store's own top directories
                try:
                    self._system.rmdir(str(self.root / parent))
                    self._known_directories.discard(parent)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                        raise

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the store for deleting: one process of this node at a time (an advisory lock on its root)."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOLCK):
                    raise Unavailable(f"locking {self.root}: {error.strerror}") from error
            yield
        finally:
            os.close(fd)

    def _make_directories(self, directory: str) -> None:
        """Make `directory` below the root durably. What exists is synced once by each process too: whoever
        made it may have died before its own sync."""
        if directory in self._known_directories and os.path.isdir(self.root / directory):
            return
        if directory:
            self._make_directories(os.path.dirname(directory))
            self._make_directory(self.root / directory)
            self._sync_directory(os.path.dirname(directory))
        else:
            for path in reversed([self.root, *self.root.parents]):
                if not path.is_dir():
                    self._make_directory(path)
                    self._sync(str(path.parent))
        self._known_directories.add(directory)

    def _make_directory(self, path: Path) -> None:
        try:
            self._system.mkdir(str(path))
        except FileExistsError:
            if not path.is_dir():
                raise NotADirectoryError(
                    errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)
                ) from None

    def _write_file(self, name: str, data: Sequence[memoryview], size: int) -> None:
        if all(_is_aligned(view) for view in data):
            try:
                fd = self._system.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
            else:
                if self._fill_directly(fd, data, size):
                    return
                self._system.unlink(name)
        self._write_buffered(name, data, size)

    def _fill_directly(self, fd: int, data: Sequence[memoryview], size: int) -> bool:
        """False where the file system opened the file for direct I/O, but refuses to do it."""
        try:
            self._allocate(fd, size)
            extents = list(_extents(data))
            list(self._executor().map(lambda extent: self._write_all(fd, *extent), extents))
            self._system.fsync(fd)
        except OSError as error:
            if error.errno in _NO_DIRECT:
                return False
            raise
        finally:
            self._system.close(fd)
        return True

    def _write_buffered(self, name: str, data: Sequence[memoryview], size: int) -> None:
        fd = self._system.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            for view, offset in _extents(data):
                self._write_all(fd, view, offset)
            self._system.fsync(fd)
        finally:
            self._system.close(fd)

    def _allocate(self, fd: int, size: int) -> None:
        try:
            self._system.allocate(fd, size)
        except OSError as error:
            if error.errno not in (*_NO_DIRECT, errno.ENOSYS):
                raise

    def _write_all(self, fd: int, view: memoryview, offset: int) -> None:
        while len(view):
            count = self._system.pwrite(fd, view, offset)
            if count <= 0:
                raise OSError(errno.EIO, "the write made no progress")
            view, offset = view[count:], offset + count

    def _sync_directory(self, directory: str) -> None:
        self._sync(str(self.root / directory))

    def _sync(self, name: str) -> None:
        fd = self._system.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._system.fsync(fd)
        finally:
            self._system.close(fd)

    def _forget(self, name: str) -> None:
        try:
            self._system.unlink(name)
        except OSError:
            pass  # gc finds it

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(WRITES_IN_FLIGHT, "everstep-write")
            return self._pool

    @contextmanager
    def _telling(self, verb: str, path: str, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = {
                errno.ENOSPC: ". The disk is full: free some space, or keep fewer checkpoints (keep=everstep.Keep(last=3))",
                errno.EDQUOT: ". The quota is used up: free some space, or keep fewer checkpoints",
                errno.EROFS: ". The file system is read-only: choose another place for the store",
                errno.EACCES: ". This user may not write there: choose another place for the store",
            }.get(error.errno or 0, "")
            raise Unavailable(
                f"{verb} {self.root / path} ({size} bytes): {error.strerror or error}{advice}"
            ) from error


class DiskReader:
    """An open file. `read_into` is thread-safe."""

    def __init__(self, name: str, direct: bool = False) -> None:
        self._name = name
        self._direct_fd = -1
        self._fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        if direct:
            try:
                self._direct_fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError:
                pass  # the page cache serves

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the file's bytes from `offset`. Direct where offset and view are page-aligned."""
        fd = self._fd
        if self._direct_fd >= 0 and offset % _PAGE_BYTES == 0 and _is_aligned(view):
            fd = self._direct_fd
        while len(view):
            try:
                count = os.preadv(fd, [view], offset)
            except OSError as error:
                if fd == self._direct_fd and error.errno in _NO_DIRECT:
                    fd = self._fd
                    continue
                raise Unavailable(
                    f"reading {self._name} at byte {offset}: {error.strerror}"
                ) from error
            if count == 0:
                raise Corrupt(
                    f"reading {self._name}: it ends at byte {offset}, {len(view)} bytes before the end of what "
                    f"the manifest names. The file was cut short"
                )
            view, offset = view[count:], offset + count
            if count % _PAGE_BYTES:
                fd = self._fd

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1


def _extents(data: Sequence[memoryview]) -> Iterator[tuple[memoryview, int]]:
    offset = 0
    for view in data:
        for at in range(0, len(view), EXTENT_BYTES):
            extent = view[at : at + EXTENT_BYTES]
            yield extent, offset + at
        offset += len(view)


def _is_aligned(view: memoryview) -> bool:
    if len(view) % _PAGE_BYTES or view.readonly or not len(view):
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % _PAGE_BYTES == 0
