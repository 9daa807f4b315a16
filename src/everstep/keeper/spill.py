"""The spill: a second, larger and slower memory, to which sealed images move while the arena is
full, so that the trainer need not wait for the disk.

It is an arena like any other, in a file without a name in a directory that the user gave (on DAX,
tmpfs or a disk). So a job goes on from there as it does from the arena, and what moves is safe as
in the arena: the trainer is given the file's descriptor as well, and hands it to the keeper that
comes after one that has died. A name would survive both of them; but what has one is left behind
where nobody comes back, can be opened by others, may be half written, and may be of a run that has
gone on elsewhere since, for all of which there would have to be rules. As it is, nothing is left
behind; where trainer and keeper die both, what is durable counts, as ever.

Invariants:
* The budget is not passed: what slots take is asked of the file system before more goes there, and
  given back when a job is over. What is written by the mapping is reserved before: on a full file
  system that would fault, where a system call fails.
* The slot in the arena is freed when all is in the spill, sealed, and nobody reads the image.
* Which images move is decided by `everstep.tiers.route`.
"""

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import threading
from typing import TYPE_CHECKING

from everstep.errors import EverstepError, Unavailable
from everstep.format.packs import PAGE_BYTES, round_up
from everstep.keeper.arena import (
    SLOTS_MAX,
    SPILL,
    SUBMITTED,
    Arena,
    SlotState,
    check_file_size,
    lay_out,
)
from everstep.keeper.job import Job
from everstep.tiers.route import Durable, Figures, Step, decide

if TYPE_CHECKING:
    from everstep.keeper.session import Session

log = logging.getLogger("everstep.keeper")

ARENAS_MAX = 6
_FILE_BYTES_MAX = 8 << 40  # ext4 takes 16 TiB
_PIECE_BYTES = 4 << 20
_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_PAUSE_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


