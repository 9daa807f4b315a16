"""The arena: shared memory that trainer and keeper map, with a crash-consistent job table.

    0         4096        4096 + slot_size
    ├─────────┼───────────┼───────────┼ ...
    │ table   │ slot 0    │ slot 1    │
    └─────────┴───────────┴───────────┴ ...
    slot = [ documents: piece table, descriptor, manifest │ image: the packs as on disk ]

It is a memfd: no name that anybody else could open, sealed against resizing, so that a mapping can
never fault. A slot's `state` is one byte, written last, and says who may change the slot:

    FREE ──trainer──▶ CAPTURING ─────────trainer─────────▶ SEALED ──keeper──▶ DONE | FAILED
                          └──trainer──▶ ANNOUNCED ──trainer──┘                    │
                                            └──trainer──▶ TORN ──keeper──▶ FREE   └─▶ CAPTURING

SEALED becomes FREE where the keeper has moved the image to the spill, or where it is worth nothing.
An announced slot has its row and documents, while its image still arrives: the keeper works on
what is there. A process that dies leaves either the old state or the new one. The row carries
digests of itself and of its documents: what a dying trainer half wrote is not taken for a job.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import stat
import struct
import tempfile
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from everstep.errors import Corrupt, Unavailable
from everstep.format.packs import PAGE_BYTES, round_up

_MAGIC = b"everstep arena 1"
_HEAD = struct.Struct("<16sQQQQ")  # magic, slot count, documents capacity, image capacity, reserved
_ROW = struct.Struct("<QQQQQQ")  # sequence, step, image, table, descriptor, digest
_NUMBER = struct.Struct("<Q")  # the sequence alone, or bytes of the manifest
_ROW_STRIDE = 128
_MANIFEST_SIZE_AT = 64
_STATE_AT = 120
_HUGE_PAGE_BYTES = 2 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SLOTS_MAX = (PAGE_BYTES - 128) // _ROW_STRIDE
SPILL = "spill."
"""The key of an arena that is a file in the spill begins with it (keeper/spill.py)."""

OPTIMIZER = "optimizer."
"""So does that of one which no slot of is saved: the keeper keeps it for whoever comes after its
trainer's death."""

DOCUMENTS_BYTES_MAX = 1 << 30
"""Of one slot: whoever reads a document copies it, so that its size must have a bound."""


class SlotState(IntEnum):
    """Who may change a slot, and what is in it."""

    FREE = 0
    CAPTURING = 1
    SEALED = 2
    DONE = 3
    FAILED = 4
    ANNOUNCED = 5
    TORN = 6


COMPLETE = (SlotState.SEALED, SlotState.DONE, SlotState.FAILED)
SUBMITTED = (SlotState.ANNOUNCED, SlotState.SEALED, SlotState.TORN)
"""The keeper has to end them."""
_REUSABLE = (SlotState.FREE, SlotState.DONE, SlotState.FAILED)
_STATES = {int(state): state for state in SlotState}


@dataclass(frozen=True, slots=True)
class Row:
    """A slot's row in the job table: sizes in bytes of what it holds, and the order of the jobs."""

    sequence: int
    step: int
    image_size: int
    table_size: int
    descriptor_size: int


