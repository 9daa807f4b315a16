"""Disk: what it writes, what it refuses, and what real file systems do."""

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from everstep import Corrupt, Missing, Unavailable, Unsupported
from everstep.store import commit
from everstep.tiers import disk as disk_module
from everstep.tiers import files
from everstep.tiers.disk import Disk
from everstep.tiers.system import System
from stores import write


def _pages(count: int) -> memoryview:
    """Page-aligned memory."""
    view = memoryview(mmap.mmap(-1, count * 4096))
    view[:] = os.urandom(len(view))
    return view


class Watching(System):
    """Notes how files are opened, and can refuse."""

    def __init__(self, refuse: str = "", code: int = errno.EINVAL) -> None:
        self.refuse, self.code = refuse, code
        self.sizes: list[int] = []

    def _check(self, call: str) -> None:
        if self.refuse == call:
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path, flags, mode=0o600):
        if flags & os.O_DIRECT:
            self._check("open direct")
        return super().open(path, flags, mode)

    def pwrite(self, fd, data, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            self._check("pwrite direct")
        self._check("pwrite")
        self.sizes.append(len(data))
        return super().pwrite(fd, data, offset)

    def allocate(self, fd, size):
        self._check("allocate")
        super().allocate(fd, size)

    def fsync(self, fd):
        self._check("fsync file" if not os.path.isdir(f"/proc/self/fd/{fd}") else "fsync directory")

    def link(self, old, new):
        self._check("link")
        super().link(old, new)


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path):
    """A directory on the disk, and one on a tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(prefix="everstep-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.parametrize("refuse", ["", "open direct", "pwrite direct", "allocate"])
def test_aligned_writes(place, refuse):
    data = [_pages(3), _pages(1)]
    disk = Disk(place / "s", Watching(refuse))
    write(disk, "data/x", data)
    assert (place / "s/data/x").read_bytes() == b"".join(data)
    assert disk.size("data/x") == 4 * 4096
    assert disk.size("data/y") is disk.size("data/x/y") is None


@pytest.mark.parametrize("sizes", [[], [0], [1], [4095], [5000, 3], [4096, 1]])
def test_unaligned_writes(place, sizes):
    data = [memoryview(bytearray(os.urandom(size + 1)))[1:] for size in sizes]
    write(Disk(place / "s"), "x", data)
    assert (place / "s/x").read_bytes() == b"".join(data)


def test_read_only_buffers(place):
    write(Disk(place / "s"), "x", [memoryview(bytes(4096))])
    assert (place / "s/x").stat().st_size == 4096


def test_large_writes_go_in_extents(tmp_path):
    system = Watching()
    data = _pages(5 << 10)
    write(Disk(tmp_path / "s", system), "x", [data])
    assert sorted(system.sizes) == [4 << 20, 8 << 20, 8 << 20]
    assert (tmp_path / "s/x").read_bytes() == data


def test_no_extent_is_written_after_an_error(tmp_path, monkeypatch):
    """The descriptor's number may be another file's by then."""
    monkeypatch.setattr(files, "EXTENT_BYTES", 4096)
    first_failed, late = threading.Event(), []

    class OneFails(System):
        opened: ClassVar[set[int]] = set()

        def open(self, path, flags, mode=0o600):
            fd = super().open(path, flags, mode)
            self.opened.add(fd)
            return fd

        def pwrite(self, fd, data, offset):
            if offset == 0:
                first_failed.set()
                raise OSError(errno.EIO, "no")
            assert first_failed.wait(10)
            late.append(fd not in self.opened)
            return super().pwrite(fd, data, offset)

        def close(self, fd):
            self.opened.discard(fd)
            super().close(fd)

    with pytest.raises(Unavailable):
        write(Disk(tmp_path, OneFails()), "x", [_pages(8)])
    assert not any(late)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("call", ["pwrite", "fsync file", "fsync directory", "link"])
def test_a_failed_write_leaves_nothing(tmp_path, call):
    path = tmp_path / "s"
    path.mkdir()
    disk = Disk(path, Watching(call, errno.EIO))
    disk._known_directories.add("")
    with pytest.raises(Unavailable, match=r"creating|writing"):
        disk.create("x", b"1")
    if call not in ("link", "fsync directory"):
        with pytest.raises(Unavailable, match="writing"):
            write(disk, "y", [_pages(2)])
    assert list(path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "full.*Keep"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only")],
)
def test_errors_say_what_to_do(tmp_path, code, advice):
    with pytest.raises(Unavailable, match=rf"writing .*x \(8192 bytes\).*{advice}"):
        write(Disk(tmp_path, Watching("pwrite", code)), "x", [_pages(2)])


def test_file_systems_without_links_are_unsupported(tmp_path):
    with pytest.raises(Unsupported, match="hard links"):
        Disk(tmp_path, Watching("link", errno.EPERM)).create("x", b"")


def test_writes_never_touch_a_file_that_is_there(tmp_path):
    disk = Disk(tmp_path)
    write(disk, "x", [memoryview(b"first")])
    for data in (memoryview(b"second"), _pages(1)):
        with pytest.raises(Unavailable):
            write(disk, "x", [data])
    assert disk.read("x") == b"first"


def test_claims_by_eight_threads_are_all_different(place):
    start = threading.Barrier(8)

    def claim(_: int) -> int:
        disk = Disk(place / "s")
        start.wait()
        return commit.claim_epoch(disk, None)

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(claim, range(8))) == list(range(1, 9))


def test_delete_and_directories(tmp_path):
    disk = Disk(tmp_path / "s")
    disk.create("checkpoints/1/manifest.json", b"1")
    disk.create("tags/x.json", b"1")
    disk.delete("checkpoints/1/manifest.json")
    disk.delete("tags/x.json")
    disk.delete("tags/x.json")
    disk.delete("nowhere/at/all")
    assert disk.list("checkpoints") == []
    assert disk.list("tags") == disk.list("nowhere") == []
    assert (tmp_path / "s/tags").is_dir()
    assert disk.create("checkpoints/1/manifest.json", b"2")


def test_reading(place, monkeypatch):
    disk = Disk(place)
    data = _pages(3)
    write(disk, "x", [data, memoryview(b"tail")])
    for direct in (False, True):
        reader = disk.open("x", direct)
        for offset, view in ((0, _pages(3)), (4096, _pages(1)), (1, memoryview(bytearray(5000)))):
            reader.read_into(offset, view)
            assert view == data[offset : offset + len(view)]
        with pytest.raises(Corrupt, match="cut short"):
            reader.read_into(4096, _pages(3))
        with pytest.raises(Corrupt, match="ends at byte"):
            reader.read_into(1 << 40, memoryview(bytearray(1)))
        reader.close()
        reader.close()
    with pytest.raises(Missing, match="no such file"):
        disk.open("y")
    monkeypatch.setattr(files, "DOCUMENT_BYTES_MAX", 10)
    with pytest.raises(Corrupt, match="at most 10"):
        disk.read("x")


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.EIO, Corrupt), (errno.ESTALE, Unavailable), (errno.EINVAL, Unavailable)],
)
def test_reads_that_fail(tmp_path, monkeypatch, code, kind):
    disk = Disk(tmp_path)
    write(disk, "x", [_pages(1)])

    def preadv(fd, buffers, offset):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", preadv)
    with contextlib.closing(disk.open("x")) as reader, pytest.raises(kind, match="at byte 0"):
        reader.read_into(0, _pages(1))


@pytest.mark.parametrize("direct", [False, True])
def test_what_is_no_regular_file_is_corrupt_at_once(tmp_path, monkeypatch, direct):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    os.mkfifo("fifo")
    os.mkdir("directory")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    for name, to in {"to-fifo": "fifo", "circle": "circle", "device": "/dev/zero"}.items():
        os.symlink(to, name)
    for name in sorted(os.listdir()):
        with pytest.raises(Corrupt, match=f"{name}: it is no regular file"):
            Disk(tmp_path).open(name, direct)
        assert Disk(tmp_path).size(name) is not None


def test_locks_exclude_and_give_up(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "LOCK_WAIT_S", 0.05)
    disk = Disk(tmp_path)
    for held, asked in ((False, True), (True, False), (True, True)):
        with disk.locked(exclusive=held):
            second = disk.locked(exclusive=asked)
            with pytest.raises(Unavailable, match="another process"):
                second.__enter__()
    with disk.locked(exclusive=False), disk.locked(exclusive=False):
        pass
    with pytest.raises(Unavailable, match="locking"):
        Disk(tmp_path / "no").locked(exclusive=True).__enter__()


@pytest.mark.parametrize("path", ["/proc/everstep", "/proc/self/status/store"])
def test_places_that_take_no_store(path):
    with pytest.raises(Unavailable, match=path):
        commit.open_store(Disk(path))