class Spill:
    """That of one session, with a thread of its own. Any thread, but for what says otherwise."""

    def __init__(self, session: "Session", directory: str, budget: int | None, ranks: int) -> None:
        """`budget` in bytes (None: half of what is free there) is shared by so many ranks."""
        self._session = session
        self._directory = directory
        self._given = budget
        self._ranks = ranks
        self._used: set[tuple[str, int]] = set()
        """Arenas and slots that may have memory."""
        self._arenas: dict[str, Arena] = {}
        self._budget: int | None = None
        self._lock = threading.RLock()
        self._wanted = threading.Event()
        self._is_closed = False
        threading.Thread(target=self._work, name="everstep-spill", daemon=True).start()

    def look(self) -> None:
        """Something was sealed, or has ended: see what should move. Does not block."""
        self._wanted.set()

    def adopt(self, key: str, arena: Arena) -> None:
        """An arena of a keeper that has died."""
        with self._lock:
            self._arenas[key] = arena
            self._used |= {(key, slot) for slot in range(arena.slot_count)}

    def close(self) -> None:
        """Nothing moves any more, and no descriptor is used, when this returns. The arenas are the
        session's."""
        with self._lock:
            self._is_closed = True
            self._arenas, self._used = {}, set()
        self._wanted.set()

    # ---- its thread ------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._is_closed:
                return
            try:
                self._clear()
                while (job := self._choose()) and self._move(job):
                    pass
            except (OSError, EverstepError) as error:
                log.warning(
                    "spilling to %s: %s. Training waits for the disk", self._directory, error
                )
                with contextlib.suppress(OSError):
                    self._clear()
                threading.Event().wait(_PAUSE_S)

    def _choose(self) -> Job | None:
        """The image that should move next, where the arena is full."""
        jobs, writing = self._session.waiting_jobs()
        found = {job.sequence: job for job in jobs}
        steps = [Step(job.sequence, _size(job)) for job in jobs]
        steps += [Step(job.sequence, 0, writing="local") for job in writing]
        local = Durable(1 << 62, queued_bytes=len(writing))
        room = self._budget_bytes() - self._used_bytes()
        # One slot is needed, whatever its size: it is free when the image has moved.
        figures = Figures({"local": local}, spill_bytes=room, need_bytes=1)
        spills = decide(steps, figures, "local").spills
        return found[spills[0]] if spills else None

    def _budget_bytes(self) -> int:
        if self._budget is None:
            found = os.statvfs(self._directory)
            free = found.f_bavail * found.f_frsize + self._used_bytes()
            self._budget = (free // 2 if self._given is None else self._given) // self._ranks
        return self._budget

    def _used_bytes(self) -> int:
        """Memory or blocks of all files."""
        with self._lock:
            return sum(os.fstat(arena.fd).st_blocks for arena in self._arenas.values()) * 512

    def _move(self, job: Job) -> bool:
        """False where it could not be moved. Raises OSError, Unavailable."""
        source, slot = job.arena, job.slot
        row = source.row(slot)
        place = self._place(source)
        if row is None or place is None:
            return False
        key, arena, index = place
        self._reserve(key, arena, index)
        image = source.image(slot)[: row.image_size]
        if not self._copy(image, arena, arena.range(index)[0] + arena.documents_size):
            return False
        with self._lock:
            if self._is_closed:
                return False
            self._session.move(job, row, arena, index)
        return True

    def _copy(self, image: memoryview, arena: Arena, offset: int) -> bool:
        """By system calls, which release the GIL. False where it is closed meanwhile."""
        for at in range(0, len(image), _PIECE_BYTES):
            piece = image[at : at + _PIECE_BYTES]
            while piece:
                with self._lock:
                    if self._is_closed:
                        return False
                    count = os.pwrite(arena.fd, piece, offset + at)
                piece, at = piece[count:], at + count
        return True

    # ---- memory ----------------------------------------------------------------------------

    def _place(self, source: Arena) -> tuple[str, Arena, int] | None:
        """A free slot for an image of that arena; of a new file where there is none."""
        sizes = source.documents_size, source.image_size
        for key, arena in list(self._arenas.items()):
            if (arena.documents_size, arena.image_size) == sizes:
                for slot in range(arena.slot_count):
                    if (key, slot) not in self._used:
                        return key, arena, slot
        if len(self._arenas) >= ARENAS_MAX:
            return None
        arena = create(self._directory, *sizes)
        key = SPILL + secrets.token_hex(8)
        with self._lock:
            if self._is_closed:
                arena.close()
                return None
            self._arenas[key] = arena
            self._session.add_spill(key, arena)
        return key, arena, 0

    def _reserve(self, key: str, arena: Arena, slot: int) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._used.add((key, slot))
            os.posix_fallocate(arena.fd, arena.range(slot)[0], arena.documents_size)

    def _clear(self) -> None:
        """Give back what is over, but for the newest state of all; let go of files that are empty,
        but for one."""
        with self._lock:
            if self._is_closed:
                return
            newest = self._session.newest()
            for key, slot in list(self._used):
                arena = self._arenas[key]
                is_newest = newest and (newest[0], newest[1]) == (arena.sequence_of(slot), key)
                if arena.state(slot) not in SUBMITTED and not is_newest:
                    self._give_back(key, slot)
            full = {key for key, _ in self._used}
            empty = [key for key in self._arenas if key not in full]
            for key in empty[:-1]:
                del self._arenas[key]
                self._session.drop_spill(key)

    def _give_back(self, key: str, slot: int) -> None:
        arena = self._arenas[key]
        arena.set_state(slot, SlotState.FREE)
        _punch(arena.fd, *arena.range(slot))
        self._used.discard((key, slot))


def create(directory: str, documents_size: int, image_size: int) -> Arena:
    """An arena in a file that has no name, and takes no memory yet but for its first page. Raises
    Unavailable, OSError."""
    slots = max(1, min(SLOTS_MAX, _FILE_BYTES_MAX // (documents_size + image_size)))
    check_file_size("spilling", slots * (documents_size + image_size))
    path = os.path.join(directory, f".everstep-{secrets.token_hex(8)}")
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)
        lay_out(fd, slots, documents_size, image_size)
        _punch(fd, PAGE_BYTES, PAGE_BYTES)
        os.posix_fallocate(fd, 0, PAGE_BYTES)
    except BaseException:
        os.close(fd)
        raise
    return Arena(fd, is_spill=True)


def check_directory(directory: str) -> None:
    """Raises Unavailable where nothing can be spilled there."""
    try:
        create(directory, PAGE_BYTES, PAGE_BYTES).close()
    except OSError as error:
        raise Unavailable(
            f"spilling to {directory}: {error.strerror}. Give tiers=everstep.Tiers(spill=...) a "
            f"directory that is there, may be written to, and lies on a file system that gives "
            f"memory back (tmpfs, ext4, xfs, btrfs)"
        ) from error


def _size(job: Job) -> int:
    """Bytes that it takes there: documents, to which the manifest is added, and image."""
    row = job.arena.row(job.slot)
    return job.arena.documents_size + round_up(row.image_size if row else job.arena.image_size)


def _punch(fd: int, offset: int, size: int) -> None:
    """Give memory or blocks of a file back. Raises OSError."""
    ends = ctypes.c_long(offset), ctypes.c_long(size)
    if _libc.fallocate(fd, _PUNCH_HOLE, *ends):
        code = ctypes.get_errno() or errno.EIO
        raise OSError(code, os.strerror(code))
