"""The bench: its order, its arithmetic, a contender that fails, and tiny runs from end to end."""

import json
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import bench, figures, gang, machine
from benchmarks.bench import BASELINE, BEFORE, FULL, LOG, PLAIN


def names(only, ranks=1, against=None):
    return [one.name for one in bench.chosen(only, ranks, against)[0]]


def test_everstep_stands_for_its_strategies_each_beside_its_code_of_before():
    ours = ["full", "spread", "log", "log-with-bases", "auto"]
    assert names(["everstep"]) == ["none", "plain", *(f"everstep-{name}" for name in ours)]
    assert names(["everstep-log", "dcp"], against="/old") == [
        *("none", "plain", "dcp", "everstep-log", "everstep-log" + BEFORE)
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


def test_code_that_is_none_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no package everstep in"):
        command.main(["--against", str(tmp_path)])


def ask(workers: gang.Gang, real: Callable, do: str, **request: Any) -> dict[str, Any]:
    """One contender fails; the others go on."""
    if do == "block" and workers._root.name == "torch.save":
        raise gang.WorkerFailed("no space")
    return real(workers, do, **request)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [("--ranks", "1"), ("--ranks", "2")], ids=" ".join)
def test_a_tiny_run_reports_all_that_was_asked_for(tmp_path, monkeypatch, words):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that spin would stand in each other's way
    monkeypatch.setattr(gang.Gang, "ask", partialmethod(ask, gang.Gang.ask))
    paths = ["--json", str(tmp_path / "report.json")]
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
    only, failed = ["--only", "dcp,everstep-full,everstep-log"], {}
    if words == ("--ranks", "1"):
        only[1] += ",torch.save"
        failed["torch.save + fsync, training"] = "no space"
    assert command.main([*words, *small, *only, *paths, *places]) == len(failed)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] == failed
    for name in ("dcp", FULL.name, FULL.name + BEFORE):
        measured = report["contenders"][name]["figures"]
        assert {"slowdown", "call_s", "durable_s", "bytes", "restore_s"} <= set(measured)
        assert measured["bytes"]["median"] > 100_000
    assert set(report["against"][FULL.name]) >= {"step_s", "memory_restore_s"}
    if words == ("--ranks", "1"):
        assert set(report["recovery"]) == {LOG.name, LOG.name + BEFORE}
        assert PLAIN.name in report["contenders"]
    assert not list((tmp_path / "stores").iterdir())
