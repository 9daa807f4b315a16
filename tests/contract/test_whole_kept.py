"""What was made whole: what holds a log while it is read, and what can go afterwards."""

from dataclasses import replace

import pytest
from keepers import ended
from runs import check_steps, logged, restore
from wholes import advance, build, fill, whole_steps

from everstep import Conflict, Keep, Missing, Store
from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
from everstep.store import claims, commit, names, retain
from everstep.tiers.disk import Disk
from stores import files_of, packs_of

pytestmark = pytest.mark.timeout(300)  # workers give way to whatever else this machine does


def test_a_claim_holds_what_is_read(store):
    fill(store)
    disk, name = Disk(store), CheckpointName(6, 1)
    materialize(disk, CheckpointName(8, 1))  # retention could delete all that is before it
    with claims.hold(disk, name):
        assert retain.apply(disk, Keep(last=1)) > 0
        assert Store(store).steps() == [1, 2, 3, 4, 5, 6, 8]
        with pytest.raises(Conflict, match=r"00000006-0001 is being made whole. Try again"):
            Store(store).delete(6)
        Store(store).gc()
        assert Store(store).verify().ok
    retain.apply(disk, Keep(last=1))
    assert Store(store).steps() == [8]
    assert restore(store, build(2)) == 8


def test_gc_leaves_what_a_worker_writes_and_takes_what_a_dead_one_left(store):
    fill(store)
    disk, name = Disk(store), CheckpointName(6, 1)
    before = files_of(store)
    with claims.hold(disk, name) as token:
        pack = store / names.pack_path(name, token, 0)
        pack.write_bytes(bytes(1000))
        (store / names.epoch_path(2)).write_bytes((store / names.epoch_path(1)).read_bytes())
        Store(store).gc()
        assert pack.exists()
    (store / names.epoch_path(2)).unlink()
    dead = store / names.claim_path(name, token)
    dead.touch()  # as a process that was killed leaves it
    assert Store(store).gc() == (1, 1000)
    assert files_of(store) == before


def test_a_step_that_was_made_whole_outlives_what_was_before(store):
    """Also when it goes itself: its manifest first, since without its state it is nothing."""
    frozen = fill(store)
    disk = Disk(store)
    materialize(disk, CheckpointName(5, 1))
    assert retain.apply(disk, Keep(last=2)) > 0
    assert Store(store).steps() == [5, 6, 7, 8]
    assert Store(store).verify().ok
    check_steps(store, build(2), frozen)
    for step in (8, 7, 6, 5):
        assert Store(store).delete(step) > 0
    assert files_of(store) & {"data", "checkpoints"} == set()
    assert not packs_of(store)


def test_what_is_not_exact_frees_nothing(store, monkeypatch):
    """As of a CUDA run: such states stay as long as their steps, for those who read the store."""
    frozen = fill(store)
    disk = Disk(store)
    monkeypatch.setattr("everstep.restore.materialize.why_inexact", lambda chain: ["torch 1"])
    for step in (3, 5, 6):
        assert not materialize(disk, CheckpointName(step, 1)).exact
    retain.apply(disk, Keep(last=1))
    assert Store(store).steps() == list(range(1, 9))
    assert whole_steps(store) == [3, 5, 6]
    assert Store(store).verify().ok
    check_steps(store, build(2), frozen)


def test_retention_goes_up_to_a_base_that_is_spread_over_records(store):
    """Its bytes lie in the packs of records that are deleted."""
    state, keep = build(1), Keep(last=2)
    with logged(store, state, base_every=8, window=3, keep=keep) as saver:
        frozen = advance(saver, state, range(1, 31))
        keeper = saver._client.keeper_pid
    assert ended(keeper)
    spread = whole_steps(store)
    assert spread
    assert Store(store).steps() == list(range(spread[-1], 31))
    assert all(not state.parts for state in map(Store(store).manifest, Store(store).steps()))
    assert Store(store).verify().ok
    assert Store(store).gc()[0] == 0
    check_steps(store, build(2), frozen)
    assert Store(store).read(30)
    materialize(Disk(store), CheckpointName(spread[-1], 1))  # takes its place
    assert Store(store).read(spread[-1])
    retain.apply(Disk(store), Keep(last=2))
    assert Store(store).verify().ok
    check_steps(store, build(2), frozen)


def test_a_base_of_which_a_part_is_gone_is_not_published(store):
    """What holds the parts may have been deleted when a later step was made whole."""
    fill(store)
    for step in (8, 7):
        Store(store).delete(step)
    disk = Disk(store)
    lost = replace(Store(store).manifest(1), step=6)
    materialize(disk, CheckpointName(4, 1))
    retain.apply(disk, Keep(last=1))
    with pytest.raises(Missing, match="is gone"):
        commit.publish_base(disk, lost)
    assert whole_steps(store) == [4]
    assert Store(store).verify().ok
