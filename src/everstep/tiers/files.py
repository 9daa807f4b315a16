"""One file on a disk: how a new one is filled, and how one is read.

Direct I/O where file system, size and memory allow it: what is written once and read once is kept
out of the page cache. Nothing here makes a directory entry durable; `Disk` does.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol

from everstep.errors import Corrupt, Unavailable
from everstep.tiers.system import System

DOCUMENT_BYTES_MAX = 1 << 30
EXTENT_BYTES = 8 << 20
WRITES_IN_FLIGHT = 2
_PAGE_BYTES = 4096
_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY
_READ = os.O_RDONLY | os.O_CLOEXEC
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_ADVICE = {
    errno.ENOSPC: ". The disk is full: free some space, or keep fewer checkpoints "
    "(keep=everstep.Keep(last=3))",
    errno.EDQUOT: ". The quota is used up: free some space, or keep fewer checkpoints",
    errno.EROFS: ". The file system is read-only: choose another place for the store",
    errno.EACCES: ". This user may not do that, as a store is for its owner only: run it as the "
    "owner, or choose another store",
}

Await = Callable[[int], None]
"""Blocks until data up to that offset may be read."""


class Source(Protocol):
    """A pack that a tier has: a file, a slot of an arena. A restore asks the nearest one first
    (`Candidate.sources` in restore/choose.py)."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`; for any thread.

        Raises Corrupt where there are fewer bytes or the medium cannot read them, else Missing or
        Unavailable: then the next source is asked.
        """


class Reader(Source, Protocol):
    """An open pack of a tier."""

    size: int

    def close(self) -> None:
        """Release it."""


class NewFile:
    """A new file that is open, and whose bytes are not durable before `finish`. It is written to by
    direct I/O, where that can be had and all that comes is of whole pages. For one thread, but for
    `write`."""

    def __init__(self, system: System, name: str, writers: ThreadPoolExecutor) -> None:
        """`writers`: who serve `fill`. Raises OSError."""
        self._system, self._name, self._writers = system, name, writers
        try:
            self._fd = system.open(name, _CREATE | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            with contextlib.suppress(OSError):  # some refuse only after they have made it
                system.unlink(name)
            self._fd = system.open(name, _CREATE)

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view`. Raises OSError."""
        try:
            _write_all(self._system, self._fd, view, offset)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            self._leave_direct()
            _write_all(self._system, self._fd, view, offset)

    def fill(self, data: Sequence[memoryview], await_bytes: Await = lambda end: None) -> None:
        """Write all of `data` (of bytes), several extents at a time: by direct I/O where each
        starts on a page and is a multiple of one long. `await_bytes(end)` is called in this thread
        before bytes up to `end` are read, and blocks until they may be: those who write serve
        others, too. Raises OSError, and what that raises."""
        if not all(map(is_aligned, data)):  # beforehand: the two ways must not meet in a page
            self._leave_direct()
        try:
            self._system.allocate(self._fd, sum(map(len, data)))
        except OSError as error:  # where the file system does not do that
            if error.errno not in (*_NO_DIRECT, errno.ENOSYS):
                raise
        writes: list[Future[None]] = []
        try:
            for extent, offset in extents_of(data):
                await_bytes(offset + len(extent))
                writes.append(self._writers.submit(self.write, extent, offset))
            for each in writes:
                each.result()
        finally:  # once the descriptor is closed, its number may be another file's
            for each in writes:
                each.cancel()
            wait(writes)

    def finish(self) -> None:
        """Make the bytes durable, and close it, whatever happens. By the descriptor that wrote
        them: another one may not be told of an error. After one it is unlinked. Raises
        Unavailable."""
        with telling("writing", self._name, os.fstat(self._fd).st_size):
            try:
                self._system.fsync(self._fd)
                self._close()
            except BaseException:
                self.abandon()
                with contextlib.suppress(OSError):  # gc finds it
                    self._system.unlink(self._name)
                raise

    def abandon(self) -> None:
        """Close it, if it is open: what it holds is not wanted. Raises nothing."""
        with contextlib.suppress(OSError):
            self._close()

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._system.close(fd)


