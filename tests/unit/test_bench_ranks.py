"""The bench of several ranks: its arithmetic, a peer that fails, and a tiny run from end to end."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_bench import arguments

from everstep.cli.bench import command, gang, measuring, plan, ranks
from everstep.cli.bench.driver import WorkerFailed


def test_replies_of_ranks_are_those_of_the_slowest() -> None:
    assert gang.merged([0.5, 2, 1.5]) == 2
    assert gang.merged([[1.0, 4.0], [3.0, 2.0]]) == [3.0, 4.0]
    assert gang.merged([True, False]) is False
    assert gang.merged([[True, True], [True, False]]) == [True, False]
    assert gang.merged(["drop_caches", "drop_caches"]) == "drop_caches"


def test_processes_of_ranks_count_once() -> None:
    keeper_twice = [{"11": 1.0, "20": 0.25}, {"12": 2.0, "20": 0.5}]
    assert gang.merged(keeper_twice) == {"11": 1.0, "12": 2.0, "20": 0.5}


def test_who_is_measured_with_ranks_and_who_without() -> None:
    known = ["none", "dcp", "dcp-async", "dcp-process", "torch_checkpointing", "everstep"]
    assert plan.ranked([]) == known
    assert plan.ranked(["everstep"]) == ["none", "everstep"]
    with pytest.raises(ValueError, match="unknown contenders \\['torchsnapshot'\\]"):
        plan.ranked(["torchsnapshot"])
    assert "dcp-process" not in [*plan.PEERS, *plan.chosen([])]


@pytest.mark.parametrize("words", [("--ranks", "0"), ("--ranks", "2", "--simulate")])
def test_what_does_not_go_with_ranks_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--ranks"):
        command.run(arguments(*words))


class FakeGang:
    """Replies as ranks would; `broken` says who fails at what."""

    broken: tuple[str, str] = ("", "")

    def __init__(self, root: Path, settings: dict[str, Any], size: int) -> None:
        self.root, self.name, self.size = root, settings["name"], size

    def ask(self, do: str, timeout_s: float, **request: Any) -> dict[str, Any]:
        if (self.name, do) == self.broken and self.size == 4:
            raise WorkerFailed(f"{do}: not on {self.size} ranks")
        alone = {"finished_s": 0.5, "extra_sync_s": 0.5, "bytes": 10, "files": 3, "stall_s": 0.1}
        block = {"seconds": 1.0, "stall_s": [0.1], "idle_call_s": [], "finished_s": [0.5]}
        processor = {"processor_s": {"7": 0.5}, "processor_steps": 1}
        return {
            "warm_up": {"state_bytes": 1},
            "block": {**block, **processor, "memory_bytes": 5},
            "alone": alone,
            "keep_one": {"step": 7, "expected": "digest", "root": str(self.root)},
            "load": {"seconds": float(self.size), "equal": self.name != "dcp", "cache": "cold"},
        }[do]

    ask_watched = ask

    def stop(self) -> None:
        pass


def test_a_load_that_fails_or_differs_is_said_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "Gang", FakeGang)
    monkeypatch.setattr(measuring, "_SETTLE_S", 0)
    monkeypatch.setattr(FakeGang, "broken", ("everstep", "load"))
    names = ["none", "dcp", "dcp-async", "everstep"]
    args = arguments("--ranks", "2", "--rounds", "2", "--steps", "1", "--every", "1")
    found = ranks.summarise(ranks.RanksBench(args, names, tmp_path, print).measure())
    ours, dcp = found["loads"]["everstep"], found["loads"]["dcp"]
    assert ours["2 to 4"]["failed"] == "load: not on 4 ranks"
    assert ours["2 to 4"]["seconds"] is None
    assert not ours["2 to 4"]["equal"]
    assert ours["4 to 2"]["equal"]
    assert ours["4 to 2"]["seconds"] == {"median": 2, "min": 2, "max": 2, "count": 2}
    assert dcp["2 to 4"]["seconds"]["median"] == 4
    assert not dcp["2 to 4"]["equal"]
    assert found["loads"]["dcp-async"] == dcp
    assert found["contenders"]["everstep"]["failed"] is None
    console = Console(width=136, record=True, file=io.StringIO())
    ranks.show(found, console)
    text = console.export_text()
    assert "everstep, 2 to 4 ranks, failed: load: not on 4 ranks" in text
    assert "DCP save, 4 to 2 ranks: what was loaded DIFFERS" in text
    assert "…\n" not in text  # no head of a column is cut


@pytest.mark.slow
@pytest.mark.timeout(600)  # 26 processes that import torch
def test_a_tiny_run_of_two_ranks_and_its_loads_on_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_SETTLE_S", 0)
    args = arguments(
        *("--ranks", "2", "--size", "tiny", "--rounds", "1", "--steps", "2", "--every", "1"),
        *("--only", "dcp,everstep", "--json", str(tmp_path / "report.json")),
        *("--store-root", str(tmp_path / "stores")),
    )
    assert command.run(args) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["section"] == "ranks"
    assert list(found["contenders"]) == ["none", "dcp", "everstep"]
    for name, entry in found["contenders"].items():
        assert entry["failed"] is None
        if name != "none":
            assert entry["every"]["1"]["stall_ms"]["count"] == 2
            assert entry["every"]["1"]["processor_more_ms"]["count"] == 1
            assert entry["alone"]["durable_s"]["median"] > 0
            assert entry["alone"]["bytes"] > 100_000
            rows = found["loads"][name]
            assert list(rows) == ["4 to 2", "2 to 4"]
            assert all(row["equal"] and row["seconds"]["min"] > 0 for row in rows.values())
    assert found["contenders"]["everstep"]["alone"]["files"] == 3  # a pack, its table, a manifest
    assert not list((tmp_path / "stores").iterdir())
