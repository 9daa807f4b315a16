"""everstep fork and tag: files that two stores share; what remains of either without the other."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

import cli_store
import independent_reader
from commands import CAPTURED, run, run_json
from everstep import Conflict, Missing, Store


@pytest.fixture
def branched(tmp_path: Path) -> Path:
    """40, 80 ("best"), 120-1 left behind, 81, 100."""
    path = tmp_path / "runs" / "gpt"
    cli_store.make_branched(path)
    return path


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """10, its logs 11 and 12; 13-2 and its log 14-2; and what was left behind of epoch 1."""
    path = tmp_path / "runs" / "log"
    cli_store.make_logged(path)
    return path


def packs(path: Path) -> dict[str, int]:
    """The names of data files, and what they are on the file system."""
    return {file.name: file.stat().st_ino for file in (path / "data").glob("*.safetensors")}


def documents(path: Path) -> dict[str, bytes]:
    """Manifests and epochs."""
    found = [*path.glob("checkpoints/**/*.json"), *path.glob("epochs/*.json")]
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def test_a_fork_shares_files_and_needs_nothing_of_the_other(
    branched: Path, tmp_path: Path, capsys: CAPTURED
) -> None:
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


def test_a_log_step_comes_with_what_it_goes_back_to(logged: Path, tmp_path: Path) -> None:
    copied = Store(logged).fork("14-2", tmp_path / "new")
    assert [name.step for name in copied.checkpoints] == [13, 14]
    assert Store(logged).fork("12", tmp_path / "older").bytes == 0
    older = Store(tmp_path / "older")
    assert (older.steps(), older.verify().ok) == ([10, 11, 12], True)
    for step in older.steps()[::-1]:
        older.delete(step)
    assert older.gc()[1] >= 0
    assert Store(logged).verify().ok


def test_another_file_system_gets_a_verified_copy(branched: Path, capsys: CAPTURED) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == os.stat(branched).st_dev:
            pytest.skip("there is one file system here")
        said = run_json(capsys, "fork", branched, 80, f"{folder}/new")
        assert (said["bytes_shared"], said["bytes"]) == (0, Store(branched).manifest(80).size)
        assert Store(f"{folder}/new").verify().ok


def test_in_a_bucket_the_server_copies(branched: Path, bucket: str, capsys: CAPTURED) -> None:
    assert run("cp", branched, "80", f"{bucket}/a") == 0
    capsys.readouterr()
    said = run_json(capsys, "fork", f"{bucket}/a", 80, f"{bucket}/b")
    assert said["bytes"] == 0 < said["bytes_shared"]
    assert Store(f"{bucket}/b").verify().ok


def test_what_is_there_stays(branched: Path, tmp_path: Path) -> None:
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


def test_a_damaged_file_is_not_shared(branched: Path, tmp_path: Path, capsys: CAPTURED) -> None:
    (pack,) = (branched / "data").glob("00000080-*")
    pack.write_bytes(pack.read_bytes()[:-4096])
    assert run("fork", branched, "80", tmp_path / "new") == 1
    assert "the manifest says" in capsys.readouterr().err
    assert Store(tmp_path / "new").steps() == []


def test_tags_are_set_moved_and_deleted(branched: Path, capsys: CAPTURED) -> None:
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
