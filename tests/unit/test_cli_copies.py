"""everstep cp, fork and tag: whole stores, and single steps, between directories and buckets; files
that two stores share, and what remains of either without the other."""

import os
import shutil
import tempfile

import pytest

import cli_store
import independent_reader
import stores
from commands import run, run_json
from everstep import Conflict, Missing, Store
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, commit
from everstep.tiers.disk import Disk
from examples import slow


@pytest.fixture
def branched(tmp_path):
    """40, 80 ("best"), 120-1 left behind, 81, 100."""
    path = tmp_path / "runs" / "gpt"
    cli_store.make_branched(path)
    return path


@pytest.fixture
def logged(tmp_path):
    """10, its logs 11 and 12; 13-2 and its log 14-2; and what was left behind of epoch 1."""
    path = tmp_path / "runs" / "log"
    cli_store.make_logged(path)
    return path


@pytest.mark.parametrize("kind", ["directory", *slow("bucket")])
def test_a_run_is_copied_there_and_back(branched, tmp_path, kind, capsys, request):
    place = tmp_path / "there" if kind == "directory" else request.getfixturevalue("bucket")
    found = run_json(capsys, "cp", branched, place)
    assert [int(name[:8]) for name in found["copied"]] == [100, 81, 80, 40]
    assert found["bytes"] == sum(Store(branched).manifest(step).size for step in (40, 80, 81, 100))
    assert (found["problems"], found["cut_off"]) == ({}, [])
    assert run("cp", place, tmp_path / "back") == 0
    out = capsys.readouterr().out
    assert "copied 4 checkpoints, 26." in out
    assert run("verify", tmp_path / "back") == 0
    back = Store(tmp_path / "back")
    assert (back.steps(), back.run) == ([40, 80, 81, 100], Store(branched).run)
    assert back.manifest("best").step == 80
    capsys.readouterr()
    again = run_json(capsys, "cp", branched, place)
    assert (again["copied"], again["bytes"]) == ([], 0)


def test_a_step_is_copied_with_what_it_goes_back_to(logged, tmp_path, capsys):
    found = run_json(capsys, "cp", logged, "12", tmp_path / "one")
    assert found["copied"] == ["00000010-0001", "00000011-0001", "00000012-0001"]
    found = run_json(capsys, "cp", logged, "15-1", "14", tmp_path / "two")
    assert found["copied"] == ["00000014-0001", "00000015-0001", "00000013-0002", "00000014-0002"]
    assert run("cp", logged, "99", tmp_path / "three") == 1
    assert "no checkpoint of step 99" in capsys.readouterr().err
    assert not (tmp_path / "three").exists()


def test_inside_a_store_it_need_not_be_named(branched, tmp_path, monkeypatch):
    monkeypatch.chdir(branched)
    assert run("cp", "best", tmp_path / "one") == 0
    assert Store(tmp_path / "one").steps() == [80]
    assert run("cp", tmp_path / "all") == 0
    assert Store(tmp_path / "all").steps() == [40, 80, 81, 100]


def test_tags_of_the_target_stay(branched, tmp_path):
    assert run("cp", branched, "40", tmp_path / "there") == 0
    commit.set_tag(Disk(tmp_path / "there"), "best", CheckpointName(40, 1))
    assert run("cp", branched, tmp_path / "there") == 0
    assert Store(tmp_path / "there").manifest("best").step == 40


def test_what_goes_on_from_a_damaged_one_is_left_out(logged, tmp_path, capsys):
    disk = Disk(logged, stores.Unsynced())
    (pack,) = catalog.read_manifest(disk, CheckpointName(11, 1)).all_parts[0].packs
    data = bytearray(disk.read(pack.path))
    data[5000] ^= 1
    (logged / pack.path).write_bytes(data)
    found = run_json(capsys, "cp", logged, tmp_path / "there", code=1)
    assert list(found["problems"]) == ["00000012-0001", "00000011-0001"]
    assert all(f"{pack.path} at byte 4096" in each for each in found["problems"].values())
    assert found["cut_off"] == []
    assert Store(tmp_path / "there").steps() == [10, 13, 14]
    assert run("cp", logged, tmp_path / "there") == 1
    out = capsys.readouterr().out
    assert "✗ 00000011-0001" in out
    assert run("cp", logged, "12", tmp_path / "there") == 1
    assert "✗ 00000012-0001  reading data/00000011-0001" in capsys.readouterr().out


def test_a_damaged_base_is_read_once(logged, tmp_path, capsys):
    disk = Disk(logged, stores.Unsynced())
    (pack,) = catalog.read_manifest(disk, CheckpointName(10, 1)).all_parts[0].packs
    (logged / pack.path).write_bytes(disk.read(pack.path)[:-1])
    found = run_json(capsys, "cp", logged, tmp_path / "there", code=1)
    assert list(found["problems"]) == ["00000012-0001"]
    assert found["cut_off"] == ["00000011-0001", "00000010-0001"]
    assert run("cp", logged, tmp_path / "there") == 1
    assert "2 checkpoints not copied" in capsys.readouterr().out