class Arena:
    """One arena, mapped. Not thread-safe by itself: a slot belongs to one thread at a time."""

    def __init__(self, fd: int) -> None:
        """Map the arena behind `fd`, which this object owns from now on.

        Raises Corrupt where it is neither sealed memory nor a file of this user without a name, or
        its sizes are not consistent: nothing that the other process wrote is believed before that.
        """
        self.fd = fd
        self.is_file = False
        self.identity = (0, 0)
        """Device and inode of the memory: the same in every process that maps it."""
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        fd, found = self.fd, os.fstat(self.fd)
        size = found.st_size
        self.identity = found.st_dev, found.st_ino
        self.is_file = not _is_sealed(fd)
        if (self.is_file and not _is_private(found)) or size < PAGE_BYTES:
            raise Corrupt(f"mapping an arena of {size} bytes: it is not sealed against resizing")
        self._map = mmap.mmap(fd, size)
        magic, *sizes = _HEAD.unpack_from(self._map)
        self.slot_count, self.documents_size, self.image_size = map(int, sizes[:3])
        expected = PAGE_BYTES + self.slot_count * (self.documents_size + self.image_size)
        if (
            magic != _MAGIC
            or self.slot_count > SLOTS_MAX
            or self.documents_size > DOCUMENTS_BYTES_MAX
            or round_up(expected, _HUGE_PAGE_BYTES) != size
        ):
            raise Corrupt(f"mapping an arena of {size} bytes: its first page does not describe it")
        with contextlib.suppress(OSError):  # a matter of speed only
            self._map.madvise(mmap.MADV_HUGEPAGE)
        with contextlib.suppress(OSError):  # a forked data-loader worker has no use for it
            self._map.madvise(mmap.MADV_DONTFORK)
        self.memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(
        cls,
        slot_count: int,
        documents_size: int,
        image_size: int,
        directory: str | None = None,
        *,
        reserves_image: bool = True,
    ) -> "Arena":
        """Make a new arena: of sealed memory, which it takes when it is first written; or where a
        `directory` is given, of a file without a name there, whose blocks are there, but for those
        of images if they are not wanted: these may be written by system calls. Raises Unavailable.
        """
        documents_size, image_size = round_up(documents_size), round_up(image_size)
        if documents_size > DOCUMENTS_BYTES_MAX:
            raise Unavailable(
                f"making an arena: the documents of a state (its piece table and objects) need "
                f"{documents_size} bytes, {DOCUMENTS_BYTES_MAX} is the limit"
            )
        size = PAGE_BYTES + slot_count * (documents_size + image_size)
        what = "making an arena" if directory is None else f"making a file in {directory}"
        check_file_size(what, size)
        try:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            if directory is None:
                fd = os.memfd_create("everstep-arena", flags)
            else:
                with tempfile.TemporaryFile(dir=directory) as file:
                    fd = os.dup(file.fileno())
            try:
                os.ftruncate(fd, round_up(size, _HUGE_PAGE_BYTES))
                os.pwrite(fd, _HEAD.pack(_MAGIC, slot_count, documents_size, image_size, 0), 0)
                if directory is None:
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                else:  # else a full disk would end who writes
                    reserved = size if reserves_image else PAGE_BYTES + documents_size
                    os.posix_fallocate(fd, 0, reserved)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise Unavailable(f"{what} of {size} bytes: {error.strerror}") from error
        return cls(fd)

    @property
    def size(self) -> int:
        """Bytes of the whole arena."""
        return len(self._map)

    def state(self, slot: int) -> SlotState:
        """The slot's state; FREE for a byte that is none."""
        return _STATES.get(self._map[self._row_at(slot) + _STATE_AT], SlotState.FREE)

    def set_state(self, slot: int, state: SlotState) -> None:
        """One byte: other processes see the old state or the new one."""
        self._map[self._row_at(slot) + _STATE_AT] = state

    def seal(self, slot: int, row: Row, table: bytes, descriptor: bytes) -> None:
        """Put documents and row in their places, unless they were announced; the slot's image
        must be whole. State last. Raises Unavailable where the documents are too large."""
        if self.state(slot) is not SlotState.ANNOUNCED:
            self._describe(slot, row, table, descriptor)
        self.set_state(slot, SlotState.SEALED)

    def announce(self, slot: int, row: Row, table: bytes, descriptor: bytes) -> None:
        """As `seal`, before the image is whole."""
        self._describe(slot, row, table, descriptor)
        self.set_state(slot, SlotState.ANNOUNCED)

    def _describe(self, slot: int, row: Row, table: bytes, descriptor: bytes) -> None:
        assert row.table_size == len(table)
        assert row.descriptor_size == len(descriptor)
        if len(table) + len(descriptor) > self.documents_size:
            raise Unavailable(
                f"sealing step {row.step}: its documents need {len(table) + len(descriptor)} "
                f"bytes, this arena holds {self.documents_size}"
            )
        at = self._slot_at(slot)
        end = at + len(table)
        self.memory[at:end] = table
        self.memory[end : end + len(descriptor)] = descriptor
        sizes = (row.image_size, row.table_size, row.descriptor_size)
        digest = self._digest(slot, row)
        place = self._row_at(slot)
        _NUMBER.pack_into(self._map, place + _MANIFEST_SIZE_AT, 0)
        _ROW.pack_into(self._map, place, row.sequence, row.step, *sizes, digest)

    def row(self, slot: int) -> Row | None:
        """The slot's row, or None where it (or a document that it speaks of) is not whole."""
        fields = _ROW.unpack_from(self._map, self._row_at(slot))
        row = Row(*fields[:5])
        sizes = row.table_size + row.descriptor_size
        if sizes > self.documents_size or row.image_size > self.image_size:
            return None
        return row if fields[5] == self._digest(slot, row) else None

    def sequence_of(self, slot: int) -> int:
        """Of the job that is in the slot, or was there last; 0 where there was none."""
        return int(_NUMBER.unpack_from(self._map, self._row_at(slot))[0])

    def table(self, slot: int, row: Row) -> memoryview:
        """The piece table document."""
        at = self._slot_at(slot)
        return self.memory[at : at + row.table_size]

    def descriptor(self, slot: int, row: Row) -> memoryview:
        """What the trainer says of this step."""
        at = self._slot_at(slot) + row.table_size
        return self.memory[at : at + row.descriptor_size]

    def manifest(self, slot: int, row: Row) -> memoryview:
        """The manifest that the keeper made, a sealed document; empty where there is none (yet)."""
        at = self._manifest_at(slot, row)
        (written,) = _NUMBER.unpack_from(self._map, self._row_at(slot) + _MANIFEST_SIZE_AT)
        size = min(int(written), self._slot_end(slot) - at)
        return self.memory[at : at + size]

    def put_manifest(self, slot: int, row: Row, document: bytes) -> None:
        """Keep the manifest beside the image, so that a slot can be restored without a disk."""
        at = self._manifest_at(slot, row)
        if at + len(document) > self._slot_end(slot):
            return  # then the disk serves
        self.memory[at : at + len(document)] = document
        _NUMBER.pack_into(self._map, self._row_at(slot) + _MANIFEST_SIZE_AT, len(document))

    def image(self, slot: int) -> memoryview:
        """The slot's image area, writable; page-aligned."""
        at = self._slot_at(slot) + self.documents_size
        return self.memory[at : at + self.image_size]

    def image_address(self, slot: int) -> int:
        """Where the image starts in this process."""
        return self.address + self._slot_at(slot) + self.documents_size

    def read_into(self, at: int, view: memoryview) -> None:
        """Copy what begins there, and has the size of the view, by a system call: for who reads it
        once. To map its pages, and to unmap them again, takes as long as the copy does. Releases
        the GIL. Raises Corrupt."""
        if (found := os.preadv(self.fd, [view], at)) < len(view):
            raise Corrupt(f"reading an arena at byte {at}: {found} bytes instead of {len(view)}")

    def drop(self, slot: int, start: int, size: int) -> None:
        """Write these pages of the image to the file that the arena is, and keep them in memory no
        more; blocks. Raises OSError."""
        at = self._slot_at(slot) + self.documents_size + start
        self._map.flush(at, size)
        self._map.madvise(mmap.MADV_DONTNEED, at, size)
        os.posix_fadvise(self.fd, at, size, os.POSIX_FADV_DONTNEED)

    def give_back(self) -> None:
        """Nothing is in a file's one slot any more: its memory or blocks are free at once, whoever
        has mapped them."""
        self.set_state(0, SlotState.FREE)
        with contextlib.suppress(OSError):  # else when nobody has
            self._map.madvise(mmap.MADV_REMOVE, PAGE_BYTES)

    def newest_complete(self) -> int | None:
        """The slot with the newest whole state, which must not be overwritten yet."""
        newest_first = sorted(range(self.slot_count), key=self.sequence_of, reverse=True)
        for slot in newest_first:  # so that one row is verified at most, and not all
            if self.state(slot) in COMPLETE and self.row(slot):
                return slot
        return None

    def submitted(self) -> list[tuple[int, int]]:
        """(sequence, slot) of what waits for the keeper, in their order; before the last of them
        none is left out."""
        # The trainer goes on meanwhile: it may submit a slot that was looked at already, and then
        # one that was not. When looked at once more, all before the last one are there.
        if not (found := self._submitted()):
            return []
        last, _ = found[-1]
        return [row for row in self._submitted() if row[0] <= last]

    def end_unfinished(self) -> None:
        """End what a dead trainer was filling, and what it had not quite sealed."""
        for slot in range(self.slot_count):
            state = self.state(slot)
            if state is SlotState.ANNOUNCED:
                self.set_state(slot, SlotState.TORN)
            elif state is SlotState.CAPTURING or (state in COMPLETE and self.row(slot) is None):
                self.set_state(slot, SlotState.FREE)

    def free_slot(self) -> int | None:
        """A slot for the next capture: it holds nothing that has still to be written, and not the
        newest whole state."""
        newest = self.newest_complete()
        for slot in range(self.slot_count):
            if slot != newest and self.state(slot) in _REUSABLE:
                return slot
        return None

    def close(self) -> None:
        """Close the descriptor; the mapping goes when nothing refers to it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()

    def _submitted(self) -> list[tuple[int, int]]:
        states = [self.state(slot) for slot in range(self.slot_count)]
        return sorted(
            (row.sequence, slot)
            for slot, state in enumerate(states)
            if state in SUBMITTED and (row := self.row(slot))
        )

    def _row_at(self, slot: int) -> int:
        assert 0 <= slot < self.slot_count
        return 128 + slot * _ROW_STRIDE

    def _slot_at(self, slot: int) -> int:
        return PAGE_BYTES + slot * (self.documents_size + self.image_size)

    def _slot_end(self, slot: int) -> int:
        return self._slot_at(slot) + self.documents_size

    def _manifest_at(self, slot: int, row: Row) -> int:
        return self._slot_at(slot) + row.table_size + row.descriptor_size

    def _digest(self, slot: int, row: Row) -> int:
        """Covers the row and the descriptor; table and manifest are sealed themselves."""
        digest = xxhash.xxh3_64(repr(row).encode())
        digest.update(self.descriptor(slot, row))
        return digest.intdigest()


def _is_sealed(fd: int) -> bool:
    with contextlib.suppress(OSError):  # of what cannot be sealed
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    return False


def _is_private(found: os.stat_result) -> bool:
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
    return is_own and not found.st_nlink and not found.st_mode & 0o077


def check_file_size(purpose: str, size: int) -> None:
    """Raises Unavailable where this process may not make a file, in memory either, of so many bytes
    (RLIMIT_FSIZE): to try would raise SIGXFSZ, which ends a process that does not ignore it."""
    limit = file_size_limit()
    if limit is not None and size > limit:
        raise Unavailable(
            f"{purpose}: this process may make files of {limit} bytes at most (RLIMIT_FSIZE), and "
            f"this needs {size}. Raise the limit (ulimit -f unlimited) before the run starts"
        )


def file_size_limit() -> int | None:
    """RLIMIT_FSIZE of this process in bytes; None where it has none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit
