"""The spill: a second, larger and slower memory, to which sealed images move while the arena is
full, so that the trainer need not wait for the disk.

Each image has an arena of its own there, in a file without a name in a directory that the user gave
(on DAX, tmpfs or a disk). So a job goes on from there as it does from the arena, and what moves is
safe as in the arena: the trainer is given the file's descriptor as well, and hands it to the keeper
that comes after one that has died. Nothing is left behind, for which there would have to be rules;
where trainer and keeper die both, what is durable counts, as ever.

Invariants:
* The budget is not passed: what the files take is asked of the file system before more goes there,
  and given back when a job is over. What is written by the mapping is reserved before: on a full
  file system that would fault, where a system call fails.
* The slot in the arena is freed when all is in the spill, sealed, and nobody reads the image.
"""

import contextlib
import logging
import os
import secrets
import shutil
import threading
from typing import TYPE_CHECKING

from everstep.errors import EverstepError, Unavailable
from everstep.format.packs import PAGE_BYTES, round_up
from everstep.keeper.arena import SPILL, SUBMITTED, Arena
from everstep.keeper.job import Job
from everstep.tiers.route import next_spill

if TYPE_CHECKING:
    from everstep.keeper.session import Session

log = logging.getLogger("everstep.keeper")

FILES_MAX = 64
"""Images that are there at a time: each takes two descriptors, of the trainer as well."""

_PIECE_BYTES = 4 << 20
_PAUSE_S = 5.0


class Spill:
    """That of one session, with a thread of its own. Any thread, but for what says otherwise."""

    def __init__(self, session: "Session", directory: str, budget: int | None, ranks: int) -> None:
        """`budget` in bytes (None: half of what is free there) is shared by so many ranks."""
        self._session = session
        self._directory = directory
        self._budget, self._ranks = budget, ranks
        self._wanted = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="everstep-spill", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Something was sealed, or has ended: see what should move. Does not block."""
        self._wanted.set()

    def close(self) -> None:
        """Nothing moves any more, and no descriptor is used, when this returns; what is under way
        is broken off at the next piece. The arenas are the session's."""
        self._is_closed.set()
        self._wanted.set()
        self._thread.join()

    # ---- its thread ------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._is_closed.is_set():
                return
            try:
                self._clear()
                while not self._is_closed.is_set() and (job := self._choose()) and self._move(job):
                    pass
            except (OSError, EverstepError) as error:
                log.warning(
                    "spilling to %s: %s. Training waits for the disk", self._directory, error
                )
                with contextlib.suppress(OSError):
                    self._clear()
                self._is_closed.wait(_PAUSE_S)

    def _choose(self) -> Job | None:
        jobs, is_writing = self._session.waiting_jobs()
        room = self._budget_bytes() - self._used_bytes()
        by_number = {job.sequence: job for job in jobs}
        sizes = {number: _size(job) for number, job in by_number.items()}
        number = next_spill(sizes, room, is_writing=is_writing)
        return None if number is None else by_number[number]

    def _budget_bytes(self) -> int:
        if self._budget is None:
            free = shutil.disk_usage(self._directory).free
            self._budget = (free + self._used_bytes()) // 2
        return self._budget // self._ranks

    def _used_bytes(self) -> int:
        return 512 * sum(os.fstat(each.fd).st_blocks for _, each in self._session.spilled())

    def _move(self, job: Job) -> bool:
        """False where it could not be moved. Raises OSError, Unavailable."""
        source, slot = job.arena, job.slot
        row = source.row(slot)
        if row is None or len(self._session.spilled()) >= FILES_MAX:
            return False
        sizes = source.documents_size, row.image_size
        arena = Arena.create(1, *sizes, self._directory, reserves_image=False)
        key = SPILL + secrets.token_hex(8)
        self._session.arenas[key] = arena
        # The trainer has it as well from now on, for the next keeper.
        self._session.tell({"type": "spill", "arena": key}, [arena.fd])
        image = source.image(slot)[: row.image_size]
        is_there = self._copy(image, arena, arena.image_address(0) - arena.address)
        if is_there:
            self._session.move(job, row, arena)
        return is_there

    def _copy(self, image: memoryview, arena: Arena, offset: int) -> bool:
        """By system calls, which release the GIL. False where it is closed meanwhile."""
        while image:
            if self._is_closed.is_set():
                return False
            count = os.pwrite(arena.fd, image[:_PIECE_BYTES], offset)
            image, offset = image[count:], offset + count
        return True

    def _clear(self) -> None:
        """Give back what is over, but for the newest state of all."""
        newest = self._session.newest()
        for key, arena in self._session.spilled():
            is_newest = newest is not None and newest[1] == key
            if arena.state(0) not in SUBMITTED and not is_newest:
                arena.give_back()
                self._session.tell({"type": "spill", "arena": key})
                self._session.arenas.pop(key).close()


def check_directory(directory: str) -> None:
    """Raises Unavailable where nothing can be spilled there."""
    try:
        Arena.create(1, PAGE_BYTES, PAGE_BYTES, directory).close()
    except Unavailable as error:
        raise Unavailable(
            f"spilling to {directory}: {error}. Give tiers=everstep.Tiers(spill=...) a directory "
            f"that is there and may be written to"
        ) from error


def _size(job: Job) -> int:
    """Bytes that it takes there: a page, documents, to which the manifest is added, and image."""
    row = job.arena.row(job.slot)
    image = round_up(row.image_size if row else job.arena.image_size)
    return PAGE_BYTES + job.arena.documents_size + image
