"""Checkpoints are copied between tiers byte for byte: whole, verified, and again where it broke."""

import pytest

import cli_store
import stores
from everstep import Conflict, Corrupt, Missing, Store, Unavailable
from everstep.format.manifest import CheckpointName
from everstep.format.packs import Spec
from everstep.store import catalog, commit, names
from everstep.store.copy import Copier
from everstep.tiers.disk import Disk
from everstep.tiers.tier import tier_at
from examples import slow


class Stop(Exception):
    pass


@pytest.fixture(params=["disk", *slow("bucket")])
def target(request, tmp_path):
    return tier_at(
        tmp_path / "target" if request.param == "disk" else request.getfixturevalue("bucket")
    )


@pytest.fixture
def logged(tmp_path):
    """States 10 and 14; 11 to 13 and 15 are logs; 13-2 is a state that went on from 12, 14-2 its
    log."""
    return cli_store.make_logged(tmp_path / "source")


def documents(tier, name):
    manifest = catalog.read_manifest(tier, name)
    paths = [names.manifest_path(name), *(link.path for link in manifest.files)]
    if (state := catalog.read_state(tier, name)) is not None:
        paths += [names.state_path(name), *(link.path for link in state.files)]
    return {path: tier.read(path) for path in paths}


def stop_at(size):
    def progress(done, total):
        if done >= size:
            raise Stop

    return progress


@pytest.mark.parametrize("target", ["disk", "bucket"], indirect=True)
def test_a_log_comes_with_what_it_goes_back_to(logged, target, tmp_path):
    seen = []
    copied = Copier(logged, target, progress=lambda *said: seen.append(said)).copy(
        CheckpointName(12, 1)
    )
    assert [name.step for name in copied.checkpoints] == [10, 11, 12]
    assert seen == sorted(seen)
    assert seen[-1] == (copied.bytes, copied.bytes)
    assert Store(target.root).steps() == [10, 11, 12]
    assert Store(target.root).verify().ok
    back = Disk(tmp_path / "back", stores.Unsynced())
    Copier(target, back).copy(CheckpointName(12, 1))
    for name in copied.checkpoints:
        assert documents(target, name) == documents(back, name) == documents(logged, name)
    assert Store(back.root).run == Store(logged.root).run


def test_only_what_is_missing_is_copied(logged, target):
    Copier(logged, target).copy(CheckpointName(12, 1))
    again = Copier(logged, target).copy(CheckpointName(12, 1))
    assert (again.checkpoints, again.bytes) == ([], 0)
    more = Copier(logged, target).copy(CheckpointName(13, 1))
    assert more.checkpoints == [CheckpointName(13, 1)]
    Copier(logged, target).copy(CheckpointName(14, 2), tags=["best", "last"])
    assert Store(target.root).steps() == [10, 11, 12, 13, 14]
    assert catalog.find(target, "best") == catalog.find(target, None) == CheckpointName(14, 2)
    assert catalog.read_epochs(target) == catalog.read_epochs(logged)


@pytest.mark.parametrize("target", ["disk", "bucket"], indirect=True)
def test_what_was_broken_off_goes_on(logged, target):
    size = Store(logged.root).manifest("10-1").size
    with pytest.raises(Stop):
        Copier(logged, target, progress=stop_at(size + 100)).copy(CheckpointName(13, 1))
    assert catalog.committed(target) == [CheckpointName(10, 1)]
    assert not [name for name in target.list("data") if name.endswith(".tmp")]
    rest = Copier(logged, target).copy(CheckpointName(13, 1))
    assert [name.step for name in rest.checkpoints] == [11, 12, 13]
    assert Store(target.root).verify().ok


def test_a_pack_that_is_there_is_not_copied_again(logged, target):
    name = CheckpointName(10, 1)
    with pytest.raises(Stop):  # the pack is there, the manifest not yet
        Copier(logged, target, progress=stop_at(1)).copy(name)
    manifest = catalog.read_manifest(logged, name)
    (pack,) = manifest.parts[0].packs
    target.stream(pack.path, [memoryview(logged.read(pack.path))], pack.size)
    copied = Copier(logged, target).copy(name)
    assert (copied.bytes, copied.bytes_there) == (0, manifest.size)
    assert Store(target.root).verify().ok


def test_a_file_that_a_writer_left_unfilled_is_not_taken_for_the_pack(logged, tmp_path):
    target = Disk(tmp_path / "target")
    (pack,) = catalog.read_manifest(logged, CheckpointName(10, 1)).parts[0].packs
    stores.write(target, pack.path, [memoryview(bytes(pack.size))])
    copied = Copier(logged, target).copy(CheckpointName(10, 1))
    assert copied.bytes == pack.size
    assert Store(target.root).verify().ok


def damage(tier, path, offset):
    with open(tier.root / path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("offset", "message"),
    [(5000, r"at byte 4096 \(tensor"), (9, r"the header"), (-1, r"padding|all zeros")],
)
def test_nothing_is_published_of_what_is_damaged(logged, target, offset, message):
    (pack,) = catalog.read_manifest(logged, CheckpointName(14, 1)).parts[0].packs
    damage(logged, pack.path, offset % pack.size)
    with pytest.raises(Corrupt, match=message) as raised:
        Copier(logged, target).copy(CheckpointName(15, 1))
    assert pack.path in str(raised.value)
    assert catalog.committed(target) == []
    assert pack.path.rpartition("/")[2] not in target.list("data")


