"""What is damaged in a store is mended from another one of the same run, and never in place."""

import json

import pytest

import cli_store
import stores
from everstep import Store
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, commit, names
from everstep.store.copy import Copier, fork
from everstep.store.repair import Mender
from everstep.tiers.disk import Disk
from everstep.tiers.tier import tier_at
from examples import slow

LOG, STATE = CheckpointName(12, 1), CheckpointName(10, 1)


@pytest.fixture(params=["disk", *slow("bucket")])
def pair(request, tmp_path):
    """A store, and its like: the state 10 ("best"), and its logs 11 and 12, which is made whole,
    too."""
    disk = cli_store.make_logged(tmp_path / "first")
    cli_store.make_whole(disk, LOG)
    place = tmp_path / "other" if request.param == "disk" else request.getfixturevalue("bucket")
    one, other = tier_at(place), Disk(tmp_path / "like", stores.Unsynced())
    for tier in (one, other):
        Copier(disk, tier).copy(CheckpointName(11, 1))
        Copier(disk, tier).copy(LOG)
    commit.set_tag(other, "best", STATE)
    one.replace(names.tag_path("best"), other.read(names.tag_path("best")))
    return one, other


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def cut(data):
    return data[:-100]


def path_of(tier, what):
    manifest, state = catalog.read_manifest(tier, LOG), catalog.read_state(tier, LOG)
    return {
        "pack": manifest.all_parts[0].packs[0].path,
        "pack of the state": state.parts[0].packs[0].path,
        "table": manifest.all_parts[0].table.path,
        "manifest": names.manifest_path(LOG),
        "state": names.state_path(LOG),
        "epoch": names.epoch_path(1),
        "tag": names.tag_path("best"),
    }[what]


def all_files(tier):
    folders = [names.EPOCHS, names.TAGS, names.DATA, names.TABLES]
    folders += [f"{names.CHECKPOINTS}/{name}" for name in tier.list(names.CHECKPOINTS)]
    paths = [f"{folder}/{name}" for folder in folders for name in tier.list(folder)]
    return {path: tier.read(path) for path in paths if path != names.TABLES}


EVERYTHING = ["pack", "pack of the state", "table", "manifest", "state", "epoch", "tag"]


@pytest.mark.parametrize(
    ("pair", "damage"),
    [("disk", flip), *slow(("disk", cut), ("bucket", cut), ("bucket", flip))],
    indirect=["pair"],
)
@pytest.mark.parametrize("what", EVERYTHING)
def test_what_is_damaged_is_mended(pair, capsys, what, damage):
    one, other = pair
    before, path = all_files(one), path_of(one, what)
    one.replace(path, damage(one.read(path)))
    assert main(["verify", str(one.root)]) == 1
    capsys.readouterr()
    assert main(["verify", str(one.root), "--repair", "--from", str(other.root), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["ok"], said["problems"], said["mended"]) == (True, {}, [path])
    assert Store(one.root).verify().ok
    assert {path: data for path, data in all_files(one).items() if path in before} == before


@pytest.mark.parametrize("what", ["pack", "table"])
def test_what_is_gone_is_brought_back(pair, what):
    one, other = pair
    path = path_of(one, what)
    one.delete(path)
    mender = Mender(one, other)
    mender.mend(LOG)
    assert mender.mended == [path]
    assert Store(one.root).verify().ok


@pytest.mark.parametrize("pair", ["disk", "bucket"], indirect=True)
def test_what_a_log_goes_on_from_is_brought_back(pair, capsys):
    one, other = pair
    one.delete(names.manifest_path(STATE))
    assert main(["verify", str(one.root), "--repair", "--from", str(other.root)]) == 0
    said = capsys.readouterr().out
    assert f"mended {names.manifest_path(STATE)} from {other.root}" in said
    assert "intact" in said
    assert Store(one.root).steps() == [10, 11, 12]


@pytest.mark.parametrize("pair", ["disk"], indirect=True)
def test_a_file_that_somebody_reads_is_not_changed(pair):
    one, other = pair
    path = path_of(one, "pack")
    bad = flip(one.read(path))
    one.replace(path, bad)
    reader = one.open(path)
    Mender(one, other).mend(LOG)
    view = memoryview(bytearray(len(bad)))
    reader.read_into(0, view)
    reader.close()
    assert view == bad
    assert one.read(path) == other.read(path)


def test_what_is_damaged_in_both_stays_and_is_told(pair, capsys):
    one, other = pair
    paths = [path_of(one, "pack"), path_of(one, "epoch")]
    for path in paths:
        one.replace(path, flip(one.read(path)))
    other.replace(paths[0], cut(other.read(paths[0])))
    assert main(["verify", str(one.root), "--repair", "--from", str(other.root), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["mended"] == [paths[1]]
    assert list(said["problems"]) == [str(LOG)]
    assert "cannot be mended" in said["problems"][str(LOG)][-1]
    assert str(other.root / paths[0]) in said["problems"][str(LOG)][-1]
    assert one.read(paths[0]) == flip(flip(one.read(paths[0])))


def test_of_another_run_only_what_has_a_digest_can_help(pair, tmp_path, capsys):
    """As a fork has it, and its origin. What has a name may mean something else there."""
    one, _ = pair
    fork(one, forked := Disk(tmp_path / "fork", stores.Unsynced()), LOG)
    paths = [path_of(one, what) for what in ("pack", "table", "epoch")]
    for path in paths:
        one.replace(path, flip(one.read(path)))
    assert main(["verify", str(one.root), "--repair", "--from", str(forked.root), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert set(said["mended"]) == set(paths[:2])
    [problems] = said["problems"].values()
    assert "cannot be mended" in problems[-1]
    assert "another run" in problems[-1]
    one.replace(paths[2], forked.read(paths[2]))
    assert Store(one.root).verify().ok


def test_where_it_should_come_from_must_be_there(pair, tmp_path, capsys):
    one, _ = pair
    assert main(["verify", str(one.root), "--repair", "--from", str(tmp_path / "typo")]) == 1
    assert "typo" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["verify", str(one.root), "--repair"])
    assert "--from STORE" in capsys.readouterr().err
