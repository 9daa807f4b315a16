"""The demo itself: a small run of it holds, and a comparison that should fail does."""

import fcntl
import json
import os
from pathlib import Path
from typing import get_args

import pytest

from everstep.cli.demo.command import told
from everstep.cli.demo.events import SPREAD_EVERY, Event, Settings, Strategy
from everstep.cli.demo.report import make_report
from everstep.cli.main import main
from examples import slow
from stores import end_keeper

STEPS, KILLS = 30, 2


_PARAMETERS = [
    name if name == "log" else pytest.param(name, marks=pytest.mark.slow)
    for name in get_args(Strategy)
]


@pytest.fixture(scope="module", params=_PARAMETERS)
def demo(tmp_path_factory, request):
    """The directory of a small demo that went well, with its report. One for all of pytest's
    processes."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = base / f"demo-{request.param}"
    with open(base / "demo.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            directory.mkdir()
            run(directory, request.param)
    return directory


def run(directory, strategy):
    arguments = f"demo --size tiny --steps {STEPS} --kills {KILLS} --seed 5".split()
    arguments += ["--strategy", strategy]
    where = ["--store", str(directory / "run"), "--json", str(directory / "report.json")]
    assert main([*arguments, *where]) == 0


def tampered(demo, change=""):
    """The report of the same logs, with one thing changed."""
    killed, reference = json.loads((demo / "run" / "events.json").read_text())
    logs: dict[str, list[Event]] = {"killed": killed, "reference": reference}
    trained = [event for event in logs["killed"] if event["event"] == "trained"]
    compared = next(event for event in logs["reference"] if event["event"] == "compared")
    if change == "loss":
        trained[10]["loss"] = (float.fromhex(trained[10]["loss"]) * (1 + 2**-22)).hex()
    elif change == "missing":
        logs["killed"] = [e for e in logs["killed"] if e not in trained or e["step"] != 7]
    elif change == "state":
        compared["state"]["differences"] = ["model.norm.weight: 1 of 4 bytes differ"]
    elif change == "not compared":
        logs["reference"].remove(compared)
    elif change == "lost":
        _restore_earlier(logs["killed"])
    return make_report(_settings(demo), logs["killed"], logs["reference"])


def _restore_earlier(events):
    restored = [event for event in events if event["event"] == "restored"]
    restored[1]["step"] -= 2 * SPREAD_EVERY


def _settings(demo):
    return Settings(str(demo / "run"), STEPS, 5, "tiny", strategy_of(demo))


def strategy_of(demo):
    strategy: Strategy = json.loads((demo / "report.json").read_text())["settings"]["strategy"]
    return strategy


def takes_log(demo):
    """ "auto" takes one, too: AdamW's records are much smaller than its state."""
    return strategy_of(demo) in ("auto", "log")


def kinds_of(demo):
    """What checkpoints were: whole states, records."""
    killed, _ = json.loads((demo / "run" / "events.json").read_text())
    return {event["kind"] for event in killed if event.get("kind")}


def test_kills_lose_what_was_said_and_all_is_equal(demo):
    report = json.loads((demo / "report.json").read_text())
    assert report["ok"]
    assert len(report["kills"]) == KILLS
    lost = [kill["lost"] for kill in report["kills"] if kill["lost"] is not None]
    assert max(lost) <= (SPREAD_EVERY + 1 if strategy_of(demo) == "spread" else 1)
    assert report["state"]["step"] == STEPS
    assert report["losses_compared"] >= STEPS
    assert report["state"]["differences"] == []
    assert report["state"]["tensors"] > 50
    assert report["settings"]["strategy"] in demo.name


def test_a_log_is_told_by_bases_and_records(demo):
    report = json.loads((demo / "report.json").read_text())
    known = [kill for kill in report["kills"] if kill["records"] is not None]
    if strategy_of(demo) == "spread":
        assert all(kill["restored"] % SPREAD_EVERY == 0 for kill in known)
        assert any(kill["records"] for kill in known)  # but for the first, which is whole
        assert kinds_of(demo) == {"state"}
        return
    assert all(kill["base"] + kill["records"] == kill["restored"] for kill in known)
    assert kinds_of(demo) == ({"record", "state"} if takes_log(demo) else {"state"})
    assert any(kill["records"] for kill in known) == takes_log(demo)


def test_the_tables_say_which_strategy_ran(demo):
    text = "\n".join(told(tampered(demo)))
    assert f"strategy {strategy_of(demo)}" in text
    assert (" record" in text) == takes_log(demo)


def test_picture_is_written(demo):
    assert (demo / "run" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_untouched_logs_are_fine(demo):
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
def test_a_difference_is_found_and_said(demo, change, said):
    report = tampered(demo, change)
    assert not report.ok
    assert any(said in problem for problem in report.problems)
    assert any("FAILED" in line for line in told(report))


@pytest.mark.parametrize(("server", "kills"), slow(("bucket", KILLS), ("ceph_bucket", 6)))
def test_a_bucket_alone_brings_all_back(server, kills, request, tmp_path, monkeypatch, capsys):
    url = request.getfixturevalue(server)
    monkeypatch.chdir(tmp_path)
    words = f"demo --size tiny --steps {STEPS} --kills {kills} --seed 5 --strategy log".split()
    assert main([*words, "--store", url, "--json", "report.json"]) == 0
    report = json.loads(Path("report.json").read_text())
    assert report["ok"]
    assert len(report["kills"]) == kills
    assert max(kill["lost"] or 0 for kill in report["kills"]) <= 1
    assert report["state"]["differences"] == []
    assert not Path("runs/demo/store").exists()
    assert main(["verify", url]) == 0
    assert main([*words, "--store", url]) == 1
    assert "not empty" in capsys.readouterr().err
    end_keeper(url)


def test_other_files_are_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("do not delete")
    assert main(["demo", "--store", str(tmp_path)]) == 1
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()
