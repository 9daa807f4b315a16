"""A fault at every system call of everything that writes to a store."""

import os
import random
import time

import pytest
from faults import Fault, FaultySystem, Medium
from sweep import Promises, leaves, sweep

from everstep import EverstepError, Store, Unavailable
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, commit, retain
from everstep.store.retain import Keep
from everstep.tiers.disk import Disk
from examples import slow
from stores import Trainer, files_of, go_on, make_store, packs_of

FAULTS = [Fault.EIO, Fault.BURST, Fault.NO_SYNC, Fault.KILL]


def _two_checkpoints(disk: Disk) -> Promises:
    make_store(disk.root, {1: None, 2: "good"}, system=disk._system)
    first, second = CheckpointName(1, 1), CheckpointName(2, 1)
    return Promises({first, second}, {1}, moving={"good": {second}})


def _branches(disk: Disk) -> Promises:
    """1 2 3 4 of epoch 1 and, from 2 on, 3 4 5 of epoch 2; 1 is tagged."""
    first = make_store(disk.root, {1: "best", 2: None, 3: None, 4: None}, system=disk._system)
    go_on(Trainer(disk), 2, [3, 4, 5])
    del first
    kept = {CheckpointName(1, 1), CheckpointName(4, 1), CheckpointName(4, 2), CheckpointName(5, 2)}
    return Promises(kept, {1, 2}, {"best": CheckpointName(1, 1)})


@pytest.mark.parametrize("fault", Fault)
def test_a_save(folder, fault):
    warnings = []

    def save(disk: Disk, promises: Promises) -> None:
        name = CheckpointName(3, 1)
        promises.moving["good"].add(name)
        outcome = Trainer(disk, epoch=1, parent=CheckpointName(2, 1)).save(3, tag="good")
        promises.checkpoints.add(name)
        if outcome.warning:  # saved, but not tagged: allowed the first time, not when done again
            warnings.append(outcome.warning)
            raise Unavailable(outcome.warning)
        promises.tags["good"] = name

    assert sweep(folder, _two_checkpoints, save, fault, leaves(3)) > 30
    assert bool(warnings) == (fault is not Fault.KILL)
    assert all("step 3 is saved, but not tagged 'good'" in warning for warning in warnings)


STILL = ("bias", "wave")


@pytest.mark.parametrize("fault", [Fault.KILL, *slow(Fault.NO_SYNC, Fault.EIO, Fault.BURST)])
def test_saves_and_deletions_of_what_shares_a_file(folder, fault):
    """A save names the file of one before it, which is deleted then: the file stays."""

    def prepare(disk: Disk) -> Promises:
        make_store(disk.root, [1, 2], system=disk._system, still=STILL)
        assert len(packs_of(disk.root)) == 3
        return Promises({CheckpointName(2, 1)}, {1})

    def save(disk: Disk, promises: Promises) -> None:
        trainer = Trainer(disk, epoch=1, parent=CheckpointName(2, 1), still=STILL)
        trainer.save(3)
        promises.checkpoints.add(CheckpointName(3, 1))
        if (first := CheckpointName(1, 1)) in catalog.committed(disk):
            retain.delete(disk, [first])
        trainer.turn = 1  # not still after all
        trainer.save(4)
        promises.checkpoints.add(CheckpointName(4, 1))

    def finish(disk: Disk) -> None:
        leaves(5)(disk)
        found = [each.parts[0].packs[1].path for each in map(Store(disk.root).manifest, (2, 3, 4))]
        assert found[0] == found[1] != found[2]

    assert sweep(folder, prepare, save, fault, finish) > 60


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_save_of_a_store(folder, fault):
    def start(disk: Disk, promises: Promises) -> None:
        trainer = Trainer(disk)
        epoch = trainer.claim()
        promises.epochs.add(epoch)
        trainer.save(1)
        promises.checkpoints.add(CheckpointName(1, epoch))

    assert sweep(folder, lambda disk: Promises(), start, fault) > 40


def _chain(disk: Disk) -> Promises:
    """A state 1, records 2 and 3; a state 4 and a record 5."""
    trainer = make_store(disk.root, [1], system=disk._system)
    trainer.record(2, follows=1)
    trainer.record(3, follows=2)
    trainer.save(4)
    trainer.record(5, follows=4)
    return Promises({CheckpointName(step, 1) for step in range(1, 6)}, {1})


@pytest.mark.parametrize("fault", [Fault.NO_SYNC, *slow(Fault.KILL, Fault.EIO, Fault.BURST)])
def test_records(folder, fault):
    """Two in a row: where the first fails, there is no second that follows it."""

    def save(disk: Disk, promises: Promises) -> None:
        trainer = Trainer(disk, epoch=1, parent=CheckpointName(5, 1))
        for step in (6, 7):
            try:
                trainer.record(step, follows=step - 1)
            except EverstepError:
                if step == 6 and CheckpointName(6, 1) not in catalog.committed(disk):
                    with pytest.raises(EverstepError):
                        trainer.record(7, follows=6)
                raise
            promises.checkpoints.add(CheckpointName(step, 1))

    assert sweep(folder, _chain, save, fault, leaves(7)) > 40


@pytest.mark.parametrize("fault", [Fault.NO_SYNC, *slow(Fault.KILL, Fault.EIO, Fault.BURST)])
def test_a_state_that_is_spread(folder, fault):
    """It is there with its last step, or not at all; nothing is left of a window that failed."""

    def save(disk: Disk, promises: Promises) -> None:
        trainer = Trainer(disk, epoch=1, parent=CheckpointName(2, 1))
        trainer.spread((3, 4, 5))
        promises.checkpoints.add(CheckpointName(5, 1))
        assert [part.steps for part in Store(disk.root).manifest(5).parts] == [3, 4, 5]

    assert sweep(folder, _two_checkpoints, save, fault, leaves(5)) > 40


@pytest.mark.parametrize("fault", [Fault.KILL, *slow(Fault.NO_SYNC, Fault.EIO, Fault.BURST)])
def test_a_base_that_is_spread_over_records(folder, fault):
    """The records are there whatever becomes of the base; and the base, where nothing failed."""
    made = []

    def save(disk: Disk, promises: Promises) -> None:
        trainer = Trainer(disk, epoch=1, parent=CheckpointName(5, 1))
        for step in (6, 7):
            window = tuple(range(6, step + 1))
            outcome = trainer.record(step, step - 1, window, ends=step == 7)
            promises.checkpoints.add(CheckpointName(step, 1))
        made.append(catalog.read_state(disk, CheckpointName(7, 1)) is not None)
        assert made[-1] or outcome.warning or fault is not None

    def finish(disk: Disk) -> None:
        leaves(7)(disk)
        if catalog.read_state(disk, CheckpointName(7, 1)):
            assert len(Store(disk.root).chain(7)) == 1

    assert sweep(folder, _chain, save, fault, finish) > 40
    assert True in made


@pytest.mark.parametrize("fault", FAULTS)
def test_retention_of_chains(folder, fault):
    """What goes, goes from the end of its chain: a crash in between leaves no record alone."""
    keep = Keep(last=2)

    def prepare(disk: Disk) -> Promises:
        promises = _chain(disk)
        promises.checkpoints = {CheckpointName(4, 1), CheckpointName(5, 1)}
        return promises

    def apply(disk: Disk, promises: Promises) -> None:
        retain.apply(disk, keep)

    assert sweep(folder, prepare, apply, fault, leaves(2, checkpoints=2)) > 6


@pytest.mark.parametrize("fault", FAULTS)
def test_the_claim_of_an_epoch(folder, fault):
    def claim(disk: Disk, promises: Promises) -> None:
        promises.epochs.add(commit.claim_epoch(disk, CheckpointName(2, 1)))
        assert [name.step for name in catalog.lineage(disk)] == [1, 2]

    assert sweep(folder, _two_checkpoints, claim, fault) > 8


@pytest.mark.parametrize("fault", FAULTS)
def test_retention(folder, fault):
    keep = Keep(last=2)

    def superfluous(disk: Disk) -> retain.Names:
        return retain.superfluous(disk, catalog.committed(disk), keep)

    def apply(disk: Disk, promises: Promises) -> None:
        assert promises.checkpoints.isdisjoint(superfluous(disk))
        retain.apply(disk, keep)
        assert not superfluous(disk)

    def prepare(disk: Disk) -> Promises:
        promises = _branches(disk)
        promises.checkpoints = set(catalog.committed(disk)).difference(superfluous(disk))
        return promises

    assert sweep(folder, prepare, apply, fault, leaves(5, epoch=2, checkpoints=5)) > 6


@pytest.mark.parametrize("fault", FAULTS)
def test_the_deletion_of_a_tagged_checkpoint(folder, fault):
    def delete(disk: Disk, promises: Promises) -> None:
        promises.checkpoints.discard(CheckpointName(1, 1))
        promises.tags.clear()
        if CheckpointName(1, 1) in catalog.committed(disk):
            retain.delete(disk, [CheckpointName(1, 1)])
        assert not catalog.read_tags(disk)

    assert sweep(folder, _branches, delete, fault) > 8


@pytest.mark.parametrize("fault", FAULTS)
def test_gc(folder, fault):
    garbage = ["data/00000009-0001-aa-0.safetensors", "data/tables/00.json", "tags/x.json.0.tmp"]

    def prepare(disk: Disk) -> Promises:
        promises = _branches(disk)
        for path in garbage:
            (disk.root / path).write_bytes(b"what a failed attempt left")
            os.utime(disk.root / path, (time.time() - 7200,) * 2)
        (disk.root / "checkpoints/00000009-0001").mkdir()
        return promises

    def gc(disk: Disk, promises: Promises) -> None:
        for path in garbage:  # an image has new time stamps
            if (disk.root / path).exists():
                os.utime(disk.root / path, (time.time() - 7200,) * 2)
        retain.sweep(disk)
        assert files_of(disk.root).isdisjoint(garbage)
        assert not (disk.root / "checkpoints/00000009-0001").exists()

    assert sweep(folder, prepare, gc, fault) > 8


@pytest.mark.parametrize("fault", [Fault.KILL])
def test_gc_after_a_delete_that_was_killed(folder, fault):
    """A manifest that is unlinked but not synced may come back: its packs must still be there."""

    def delete_and_collect(disk: Disk, promises: Promises) -> None:
        commit.claim_epoch(disk, CheckpointName(2, 1))
        promises.checkpoints.discard(CheckpointName(1, 1))
        if CheckpointName(1, 1) in catalog.committed(disk):
            retain.delete(disk, [CheckpointName(1, 1)])
        retain.sweep(disk)
        assert len(packs_of(disk.root)) == 1

    sweep(folder, _two_checkpoints, delete_and_collect, fault)


@pytest.mark.parametrize("no_direct", ["", "open", "write"])
def test_short_writes(tmp_path, no_direct):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    medium = Medium(tmp_path)
    system = FaultySystem(medium, short=random.Random(seed), no_direct=no_direct)
    make_store(tmp_path / "store", range(1, 4), system=system)
    assert Store(tmp_path / "store").verify().ok
    promises = Promises({CheckpointName(step, 1) for step in (1, 2, 3)}, {1})
    promises.check(medium.after_power_cut(tmp_path.parent / f"{tmp_path.name}-cut"))


def test_the_model_forgets_what_was_not_synced(tmp_path):
    """The tests above are worth something only if the model forgets."""
    medium = Medium(tmp_path)
    system = FaultySystem(medium)
    for name, sync in (("synced", True), ("lost", False)):
        fd = system.open(str(tmp_path / name), os.O_CREAT | os.O_WRONLY)
        system.pwrite(fd, b"bytes", 0)
        if sync:
            system.fsync(fd)
        system.close(fd)
    target = tmp_path.parent / f"{tmp_path.name}-cut"
    assert not list(medium.after_power_cut(target).iterdir())
    fd = system.open(str(tmp_path), os.O_RDONLY | os.O_DIRECTORY)
    system.fsync(fd)
    system.close(fd)
    again = medium.after_power_cut(tmp_path.parent / f"{tmp_path.name}-cut-2")
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {
        "synced": b"bytes",
        "lost": b"",
    }
