"""What was made whole: what goes meanwhile, and what can go afterwards."""

import importlib
from dataclasses import replace

import pytest
from keepers import ended
from runs import check_steps, logged, restore
from wholes import advance, build, fill, whole_steps

from everstep import Keep, Missing, Store, Unavailable
from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
from everstep.store import catalog, commit, names, retain
from everstep.tiers.disk import Disk
from stores import files_of, packs_of

pytestmark = pytest.mark.timeout(300)  # workers give way to whatever else this machine does


@pytest.mark.parametrize("module", ["rebuild.fill", "materialize.described"])
def test_a_step_that_is_deleted_meanwhile(store, monkeypatch, module):
    """Before anything of it is read, and when all of it was."""
    fill(store)
    disk = Disk(store)
    materialize(disk, CheckpointName(8, 1))  # retention can delete all that is before it
    place = importlib.import_module(f"everstep.restore.{module.partition('.')[0]}")
    before = getattr(place, module.partition(".")[2])

    def after(*args):
        assert retain.apply(disk, Keep(last=1)) > 0
        return before(*args)

    monkeypatch.setattr(f"everstep.restore.{module}", after)
    with pytest.raises(Missing, match=r"00000006-0001 .*it is not there, or not any more"):
        materialize(disk, CheckpointName(6, 1))
    assert Store(store).steps() == [8]
    assert len(packs_of(store)) == 2
    assert restore(store, build(2)) == 8


def test_packs_that_gc_takes_meanwhile(store, monkeypatch):
    """Of an older epoch: who makes a step whole sees that they are gone."""
    fill(store)
    disk, before = Disk(store), files_of(store)
    with monkeypatch.context() as patch:
        publish = commit.publish_state

        def after(*args):
            assert Store(store).gc()[0] > 0
            publish(*args)

        patch.setattr("everstep.store.commit.publish_state", after)
        (store / names.epoch_path(2)).write_bytes((store / names.epoch_path(1)).read_bytes())
        with pytest.raises(Unavailable, match="was deleted meanwhile"):
            materialize(disk, CheckpointName(6, 1))
    (store / names.epoch_path(2)).unlink()
    assert files_of(store) == before
    assert materialize(disk, CheckpointName(6, 1)).exact


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
    monkeypatch.setattr("everstep.restore.chain.Chain.why_inexact", ["torch 1"])
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
    digest = catalog.digest_of_manifest(disk, CheckpointName(6, 1))
    with pytest.raises(Unavailable, match=r"data/00000001.* was deleted meanwhile"):
        commit.publish_state(disk, lost, digest)
    assert whole_steps(store) == [4]
    assert Store(store).verify().ok
