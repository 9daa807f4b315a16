"""A disk that fails, a process that dies, a machine that loses power: at the N-th system call.

`Medium` is the model: for each directory and file, what the running system sees (live) and what
would be there after a power cut (durable). A file's bytes become durable by its fsync; a
directory's entries (create, link, rename, unlink, mkdir, rmdir) by the directory's fsync, and not
before.
"""

import errno
import fcntl
import os
import random
import threading
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from everstep.tiers.system import System


class Killed(BaseException):
    """The process is gone: nothing may handle this, and every later call raises it again."""


class Fault(Enum):
    """What happens at the N-th call."""

    EIO = "this call fails"
    ENOSPC = "this call fails, since the disk is full"
    BURST = "this call and the next three fail"
    NO_SYNC = "from this call on every fsync fails"
    DEAD_DISK = "this call and all later ones fail"
    KILL = "the process dies"


@dataclass(eq=False)
class File:
    """A file; `durable` is None until its first fsync."""

    durable: bytes | None = None


@dataclass(eq=False)
class Directory:
    """A directory: its entries as they are seen, and as a power cut would leave them.

    `past` holds what each entry was since the last sync: a journal may have written any of it.
    """

    live: dict[str, "Node"] = field(default_factory=dict)
    durable: dict[str, "Node"] = field(default_factory=dict)
    past: dict[str, list["Node | None"]] = field(default_factory=dict)

    def put(self, name: str, node: "Node | None") -> None:
        """Change an entry; None: it goes."""
        self.past.setdefault(name, []).append(node)
        if node:
            self.live[name] = node
        else:
            del self.live[name]

    def sync(self) -> None:
        """What is seen is durable."""
        self.durable, self.past = dict(self.live), {}


Node = File | Directory


class Medium:
    """Models the tree below `base`, which is all durable at first."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.root = _scan(base)

    def parent(self, path: str) -> tuple[Directory, str]:
        """The directory that holds `path`, and its name in it."""
        *folders, name = Path(path).relative_to(self.base).parts
        node = self.root
        for folder in folders:
            node = node.live[folder]
        return node, name

    def at(self, path: str) -> Node:
        """The node at `path`."""
        if Path(path) == self.base:
            return self.root
        directory, name = self.parent(path)
        return directory.live[name]

    def after_power_cut(self, target: Path, rng: random.Random | None = None) -> Path:
        """Write what a power cut leaves into the new directory `target`.

        Without `rng`: only what was synced. With it: of what was not, a random part got through.
        """
        _write_out(self.root, target, rng)
        return target


def _scan(path: Path) -> Directory:
    entries = {
        entry.name: _scan(entry) if entry.is_dir() else File(entry.read_bytes())
        for entry in path.iterdir()
    }
    return Directory(entries, dict(entries))


def _write_out(directory: Directory, target: Path, rng: random.Random | None) -> None:
    target.mkdir()
    for name in sorted({*directory.durable, *directory.past}):
        node = directory.durable.get(name)
        if rng and name in directory.past:
            node = rng.choice([node, *directory.past[name]])
        if isinstance(node, Directory):
            _write_out(node, target / name, rng)
        elif node:
            garbage = rng.randbytes(rng.randrange(100)) if rng else b""
            (target / name).write_bytes(garbage if node.durable is None else node.durable)


class FaultySystem(System):
    """Works on the real files below `medium.base`, and keeps the model; does no real sync.

    At call number `at` (from 1 on; 0: never) `fault` happens. `short`: each pwrite writes only a
    random part. `no_direct`: "open" or "write" refuses direct I/O, as some file systems do.
    """

    def __init__(
        self,
        medium: Medium,
        fault: Fault | None = None,
        at: int = 0,
        short: random.Random | None = None,
        no_direct: str = "",
    ) -> None:
        self.medium = medium
        self.fault = fault
        self.at = at
        self.short = short
        self.no_direct = no_direct
        self.calls: list[str] = []
        self.fired = False
        self._paths: dict[int, str] = {}
        self._lock = threading.RLock()

    def disarm(self) -> None:
        """The disk works again."""
        self.fault = None

    def release(self) -> None:
        """Close what a killed process left open."""
        for fd in self._paths:
            os.close(fd)
        self._paths.clear()

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        with self._lock:
            self._call(f"open {os.path.basename(path)}")
            if self.no_direct == "open" and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O here")
            fd = super().open(path, flags, mode)
            if flags & os.O_CREAT:
                directory, name = self.medium.parent(path)
                directory.put(name, File())
            self._paths[fd] = path
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            try:
                self._call("close")
            finally:
                if self.fault is not Fault.KILL or not self.fired:
                    self._paths.pop(fd, None)
                    super().close(fd)

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        with self._lock:
            self._call(f"pwrite {len(data)} at {offset}")
            assert fd in self._paths, "a write to a closed descriptor"
            is_direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
            if self.no_direct == "write" and is_direct:
                raise OSError(errno.EINVAL, "no direct I/O here")
            if self.short and len(data) > 1:
                data = data[: self.short.randrange(1, len(data))]
            return super().pwrite(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        with self._lock:
            self._call(f"allocate {size}")
            super().allocate(fd, size)

    def fsync(self, fd: int) -> None:
        with self._lock:
            path = self._paths[fd]
            self._call(f"fsync {os.path.basename(path)}")
            node = self.medium.at(path)
            if isinstance(node, Directory):
                node.sync()
            else:
                node.durable = Path(path).read_bytes()

    def link(self, old: str, new: str) -> None:
        with self._lock:
            self._call(f"link {os.path.basename(new)}")
            super().link(old, new)
            directory, name = self.medium.parent(new)
            directory.put(name, self.medium.at(old))

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._call(f"rename {os.path.basename(new)}")
            super().rename(old, new)
            directory, name = self.medium.parent(new)
            source, old_name = self.medium.parent(old)
            directory.put(name, source.live[old_name])
            source.put(old_name, None)

    def unlink(self, path: str) -> None:
        with self._lock:
            self._call(f"unlink {os.path.basename(path)}")
            super().unlink(path)
            directory, name = self.medium.parent(path)
            directory.put(name, None)

    def mkdir(self, path: str) -> None:
        with self._lock:
            self._call(f"mkdir {os.path.basename(path)}")
            super().mkdir(path)
            directory, name = self.medium.parent(path)
            directory.put(name, Directory())

    def rmdir(self, path: str) -> None:
        with self._lock:
            self._call(f"rmdir {os.path.basename(path)}")
            super().rmdir(path)
            directory, name = self.medium.parent(path)
            directory.put(name, None)

    def _call(self, what: str) -> None:
        if self.fired and self.fault is Fault.KILL:
            raise Killed
        self.calls.append(what)
        if self.fault is None or not self.at or len(self.calls) < self.at:
            return
        first = len(self.calls) == self.at
        self.fired = True
        match self.fault:
            case Fault.KILL:
                raise Killed
            case Fault.ENOSPC if first:
                raise OSError(errno.ENOSPC, "the disk is full")
            case Fault.EIO if not first:
                return
            case Fault.BURST if len(self.calls) > self.at + 3:
                return
            case Fault.NO_SYNC if not what.startswith("fsync"):
                return
            case Fault.ENOSPC:
                return
        raise OSError(errno.EIO, "the disk does not answer")