def test_places_that_cannot_be_meant_are_refused(branched, logged, tmp_path, capsys):
    assert run("cp", branched, logged) == 1
    assert "Conflict" in (said := capsys.readouterr().err)
    assert "another run" in said
    assert run("cp", branched, tmp_path) == 1
    assert f"everstep cp {branched} {tmp_path}/copy" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("cp", branched, branched.parent / "gpt")
    assert "is the store itself" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("cp", branched, "40")
    assert "copy to where? 40 is a step" in capsys.readouterr().err
    assert run("cp", tmp_path / "nothing", tmp_path / "there") == 1
    assert "Missing: there is no" in capsys.readouterr().err
    cli_store.begin(tmp_path / "empty")
    assert run("cp", tmp_path / "empty", tmp_path / "there") == 1
    assert "no checkpoint" in capsys.readouterr().err


# ---- fork and tag --------------------------------------------------------------------------------


def packs(path):
    """The names of data files, and what they are on the file system."""
    return {file.name: file.stat().st_ino for file in (path / "data").glob("*.safetensors")}


def documents(path):
    """Manifests and epochs."""
    found = [*path.glob("checkpoints/**/*.json"), *path.glob("epochs/*.json")]
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def test_a_fork_shares_files_and_needs_nothing_of_the_other(branched, tmp_path, capsys):
    new = tmp_path / "new"
    said = run_json(capsys, "fork", branched, "best", new)
    assert (said["checkpoints"], said["bytes"]) == (["00000080-0001"], 0)
    assert said["bytes_shared"] == Store(branched).manifest(80).size
    assert packs(new).items() <= packs(branched).items()
    assert documents(new).items() <= documents(branched).items()
    fork = Store(new)
    assert fork.run != Store(branched).run
    assert (fork.steps(), fork.manifest(80).run) == ([80], Store(branched).run)
    assert run_json(capsys, "ls", new)["from"] == {
        "store": str(branched),
        "run": Store(branched).run,
        "step": 80,
        "epoch": 1,
    }
    run("ls", new)
    assert f"from step 80 of {branched}" in capsys.readouterr().out
    shutil.rmtree(branched)
    assert fork.verify().ok
    assert independent_reader.read(new, 80)


def test_a_log_step_comes_with_what_it_goes_back_to(logged, tmp_path):
    copied = Store(logged).fork("14-2", tmp_path / "new")
    assert [name.step for name in copied.checkpoints] == [13, 14]
    assert Store(logged).fork("12", tmp_path / "older").bytes == 0
    older = Store(tmp_path / "older")
    assert (older.steps(), older.verify().ok) == ([10, 11, 12], True)
    for step in older.steps()[::-1]:
        older.delete(step)
    assert older.gc()[1] >= 0
    assert Store(logged).verify().ok


def test_another_file_system_gets_a_verified_copy(branched, capsys):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == os.stat(branched).st_dev:
            pytest.skip("there is one file system here")
        said = run_json(capsys, "fork", branched, 80, f"{folder}/new")
        assert (said["bytes_shared"], said["bytes"]) == (0, Store(branched).manifest(80).size)
        assert Store(f"{folder}/new").verify().ok


def test_in_a_bucket_the_server_copies(branched, bucket, capsys):
    assert run("cp", branched, "80", f"{bucket}/a") == 0
    capsys.readouterr()
    said = run_json(capsys, "fork", f"{bucket}/a", 80, f"{bucket}/b")
    assert said["bytes"] == 0 < said["bytes_shared"]
    assert Store(f"{bucket}/b").verify().ok


def test_what_is_there_stays(branched, tmp_path):
    store = Store(branched)
    store.fork(80, tmp_path / "new")
    assert store.fork(80, tmp_path / "new").checkpoints == []  # as after one that was broken off
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for place in (tmp_path / "new", tmp_path / "notes", branched):
        before = sorted(place.rglob("*"))
        with pytest.raises(Conflict, match="Name another place"):
            store.fork(100, place)
        assert sorted(place.rglob("*")) == before
    with pytest.raises(Missing):
        store.fork(99, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_damaged_file_is_not_shared(branched, tmp_path, capsys):
    (pack,) = (branched / "data").glob("00000080-*")
    pack.write_bytes(pack.read_bytes()[:-4096])
    assert run("fork", branched, "80", tmp_path / "new") == 1
    assert "the manifest says" in capsys.readouterr().err
    assert Store(tmp_path / "new").steps() == []


def test_tags_are_set_moved_and_deleted(branched, capsys):
    assert run_json(capsys, "tag", branched, 100, "good")["checkpoint"] == "00000100-0002"
    assert run("tag", branched, "good", "best") == 0
    assert Store(branched).manifest("best").step == 100
    assert run("tag", branched, "--delete", "best") == 0
    assert run("tag", branched, "--delete", "best") == 1
    assert "['good']" in capsys.readouterr().err
    for words in (("100", "12"), ("100", "latest"), ("99", "x"), ("100", "../x")):
        assert run("tag", branched, *words) == 1
    with pytest.raises(SystemExit):
        run("tag", branched, "100")
    assert list((branched / "tags").iterdir()) == [branched / "tags" / "good.json"]
