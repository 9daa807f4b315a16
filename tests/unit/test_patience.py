"""How long calls wait: what counts as progress, and what does not."""

from types import SimpleNamespace

import pytest

from everstep.keeper import client
from everstep.keeper.client import LOSSES_MAX, STALL_S, Patience


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_a_wait_is_bounded_by_its_own_beginning(clock):
    waiting = Patience()
    clock.s += 10 * STALL_S  # nothing was saved, as nobody wanted to
    since = clock.s
    clock.s += STALL_S - 1
    assert waiting.lasts(since)
    clock.s += 1
    assert not waiting.lasts(since)


def test_nobody_waits_before_something_is_committed(clock):
    waiting = Patience()
    since = clock.s
    clock.s += STALL_S
    assert not waiting.lasts(since)
    assert not waiting.lasts(clock.s)
    waiting.note_written()
    assert not waiting.lasts(clock.s)
    waiting.note_commit()
    assert waiting.lasts(clock.s)


def test_a_slow_disk_makes_progress(clock):
    waiting = Patience()
    since = clock.s
    for _ in range(20):
        clock.s += STALL_S / 2
        waiting.note_written()
        assert waiting.lasts(since)
    clock.s += STALL_S
    assert not waiting.lasts(since)


def test_what_another_keeper_writes_is_progress_unless_one_after_the_other_dies(clock):
    waiting = Patience()
    since = clock.s
    for count in range(1, LOSSES_MAX):
        assert waiting.note_loss() == count
        clock.s += STALL_S / 2
        waiting.note_written()
    assert waiting.lasts(since)
    waiting.note_loss()
    clock.s += STALL_S
    waiting.note_written()
    assert not waiting.lasts(since)
    waiting.note_commit()
    clock.s += STALL_S / 2
    waiting.note_written()
    clock.s += STALL_S / 2
    assert waiting.lasts(since)
    assert waiting.note_loss() == 1


def test_what_is_on_its_way_waits_for_a_keeper_since_the_first_was_lost(clock):
    waiting = Patience()
    assert waiting.lasts_without_keeper()
    clock.s += STALL_S - 1
    assert waiting.lasts_without_keeper()
    waiting.note_commit()
    clock.s += STALL_S - 1
    assert waiting.lasts_without_keeper()
    clock.s += STALL_S
    assert not waiting.lasts_without_keeper()
