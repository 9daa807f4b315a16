"""The floors of the bench: plain direct I/O of as many bytes as a checkpoint has, and nothing else.

Extents of 8 MiB, four in flight, from or into one page-aligned buffer whose pages are there
already. No copy, no digest, no commit. Run as a program it writes a file for each line that it
reads, so that a training loop can have the bare writes beside it; no torch here.
"""

import errno
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXTENT_BYTES = 8 << 20
IN_FLIGHT = 4
PAGE_BYTES = 4096
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def page_multiple(size: int) -> int:
    """`size` rounded up to whole pages: direct I/O knows nothing smaller."""
    return max(1, -(-size // PAGE_BYTES)) * PAGE_BYTES


def filled_buffer(size: int) -> mmap.mmap:
    """A page-aligned buffer of `size` bytes (whole pages) that do not compress."""
    buffer = mmap.mmap(-1, size)
    noise = os.urandom(min(size, 1 << 20))
    for offset in range(0, size, len(noise)):
        buffer[offset : offset + len(noise)] = noise[: size - offset]
    return buffer


def plain_write(path: Path, buffer: mmap.mmap) -> float:
    """Write the buffer into the new file `path` and fdatasync it; the seconds that took."""
    began = time.perf_counter()
    fd = _open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        os.posix_fallocate(fd, 0, len(buffer))
        _in_flight(lambda view, offset: os.pwrite(fd, view, offset), buffer)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def plain_read(path: Path, buffer: mmap.mmap) -> float:
    """Read the whole file `path` into the buffer, which is of its size; the seconds that took."""
    began = time.perf_counter()
    fd = _open(path, os.O_RDONLY)
    try:
        _in_flight(lambda view, offset: os.preadv(fd, [view], offset), buffer)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def is_direct(directory: Path) -> bool:
    """Whether the file system takes direct I/O; where not, the floors are buffered writes."""
    probe = directory / "direct.probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return os.open(path, flags & ~os.O_EXCL, 0o600)


def _in_flight(transfer: Callable[[memoryview, int], int], buffer: mmap.mmap) -> None:
    """Call `transfer(view, offset)` for every extent of the buffer, several at a time."""

    def whole(offset: int) -> None:
        view = whole_view[offset : offset + EXTENT_BYTES]
        while len(view):
            count = transfer(view, offset)
            if count <= 0:
                raise OSError(errno.EIO, "the transfer made no progress")
            view, offset = view[count:], offset + count

    with memoryview(buffer) as whole_view, ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(whole, range(0, len(buffer), EXTENT_BYTES)))


def main() -> None:
    """Write a file of as many bytes as the first argument says for every path read from stdin."""
    buffer = filled_buffer(page_multiple(int(sys.argv[1])))
    print("ready", flush=True)
    for line in sys.stdin:
        print(plain_write(Path(line.rstrip("\n")), buffer), flush=True)


if __name__ == "__main__":
    main()
