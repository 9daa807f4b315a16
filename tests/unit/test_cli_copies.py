"""everstep cp: whole stores, and single steps, between directories and buckets."""

from pathlib import Path

import pytest

import cli_store
import stores
from commands import CAPTURED, run, run_json
from everstep import Store
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, commit
from everstep.tiers.disk import Disk
from examples import slow


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


@pytest.mark.parametrize("kind", ["directory", *slow("bucket")])
def test_a_run_is_copied_there_and_back(
    branched: Path, tmp_path: Path, kind: str, capsys: CAPTURED, request: pytest.FixtureRequest
) -> None:
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


def test_a_step_is_copied_with_what_it_goes_back_to(
    logged: Path, tmp_path: Path, capsys: CAPTURED
) -> None:
    found = run_json(capsys, "cp", logged, "12", tmp_path / "one")
    assert found["copied"] == ["00000010-0001", "00000011-0001", "00000012-0001"]
    found = run_json(capsys, "cp", logged, "15-1", "14", tmp_path / "two")
    assert found["copied"] == ["00000014-0001", "00000015-0001", "00000013-0002", "00000014-0002"]
    assert run("cp", logged, "99", tmp_path / "three") == 1
    assert "no checkpoint of step 99" in capsys.readouterr().err
    assert not (tmp_path / "three").exists()


def test_inside_a_store_it_need_not_be_named(
    branched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(branched)
    assert run("cp", "best", tmp_path / "one") == 0
    assert Store(tmp_path / "one").steps() == [80]
    assert run("cp", tmp_path / "all") == 0
    assert Store(tmp_path / "all").steps() == [40, 80, 81, 100]


def test_tags_of_the_target_stay(branched: Path, tmp_path: Path) -> None:
    assert run("cp", branched, "40", tmp_path / "there") == 0
    commit.set_tag(Disk(tmp_path / "there"), "best", CheckpointName(40, 1))
    assert run("cp", branched, tmp_path / "there") == 0
    assert Store(tmp_path / "there").manifest("best").step == 40


def test_what_goes_on_from_a_damaged_one_is_left_out(
    logged: Path, tmp_path: Path, capsys: CAPTURED
) -> None:
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


def test_a_damaged_base_is_read_once(logged: Path, tmp_path: Path, capsys: CAPTURED) -> None:
    disk = Disk(logged, stores.Unsynced())
    (pack,) = catalog.read_manifest(disk, CheckpointName(10, 1)).all_parts[0].packs
    (logged / pack.path).write_bytes(disk.read(pack.path)[:-1])
    found = run_json(capsys, "cp", logged, tmp_path / "there", code=1)
    assert list(found["problems"]) == ["00000012-0001"]
    assert found["cut_off"] == ["00000011-0001", "00000010-0001"]
    assert run("cp", logged, tmp_path / "there") == 1
    assert "2 checkpoints not copied" in capsys.readouterr().out


def test_places_that_cannot_be_meant_are_refused(
    branched: Path, logged: Path, tmp_path: Path, capsys: CAPTURED
) -> None:
    assert run("cp", branched, logged) == 1
    assert "Conflict" in (said := capsys.readouterr().err)
    assert "another run" in said
    assert run("cp", branched, tmp_path) == 1
    assert f"everstep cp {branched} {tmp_path}/copy" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("cp", branched, branched.parent / "gpt")
    assert "is the store itself" in capsys.readouterr().err
    assert run("cp", tmp_path / "nothing", tmp_path / "there") == 1
    assert "Missing: there is no" in capsys.readouterr().err
    cli_store.begin(tmp_path / "empty")
    assert run("cp", tmp_path / "empty", tmp_path / "there") == 1
    assert "no checkpoint" in capsys.readouterr().err