@contextmanager
def telling(verb: str, where: object, size: int | None = None) -> Iterator[None]:
    """Raises Unavailable for an OSError, with what to do about it."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "")
        how_much = "" if size is None else f" ({size} bytes)"
        said = f"{verb} {where}{how_much}: {error.strerror or error}{advice}"
        raise Unavailable(said) from error


class DiskReader:
    """An open file. `read_into` is thread-safe."""

    def __init__(self, name: str, direct: bool = False) -> None:
        """Raises OSError, and Corrupt for what is no regular file, which might block for ever."""
        self._name = name
        self._direct_fd = -1
        if (found := stat_of(name)) and not stat.S_ISREG(found.st_mode):
            raise Corrupt(
                f"reading {name}: it is no regular file, but a directory, a FIFO, a socket, a "
                f"device, or a link to one. Something else was put in its place"
            )
        self._fd = os.open(name, _READ)
        self.size = os.fstat(self._fd).st_size
        if direct:
            with contextlib.suppress(OSError):  # the page cache serves
                self._direct_fd = os.open(name, _READ | os.O_DIRECT)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `offset`; direct where both are page-aligned."""
        fd = self._fd
        if self._direct_fd >= 0 and offset % _PAGE_BYTES == 0 and is_aligned(view):
            fd = self._direct_fd
        while len(view):
            try:
                count = os.preadv(fd, [view], offset)
            except OSError as error:
                if fd == self._direct_fd and error.errno in _NO_DIRECT:
                    fd = self._fd
                    continue
                where = f"reading {self._name} at byte {offset}: {error.strerror}"
                if error.errno == errno.EIO:  # for good: an older checkpoint may serve
                    raise Corrupt(f"{where}. The medium cannot read it any more") from error
                raise Unavailable(where) from error
            if count == 0:
                raise cut_short(self._name, offset, len(view))
            view, offset = view[count:], offset + count
            if count % _PAGE_BYTES:
                fd = self._fd

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1


def stat_of(name: str) -> os.stat_result | None:
    """Of a file; None where there is none. Thousands are asked for: no Path is made of each."""
    try:
        return os.stat(name)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it is there, and no regular file
            return os.lstat(name)
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def read_whole(reader: Reader, where: object) -> bytes:
    """A document, which lies there. Raises Corrupt where it is too large to be one."""
    check_document(where, reader.size)
    data = bytearray(reader.size)
    reader.read_into(0, memoryview(data))
    return bytes(data)


def check_document(where: object, size: int) -> None:
    """Raises Corrupt where no document has so many bytes."""
    if size > DOCUMENT_BYTES_MAX:
        raise Corrupt(f"reading {where}: {size} bytes, at most {DOCUMENT_BYTES_MAX} make sense")


def cut_short(where: object, end: int, missing: int) -> Corrupt:
    """A file has only so many bytes."""
    return Corrupt(
        f"reading {where}: it ends at byte {end}, {missing} bytes before the end of what the "
        f"manifest names. The file was cut short"
    )


def _write_all(system: System, fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = system.pwrite(fd, view, offset)
        if count <= 0:
            raise OSError(errno.EIO, "the write made no progress")
        view, offset = view[count:], offset + count


def extents_of(data: Sequence[memoryview]) -> Iterator[tuple[memoryview, int]]:
    """What is written at once, and where."""
    offset = 0
    for view in data:
        for at in range(0, len(view), EXTENT_BYTES):
            extent = view[at : at + EXTENT_BYTES]
            yield extent, offset + at
        offset += len(view)


def is_aligned(view: memoryview) -> bool:
    """Whether direct I/O takes it."""
    if len(view) % _PAGE_BYTES or view.readonly or not len(view):
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % _PAGE_BYTES == 0