def test_a_damaged_table_or_manifest_is_told(logged, target):
    part = catalog.read_manifest(logged, CheckpointName(10, 1)).parts[0]
    damage(logged, part.table.path, 20)
    with pytest.raises(Corrupt, match="data/tables"):
        Copier(logged, target).copy(CheckpointName(10, 1))
    damage(logged, names.manifest_path(CheckpointName(14, 1)), 20)
    with pytest.raises(Corrupt, match=r"00000014-0001/manifest\.json"):
        Copier(logged, target).copy(CheckpointName(15, 1))
    assert catalog.committed(target) == []


def test_a_step_that_was_made_whole_comes_without_what_was_before(logged, target):
    name = CheckpointName(12, 1)
    cli_store.make_whole(logged, name)
    assert Copier(logged, target).copy(name).checkpoints == [name]
    assert documents(target, name) == documents(logged, name)
    later = Copier(logged, target).copy(CheckpointName(13, 1))
    assert later.checkpoints == [CheckpointName(13, 1)]
    assert len(Store(target.root).chain(13)) == 2


def test_a_state_that_was_made_later_follows(logged, target):
    name = CheckpointName(12, 1)
    Copier(logged, target).copy(name)
    cli_store.make_whole(logged, name)
    assert Copier(logged, target).copy(name).bytes
    assert documents(target, name) == documents(logged, name)


def test_a_state_without_its_manifest_is_of_no_use(logged, target):
    name = CheckpointName(12, 1)
    target.create(names.state_path(name), b"of a checkpoint that was deleted")
    Copier(logged, target).copy(name)
    assert target.size(names.state_path(name)) is None
    assert Store(target.root).verify().ok


def test_a_store_holds_one_run(logged, target, tmp_path):
    commit.open_store(target)
    with pytest.raises(Conflict, match=r"another run.*Copy to another place"):
        Copier(logged, target).copy(CheckpointName(10, 1))
    assert catalog.committed(target) == []


def test_two_writers_of_one_run_are_told_apart(logged, target, tmp_path):
    """Both went on from step 10 of one run, each in its own place."""
    other = Disk(tmp_path / "other", stores.Unsynced())
    Copier(logged, other).copy(CheckpointName(10, 1))
    run = catalog.read_run(other)
    cli_store.save(other, run, 12, 1)
    Copier(logged, target).copy(CheckpointName(12, 1))
    with pytest.raises(Conflict, match="another checkpoint of that name"):
        Copier(other, target).copy(CheckpointName(12, 1))
    commit.claim_epoch(other, CheckpointName(12, 1))
    cli_store.save(other, run, 13, 2)
    Copier(logged, target).copy(CheckpointName(13, 2))
    with pytest.raises(Conflict, match="another"):
        Copier(other, target).copy(CheckpointName(13, 2))


class Claiming(Disk):
    """A writer claims its next epoch, in the tier around, too, while its claims are looked at."""

    around: Disk | None = None

    def list(self, directory):
        found = super().list(directory)
        if directory == names.EPOCHS and self.around:
            around, self.around = self.around, None
            commit.claim_epoch(self, CheckpointName(14, 2), remote=around)
        return found


def test_a_claim_that_is_made_meanwhile_is_no_other_writers(logged, target):
    source = Claiming(logged.root)
    copier = Copier(source, target)
    copier.lead()
    source.around = target
    copier.lead()
    assert catalog.claimed(source) == [1, 2, 3]
    assert 3 in catalog.claimed(target)
    commit.claim_epoch(target, CheckpointName(14, 3))
    with pytest.raises(Conflict, match="another writer has started epoch 4"):
        copier.lead()


def test_what_is_taken_away_from_the_target_meanwhile_is_told(logged, target):
    name = CheckpointName(14, 1)
    (pack,) = catalog.read_manifest(logged, name).parts[0].packs
    target.stream(pack.path, [memoryview(logged.read(pack.path))], pack.size)

    def delete(done, total):
        if done == total:
            target.delete(pack.path)

    with pytest.raises(Unavailable, match="Copy it again"):
        Copier(logged, target, progress=delete).copy(name)
    assert catalog.committed(target) == []
    assert Copier(logged, target).copy(name).bytes == pack.size


def test_what_is_deleted_from_the_source_meanwhile_is_told(logged, target):
    def delete_both(done, total):
        for name in ("15-1", "14-1"):
            if names.parse_checkpoint(name) in catalog.committed(logged):
                Store(logged.root).delete(name)

    copied = CheckpointName(15, 1)
    with pytest.raises(Corrupt, match=r"15-0001.*no such file, but a manifest needs it"):
        Copier(logged, target, progress=delete_both).copy(copied)
    assert copied not in catalog.committed(target)
    with pytest.raises(Missing):
        Copier(logged, target).copy(CheckpointName(99, 1))


def test_a_claim_that_is_damaged_stays_behind(logged, target):
    path = logged.root / names.epoch_path(1)
    path.write_bytes(path.read_bytes()[:-9])
    Copier(logged, target).copy(CheckpointName(14, 2))
    assert catalog.claimed(target) == [2]
    assert Store(target.root).steps() == [10, 11, 12, 13, 14][3:]


@pytest.mark.parametrize("target", ["disk", "bucket"], indirect=True)
def test_large_packs_are_copied_in_pieces(target, tmp_path):
    specs = tuple(Spec(f"w{index}", "float32", (1 << 20, 5)) for index in range(3))
    trainer = stores.make_store(tmp_path / "large", [1], specs)
    seen = []
    copied = Copier(trainer.disk, target, progress=lambda *said: seen.append(said)).copy(
        CheckpointName(1, 1)
    )
    assert len(seen) > 6
    assert copied.bytes == seen[-1][0] > 60 << 20
    assert Store(target.root).verify().ok
