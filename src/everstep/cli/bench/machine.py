"""What the bench runs on, in words, and what a process and all that works for it takes: memory, and
processor time."""

import contextlib
import os
import platform
import threading
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

from everstep.cli.bench.floors import is_direct

_SAMPLE_S = 0.1


def describe(directory: Path) -> dict[str, str]:
    """The machine and the versions, in words; `directory` says which file system."""
    direct = "" if is_direct(directory) else "no "
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{_kibibytes(Path('/proc/meminfo'), 'MemTotal') / 2**20:.0f} GiB",
        "file system": f"{file_system(directory)}, {direct}direct I/O",
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


def file_system(directory: Path) -> str:
    """The type of the file system that holds `directory`, and the device under it."""
    best, words = "", "unknown"
    real = os.path.realpath(directory)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, words = mount, f"{kind} on {device}"
    return words


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def processes(root_pid: int, named: str) -> list[int]:
    """`root_pid` (unless 0), its descendants, and who has the argument `named` (a keeper)."""
    parents, found = {}, {root_pid} if root_pid else set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            status = Path(f"/proc/{entry}/stat").read_text()
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        parents[int(entry)] = int(status.rpartition(")")[2].split()[1])
        if named and named.encode() in command.split(b"\0"):
            found.add(int(entry))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def await_end_of(named: str, timeout_s: float = 30.0) -> None:
    """Block until no process has the argument `named` any more (a keeper lingers for a while)."""
    deadline = time.monotonic() + timeout_s
    while processes(0, named):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the keeper of {named} is still there after {timeout_s:.0f} s")
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


def processor_s(pid: int) -> float:
    """User and system time of a process, all its threads, since its start. Raises OSError where it
    has ended.

    By the kernel's clock of the process (clock_getcpuclockid(3), whose number is made thus): in
    nanoseconds, where /proc counts in hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)


class ProcessorWatch:
    """Processor time of this process, and of all that works for it (its children, a keeper)."""

    def __init__(self, named: str) -> None:
        """`named`: see `processes`. What is done before this returns does not count."""
        self._named = named
        self._before = self._now(processes(os.getpid(), named))

    def seconds(self) -> dict[str, float]:
        """By process, since this was made. One that has come meanwhile counts from its start, one
        that has ended does not count."""
        own = self._now([os.getpid()])  # before the look at /proc, which is not to count
        now = {**self._now(processes(os.getpid(), self._named)), **own}
        return {pid: seconds - self._before.get(pid, 0.0) for pid, seconds in now.items()}

    def _now(self, pids: list[int]) -> dict[str, float]:
        found = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                found[str(pid)] = processor_s(pid)
        return found


def _kibibytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0


class MemoryWatch:
    """Samples the memory of processes while the `with` block runs; `peak_bytes` is the largest."""

    def __init__(self, pids: list[int]) -> None:
        self.peak_bytes = 0
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, memory_bytes(self._pids))
            if self._over.wait(_SAMPLE_S):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
