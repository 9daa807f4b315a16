"""The bench: its order, its arithmetic, a contender that fails, and tiny runs from end to end."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import bench, figures, gang, machine, show
from benchmarks.bench import BASELINE, BEFORE, FULL, LOG, PLAIN


def names(only, ranks=1, against=None):
    return [one.name for one in bench.chosen(only, ranks, against)[0]]


def test_everstep_stands_for_its_strategies_each_beside_its_code_of_before():
    ours = ["full", "spread", "log", "log-with-bases", "auto"]
    assert names(["everstep"]) == ["none", "plain", *(f"everstep-{name}" for name in ours)]
    assert names(["everstep-log", "dcp"], against="/old") == [
        *("none", "plain", "dcp", "everstep-log", "everstep-log" + BEFORE),
    ]
    old = bench.chosen(["everstep-log"], 1, "/old")[0][-1]
    assert (old.code, old.options, old.restores) == ("/old", LOG.options, LOG.restores)


def test_ranks_have_contenders_of_their_own():
    assert names(["dcp", "everstep-full"], ranks=2) == ["none", "dcp", "everstep-full"]
    with pytest.raises(ValueError, match="unknown contenders \\['torchsnapshot'\\]"):
        names(["torchsnapshot"], ranks=2)


def test_a_round_has_every_contender_between_baselines():
    contenders = bench.chosen(["dcp", "torch.save", "everstep-full"], 1, "/old")[0]
    for number in range(4):
        order = [one.name for one in bench.round_of(contenders, number)]
        assert order[0] == order[-1] == BASELINE.name
        assert sorted(set(order)) == sorted(one.name for one in contenders)
        longest = max(len(part.split()) for part in " ".join(order).split(BASELINE.name))
        assert longest == bench.BLOCKS_PER_BASELINE
    first, second = (bench.turned(["a", "b", "c"], number) for number in (0, 1))
    assert (first, second) == (["a", "b", "c"], ["a", "c", "b"])


def test_slowdown_is_against_the_neighbouring_baselines():
    blocks = [("none", 1.0), ("a", 3.0), ("none", 2.0), ("b", 4.0)]
    assert figures.slowdowns(blocks, "none") == [("a", 1.0), ("b", 1.0)]


def test_a_ratio_is_drawn_round_by_round():
    drifting = [[1.0], [2.0], [4.0]]
    twice = [[2 * value for value in row] for row in drifting]
    found = figures.ratio(twice, drifting)
    assert found == {"ratio": 2.0, "interval": [2.0, 2.0], "rounds": 3}
    assert figures.ratio([], drifting) is None
    summary = figures.summary(drifting)
    assert summary
    assert (summary["median"], summary["interval"], summary["p99"]) == (2.0, [1.0, 4.0], 4.0)


def test_more_rounds_make_the_interval_narrower():
    few, many = ([[float(n % 7)] for n in range(count)] for count in (7, 70))
    intervals = [figures.summary(rounds)["interval"] for rounds in (few, many)]
    assert intervals[1][1] - intervals[1][0] < intervals[0][1] - intervals[0][0]


def test_replies_of_ranks_are_those_of_the_slowest():
    assert gang.merged([{"a": [1.0, 4.0], "b": True}, {"a": [3.0, 2.0], "b": False}]) == {
        "a": [3.0, 4.0],
        "b": False,
    }
    assert gang.merged(["word", "other"]) == "word"


def test_plain_writes_come_back(tmp_path):
    buffer = machine.filled_buffer(machine.EXTENT_BYTES + 5)
    machine.plain_write(tmp_path / "file", buffer)
    with (tmp_path / "file").open("ab") as file:
        file.write(b"no whole page")
    back = machine.filled_buffer(len(buffer) + 13)
    assert machine.plain_read(tmp_path / "file", back) == len(buffer) + 13
    assert back[: len(buffer) + 13] == buffer[:] + b"no whole page"


def test_the_machine_is_described(tmp_path):
    words = machine.describe(tmp_path)
    assert "cores" in words["processor"]
    assert " on " in words["file system"]
    assert machine.memory_bytes([1 << 30]) == 0


class FakeGang:
    """Replies as workers would; `broken` says who fails at what, `unequal` who restores badly."""

    broken: tuple[str, str] = ("", "")

    def __init__(self, root: Path, settings: dict[str, Any], ranks: int, code: str | None) -> None:
        self.name = root.name

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        if (self.name, do) == self.broken:
            raise gang.WorkerFailed(f"{do}: no space")
        saved = {"finished_s": 0.5, "sync_s": 0.25, "bytes": 10}
        block = {"step_s": [1.0], "call_s": [0.001], "finished_s": [0.5], "held_s": [0.1]}
        spent = [0.25] * 20
        return {
            "start": {"state_bytes": 1, "everstep": "everstep/__init__.py"},
            "block": {**block, "memory_bytes": 5},
            "alone": saved,
            "keep": {**saved, "step": 7, "expected": "digest"},
            "restore": {"seconds": 1.0, "equal": self.name != "dcp"},
            "write_log": {
                "expected": dict.fromkeys(map(str, range(21)), "digest"),
                "base_bytes": 3,
                "record_bytes": 1,
            },
            "parts_of_log": {"read_s": spent, "update_s": spent},
            "calls": {"call_s": [0.001], "user_s": [0.0]},
        }[do]

    ask_watched = ask

    def kill(self) -> None:
        pass

    stop = kill


def run_faked(monkeypatch, tmp_path, only, against=None):
    monkeypatch.setattr(bench, "Gang", FakeGang)
    monkeypatch.setattr(bench, "SETTLE_S", 0)
    chosen, missing = bench.chosen(only, 1, against)
    given = command.parsed(["--rounds", "2", "--records", "1,20"])
    run = bench.Bench(given, chosen, tmp_path, print)
    run.run()
    report = show.report_of(run, given, chosen, missing, machine.describe(tmp_path), 1.0)
    console = Console(width=170, record=True, file=io.StringIO())
    show.show(report, console)
    return report, console.export_text()


def test_a_contender_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeGang, "broken", ("torch.save", "block"))
    only = ["torch.save", "dcp", "everstep-full", "everstep-log"]
    report, text = run_faked(monkeypatch, tmp_path, only)
    assert report["failed"] == {
        "torch.save + fsync, training": "block: no space",
        "DCP save, restore": "restore_s: what was restored DIFFERS from what was saved",
    }
    assert "DCP save, restore: failed at restore_s: what was restored DIFFERS" in text
    measured = report["contenders"]["everstep-full"]["figures"]
    assert measured["durable_s"]["rounds"] == [[0.5], [0.5]]
    assert report["contenders"]["dcp"]["figures"]["durable_s"]["median"] == 0.75
    assert measured["memory_restore_s"]["median"] == 1.0
    recovery = report["recovery"]["everstep-log"]
    assert recovery["1"]["ratio"] == pytest.approx(1 / 1.5)
    assert recovery["20"]["ratio"] == pytest.approx(1 / 11)
    assert "…\n" not in text  # no head of a column is cut
    json.dumps(report, allow_nan=False)


def test_code_of_before_is_a_column_of_ratios(tmp_path, monkeypatch):
    report, text = run_faked(monkeypatch, tmp_path, ["everstep-full"], against="/old")
    ratios = report["against"]["everstep-full"]
    assert {"step_s", "call_s", "durable_s", "restore_s", "400_tensors_call_s"} <= set(ratios)
    assert ratios["restore_s"] == {"ratio": 1.0, "interval": [1.0, 1.0], "rounds": 5}
    assert "Now / before" in text


def test_code_that_is_none_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no package everstep in"):
        command.main(["--against", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [("--ranks", "1"), ("--ranks", "2")], ids=" ".join)
def test_a_tiny_run_reports_all_that_was_asked_for(tmp_path, monkeypatch, words):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that spin would stand in each other's way
    paths = ["--json", str(tmp_path / "report.json"), "--plot", str(tmp_path / "report.png")]
    places = ["--store-root", str(tmp_path / "stores"), "--against", str(gang.REPOSITORY)]
    small = [
        "--params",
        "tiny",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--restores",
        "1",
        "--records",
        "1,2",
    ]
    only = ["--only", "dcp,everstep-full,everstep-log"]
    assert command.main([*words, *small, *only, *paths, *places]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] == {}
    for name in ("dcp", FULL.name, FULL.name + BEFORE):
        measured = report["contenders"][name]["figures"]
        assert {"slowdown", "call_s", "durable_s", "bytes", "restore_s"} <= set(measured)
        assert measured["bytes"]["median"] > 100_000
    assert set(report["against"][FULL.name]) >= {"step_s", "memory_restore_s"}
    if words == ("--ranks", "1"):
        assert set(report["recovery"]) == {LOG.name, LOG.name + BEFORE}
        assert PLAIN.name in report["contenders"]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "stores").iterdir())
