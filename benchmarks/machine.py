"""What the bench runs on: a description in words, the memory of processes, the page cache, and the
plain direct I/O beside which saves and restores are put. No torch here.

Run as a program it writes a file of as many bytes as its argument says for each path that it reads,
so that a training loop can have the bare writes beside it.
"""

import contextlib
import errno
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

EXTENT_BYTES = 8 << 20
IN_FLIGHT = 4
PAGE_BYTES = 4096
SAMPLE_S = 0.1
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def describe(directory: Path) -> dict[str, str]:
    """The machine and its versions, in words; `directory` says which file system."""
    memory = _kibibytes(Path("/proc/meminfo"), "MemTotal") / 2**20
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory:.0f} GiB",
        "file system": _file_system(directory),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch") or "missing",
    }


def version(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _file_system(directory: Path) -> str:
    """The type of the file system that holds `directory`, and the device under it."""
    best, words = "", "unknown"
    real = os.path.realpath(directory)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        is_inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if is_inside and len(mount) >= len(best):
            best, words = mount, f"{kind} on {device}"
    return words


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


# Processes and their memory


def processes(roots: list[int], named: str) -> list[int]:
    """The processes `roots`, whoever has the argument `named` (a keeper), and all descendants."""
    parents, found = {}, set(roots)
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            status = Path(f"/proc/{entry}/stat").read_text()
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        parents[int(entry)] = int(status.rpartition(")")[2].split()[1])
        if named.encode() in command.split(b"\0"):
            found.add(int(entry))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def await_end_of_keeper(store: Path, timeout_s: float = 30.0) -> None:
    """Block until the keeper of a store has ended, as it does soon after the last trainer."""
    deadline = time.monotonic() + timeout_s
    while processes([], str(store)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the keeper of {store} is still there after {timeout_s:.0f} s")
        time.sleep(0.05)


def memory_bytes(pids: list[int]) -> int:
    """Resident memory of several processes together; shared memory counts once.

    A trainer and its keeper map the same arena: the sum of resident sizes would count it twice.
    """
    own, shared = 0, [0]
    for pid in pids:
        status = Path(f"/proc/{pid}/status")
        try:
            own += 1024 * (_kibibytes(status, "RssAnon") + _kibibytes(status, "RssFile"))
            shared.append(1024 * _kibibytes(status, "RssShmem"))
        except OSError:
            continue
    return own + max(shared)


@contextlib.contextmanager
def peak_memory(pids: list[int]) -> Iterator[Callable[[], int]]:
    """Samples the memory of these processes within; yields what tells the largest sample."""
    samples = [memory_bytes(pids)]
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(SAMPLE_S):
            samples.append(memory_bytes(pids))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: max(samples)
    finally:
        is_over.set()
        thread.join()


def _kibibytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0


# The page cache, and fresh memory


def evict(root: Path) -> None:
    """Take the files under `root`, and nothing else, out of the page cache: what libraries read
    for their first call stays there, as it does when a process is started again."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def touch_memory(size: int) -> None:
    """Use so much memory and give it back, as a trainer does that has just died: the host of a
    virtual machine takes back what is free for seconds, and the next restore would pay for it."""
    with mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        for start in range(0, size, PAGE_BYTES):
            region[start] = 1


# Plain direct I/O: extents of 8 MiB, four in flight. No copy, no digest, no commit.


def filled_buffer(size: int) -> mmap.mmap:
    """A page-aligned buffer of at least `size` bytes, in whole pages, that do not compress."""
    size = max(1, -(-size // PAGE_BYTES)) * PAGE_BYTES
    buffer = mmap.mmap(-1, size)
    noise = os.urandom(min(size, 1 << 20))
    for offset in range(0, size, len(noise)):
        buffer[offset : offset + len(noise)] = noise[: size - offset]
    return buffer


def plain_write(path: Path, buffer: mmap.mmap) -> float:
    """Write the buffer into the new file `path` and fdatasync it; returns the seconds it took."""
    began = time.perf_counter()
    fd = _open(path, os.O_CREAT | os.O_WRONLY)
    try:
        os.posix_fallocate(fd, 0, len(buffer))
        _transfer(lambda view, offset: os.pwrite(fd, view, offset), buffer, len(buffer))
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def plain_read(path: Path, buffer: mmap.mmap) -> int:
    """Read the file `path` into the buffer, which is no smaller; returns the number of bytes."""
    fd = _open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        _transfer(lambda view, offset: os.preadv(fd, [view], offset), buffer, size)
    finally:
        os.close(fd)
    return size


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
        return os.open(path, flags, 0o600)


def _transfer(move: Callable[[memoryview, int], int], buffer: mmap.mmap, size: int) -> None:
    """Call `move(view, offset)` until the first `size` bytes went through, several at a time."""

    def whole_extent(offset: int) -> None:
        end = min(offset + EXTENT_BYTES, size)
        while offset < end:  # whole pages, also at the end of a file: the buffer has them
            pages_end = min(-(-end // PAGE_BYTES) * PAGE_BYTES, len(buffer))
            count = move(view[offset:pages_end], offset)
            if count <= 0:
                raise OSError(errno.EIO, "the transfer made no progress")
            offset += count

    with memoryview(buffer) as view, ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(whole_extent, range(0, size, EXTENT_BYTES)))


def main() -> None:
    """Serve paths from standard input with files of as many bytes as the first argument says."""
    buffer = filled_buffer(int(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        print(plain_write(Path(line.rstrip("\n")), buffer), flush=True)


if __name__ == "__main__":
    main()
