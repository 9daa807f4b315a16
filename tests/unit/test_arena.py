"""The arena: sealed memory, and a job table that a dying process cannot break."""

import fcntl
import os
import random
import threading
from collections.abc import Callable
from typing import ClassVar

import pytest

from everstep import Corrupt, Unavailable
from everstep.keeper.arena import _ROW, SLOTS_MAX, Arena, Row, SlotState
from everstep.keeper.session import Session
from everstep.tiers.disk import Disk
from stores import Trainer

TABLE, SAID = b"a table", b"what the trainer says"


def _seal(arena: Arena, slot: int, sequence: int, step: int = 7) -> Row:
    row = Row(sequence, step, 4096, len(TABLE), len(SAID))
    arena.seal(slot, row, TABLE, SAID)
    return row


def test_two_processes_see_the_same(tmp_path):
    arena = Arena.create(3, 5000, 10_000)
    assert arena.documents_size == 8192
    assert arena.image_size == 12_288
    other = Arena(os.dup(arena.fd))
    arena.image(1)[:5] = b"state"
    row = _seal(arena, 1, 4)
    assert other.state(1) is SlotState.SEALED
    assert other.row(1) == row
    assert bytes(other.table(1, row)) == TABLE
    assert bytes(other.descriptor(1, row)) == SAID
    assert bytes(other.image(1)[:5]) == b"state"
    assert arena.image_address(1) % 4096 == 0
    other.put_manifest(1, row, b"a manifest")
    assert bytes(arena.manifest(1, row)) == b"a manifest"
    other.put_manifest(1, row, b"x" * 8192)  # too large: the disk serves
    assert bytes(arena.manifest(1, row)) == b"a manifest"
    assert bytes(arena.manifest(1, _seal(arena, 1, 5))) == b""


def test_nobody_can_resize_it():
    arena = Arena.create(1, 4096, 4096)
    for size in (0, arena.size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(arena.fd)


def _memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("case", ["unsealed", "small", "no magic"])
def test_what_is_no_arena_is_refused_and_closed(case):
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fd = _memfd(100 if case == "small" else 2 << 20, 0 if case == "unsealed" else seals)
    with pytest.raises(Corrupt):
        Arena(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_headers_that_lie_are_refused():
    arena = Arena.create(1, 4096, 4096)
    for number in (2**63, SLOTS_MAX + 1, 1000):
        arena.memory[16:24] = number.to_bytes(8, "little")
        with pytest.raises(Corrupt):
            Arena(os.dup(arena.fd))


def test_every_torn_record_is_no_job():
    """Any part of a row's bytes, old or new: it is the old row, the new one, or none."""
    arena = Arena.create(1, 4096, 4096)
    old = _seal(arena, 0, 1, 7)
    at = arena._row_at(0)
    before = bytes(arena.memory[at : at + _ROW.size])
    new = _seal(arena, 0, 2, 8)
    after = bytes(arena.memory[at : at + _ROW.size])
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    masks = [[i < n for i in range(len(before))] for n in range(len(before) + 1)]
    masks += [[rng.random() < 0.5 for _ in before] for _ in range(500)]
    for mask in masks:
        torn = bytes(b if m else a for a, b, m in zip(before, after, mask, strict=True))
        arena.memory[at : at + _ROW.size] = torn
        expected = {before: old, after: new}.get(torn)
        assert arena.row(0) == expected


def test_a_changed_descriptor_is_no_job():
    arena = Arena.create(1, 4096, 4096)
    row = _seal(arena, 0, 1)
    arena.descriptor(0, row)[3] ^= 1
    assert arena.row(0) is None
    assert arena.submitted() == []


@pytest.mark.parametrize("field", range(5))
def test_wild_sizes_are_no_job(field):
    arena = Arena.create(1, 4096, 4096)
    _seal(arena, 0, 1)
    at = arena._row_at(0) + 8 * field
    arena.memory[at : at + 8] = b"\xff" * 8
    assert arena.row(0) is None


class Moving(Arena):
    """The trainer goes on while this is looked at: `then[n]` happens after the n-th look."""

    looks = 0
    then: ClassVar[dict[int, Callable[[], object]]] = {}

    def state(self, slot):
        found = super().state(slot)
        self.looks += 1
        self.then.get(self.looks, lambda: None)()
        return found


class Offered(Session):
    """A session's jobs, and no trainer."""

    def __init__(self):
        self._jobs, self._lock, self.orphan, self.local = {}, threading.Lock(), False, 0
        self.spill = None
        self.team, self.offered = self, []

    def tell(self, message, fds=None):
        """Nobody listens."""

    def nudge(self):
        """Nobody waits."""

    def offer(self, local, job, is_found=False):
        """What a team would work on, in this order."""
        self.offered.append(job.sequence)


@pytest.mark.parametrize("look", range(1, 9))
def test_no_job_is_overtaken_while_the_trainer_goes_on(look):
    arena = Moving.create(2, 4096, 4096)
    arena.set_state(0, SlotState.CAPTURING)

    def go_on():
        _seal(arena, 0, 6)
        arena.announce(1, Row(7, 8, 4096, len(TABLE), len(SAID)), TABLE, SAID)

    arena.then = {look: go_on}
    session = Offered()
    for _ in range(look + 1):
        session.scan(arena)
    assert session.offered == [6, 7]


@pytest.mark.parametrize("look", range(1, 9))
def test_a_job_that_is_sealed_meanwhile_is_not_overtaken(look):
    arena = Moving.create(2, 4096, 4096)
    arena.announce(0, Row(6, 7, 4096, len(TABLE), len(SAID)), TABLE, SAID)
    arena.announce(1, Row(7, 8, 4096, len(TABLE), len(SAID)), TABLE, SAID)
    arena.then = {look: lambda: arena.set_state(0, SlotState.SEALED)}
    session = Offered()
    for _ in range(look + 1):
        session.scan(arena)
    assert session.offered == [6, 7]


def test_documents_that_do_not_fit_are_refused():
    arena = Arena.create(1, 4096, 4096)
    with pytest.raises(Unavailable, match="this arena holds 4096"):
        arena.seal(0, Row(1, 1, 0, 4000, 97), b"x" * 4000, b"y" * 97)
    assert arena.state(0) is SlotState.FREE


def test_jobs_come_in_their_order():
    arena = Arena.create(4, 4096, 4096)
    for slot, sequence in ((2, 5), (0, 6), (3, 4)):
        _seal(arena, slot, sequence)
    assert arena.submitted() == [(4, 3), (5, 2), (6, 0)]
    arena.set_state(2, SlotState.DONE)
    arena.set_state(0, SlotState.CAPTURING)
    assert arena.submitted() == [(4, 3)]
    assert arena.newest_complete() == 2
    arena.set_state(2, SlotState.FAILED)
    assert arena.newest_complete() == 2
    for slot in range(4):
        arena.set_state(slot, SlotState.FREE)
    assert arena.newest_complete() is None


def test_a_state_byte_that_is_none_is_free():
    arena = Arena.create(1, 4096, 4096)
    arena.memory[arena._row_at(0) + 120] = 77
    assert arena.state(0) is SlotState.FREE


def test_a_slot_that_was_torn_is_never_committed(tmp_path):
    trainer = Trainer(Disk(tmp_path))
    trainer.claim()
    job = trainer.seal(1)
    row = job.arena.row(job.slot)
    job.arena.descriptor(job.slot, row)[0] ^= 1
    with pytest.raises(Corrupt, match="not whole"):
        trainer.commit(job)
    assert not (tmp_path / "checkpoints").exists()
