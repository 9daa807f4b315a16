"""The demo itself: a small run of it holds, and a comparison that should fail does."""

import json
from pathlib import Path

import pytest

from everstep.cli.demo.events import Event, Settings, read_events
from everstep.cli.demo.report import Report, make_report
from everstep.cli.demo.table import verdict
from everstep.cli.main import main

STEPS, KILLS = 30, 3


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small demo that went well, with its report."""
    directory = tmp_path_factory.mktemp("demo")
    arguments = f"demo --size tiny --steps {STEPS} --kills {KILLS} --seed 5".split()
    where = ["--store", str(directory / "run"), "--json", str(directory / "report.json")]
    assert main([*arguments, *where]) == 0
    return directory


def tampered(demo: Path, change: str = "") -> Report:
    """The report of the same logs, with one thing changed."""
    logs = {role: read_events(demo / "run" / f"{role}.jsonl") for role in ("killed", "reference")}
    trained = [event for event in logs["killed"] if event["event"] == "trained"]
    compared = next(event for event in logs["reference"] if event["event"] == "compared")
    if change == "loss":
        trained[10]["loss"] = (float.fromhex(trained[10]["loss"]) * (1 + 2**-22)).hex()
    elif change == "missing":
        logs["killed"] = [e for e in logs["killed"] if e not in trained or e["step"] != 7]
    elif change == "state":
        compared["differences"] = ["model.norm.weight: 1 of 4 bytes differ"]
    elif change == "not compared":
        logs["reference"].remove(compared)
    elif change == "lost":
        _restore_earlier(logs["killed"])
    return make_report(_settings(demo), logs["killed"], logs["reference"], KILLS)


def _restore_earlier(events: list[Event]) -> None:
    restored = [event for event in events if event["event"] == "restored"]
    restored[1]["step"] -= 2


def _settings(demo: Path) -> Settings:
    return Settings("killed", str(demo / "run"), STEPS, 5, "tiny", "full", 2)


def test_kills_lose_at_most_a_step_and_all_is_equal(demo: Path) -> None:
    report = json.loads((demo / "report.json").read_text())
    assert report["ok"]
    assert len(report["kills"]) == KILLS
    assert all(kill["lost"] in (0, 1) for kill in report["kills"] if kill["lost"] is not None)
    assert report["losses_compared"] >= STEPS
    assert report["state"]["differences"] == []
    assert report["state"]["tensors"] > 50
    assert report["slowdown"] is not None


def test_picture_is_written_and_scratch_is_gone(demo: Path) -> None:
    assert (demo / "run" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert not (demo / "run" / "scratch").exists()


def test_untouched_logs_are_fine(demo: Path) -> None:
    assert tampered(demo).ok


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("loss", "loss"),
        ("missing", "step 7: the killed run has no loss"),
        ("state", "model.norm.weight"),
        ("not compared", "were not compared"),
        ("lost", "steps lost"),
    ],
)
def test_a_difference_is_found_and_said(demo: Path, change: str, said: str) -> None:
    report = tampered(demo, change)
    assert not report.ok
    assert any(said in problem for problem in report.problems)
    assert any("FAILED" in str(line) for line in verdict(report))


def test_other_files_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("do not delete")
    assert main(["demo", "--store", str(tmp_path)]) == 1
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()
