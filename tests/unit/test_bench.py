"""The bench: its plan and its arithmetic, and a tiny run from end to end."""

import argparse
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from everstep.capture.copies import Batch
from everstep.capture.plan import Planner
from everstep.cli.bench import (
    accelerator,
    command,
    driver,
    floors,
    machine,
    measuring,
    plan,
    report,
    simulated,
    tables,
)
from everstep.cli.bench.plan import Block, Facts
from everstep.cli.strategies import STRATEGIES
from everstep.keeper.arena import Arena
from everstep.sharding.leaves import Leaf
from everstep.state.view import Collected, Walk


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(list(words))


def test_a_round_has_every_contender_at_every_interval_between_baselines() -> None:
    names = ["none", "plain", "a", "b", "c"]
    for number in range(4):
        blocks = plan.round_of(names, [1, 10], number)
        saving = [block for block in blocks if block.name != "none"]
        assert sorted((block.name, block.every) for block in saving) == sorted(
            (name, every) for name in names[1:] for every in (1, 10)
        )
        assert blocks[0] == blocks[-1] == Block("none", 0)
        assert len(blocks) - len(saving) == 3
    assert plan.round_of(names, [1], 0) != plan.round_of(names, [1], 1)


def test_a_log_has_blocks_of_bases_too() -> None:
    blocks = plan.round_of(["none", "everstep", "everstep-log"], [2, 10], 0)
    assert blocks.count(Block("everstep-log", 2, bases=True)) == 1
    assert [block.name for block in blocks if block.bases] == ["everstep-log"]


def test_only_and_strategy_choose_together() -> None:
    ours = ["everstep", "everstep-spread", "everstep-log"]
    assert plan.chosen(["everstep"]) == ["none", "plain", *ours]
    assert plan.chosen(["everstep"], ["full"]) == ["none", "plain", "everstep"]
    assert plan.chosen(["dcp"], ["log"]) == ["none", "plain", "dcp"]
    assert "everstep" not in plan.chosen([], ["log"])
    assert not set(ours) & set(plan.PEERS)
    for words, strategies in (
        ("all", ("full", "spread", "log")),
        ("spread,full", ("full", "spread")),
        ("log", ("log",)),
        ("log,full,spread", STRATEGIES),
    ):
        assert arguments("--strategy", words).strategy == strategies
    with pytest.raises(SystemExit):
        arguments("--strategy", "auto")  # it chooses among these, so it is none of them


def test_a_spread_checkpoint_is_measured_where_it_has_steps_to_spread_over() -> None:
    assert plan.intervals_of("everstep-spread", [1, 10]) == [10]
    assert plan.intervals_of("everstep-spread", [1]) == [1]
    blocks = plan.round_of(["none", "everstep", "everstep-spread"], [1, 10], 0)
    assert [block.every for block in blocks if block.name == "everstep-spread"] == [10]


def measured_row(strategy: str, held: float, equal: bool = True) -> dict[str, Any]:
    periods = [{"held_s": held * part, "call_s": 0.01, "loop_s": held} for part in (1, 2, 3)]
    row = {"kind": "bf16", "ratio": 4, "strategy": strategy, "window_s": 0.1, "periods": periods}
    row |= {"gradient_bytes": 2, "state_bytes": 12, "steps_spread_over": 5, "bytes": 14}
    return {**row, "predicted_s": 0.2, "restore_s": 0.5, "equal": equal}


def test_the_simulated_accelerator_is_named_and_counted_in_steps(tmp_path: Path) -> None:
    settings = {"ratios": {"bf16": [4]}, "window_s": 0.1, "every": 16}
    rows = [measured_row("full", 0.15), measured_row("spread", 0.05)]
    found = simulated.summarise({"settings": settings, "rows": rows}, {})
    assert found["section"] == "simulated accelerator"
    full, spread = found["rows"]
    assert full["held_steps"]["median"] == pytest.approx(3)
    assert (full["single_steps"], full["gockpt_steps"]) == (3, pytest.approx(12 / 14))
    assert spread["stall_steps"]["median"] == pytest.approx(1.1)
    assert spread["predicted_steps"] == pytest.approx(2)
    assert found["spread_over_full_steps"] == pytest.approx(-2)
    assert found["is_never_slower"]
    console = Console(width=200, record=True, file=io.StringIO())
    simulated.show(found, console)
    text = console.export_text()
    assert text.count("simulated accelerator") == 2  # the table's title, and the remark
    assert "DIFFERS" not in text
    simulated.draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    slow = [measured_row("full", 0.05), measured_row("spread", 0.15, equal=False)]
    simulated.show(simulated.summarise({"settings": settings, "rows": slow}, {}), console)
    text = console.export_text()
    assert "SLOWER" in text
    assert "DIFFERS" in text


def test_a_copy_within_a_step_has_no_model_of_a_stall() -> None:
    assert simulated.single_steps(0.5) == simulated.gockpt_steps(0.5) == 0
    assert simulated.gockpt_steps(7) == 3


def test_what_is_copied_has_arrived_when_it_came_through_the_channel() -> None:
    sent, arrived = [], []
    channel = accelerator.Channel(1e12)
    channel.send = lambda size: sent.append((size, list(arrived)))  # type: ignore[method-assign]
    tensors = [torch.arange(30.0), torch.ones(4, 4).t(), torch.ones(0)]
    leaves = tuple(Leaf(f"t{i}", tensor, 0) for i, tensor in enumerate(tensors))
    walk = Walk(leaves, {id(leaf.tensor): leaf.name for leaf in leaves}, {}, {})
    plan = Planner().plan(Collected(walk, (), {}, {}, {}))
    arena = Arena.create(1, 4096, plan.layout.size)
    with accelerator.throttled(channel):
        batch = Batch.of(leaves, plan)
        batch.copy_from_cpu(arena, 0, None, arrived.append)
        starts = list(batch.starts())
    start = plan.offsets["t0"]
    assert bytes(arena.image(0)[start : start + 120]) == tensors[0].numpy().tobytes()
    assert sent == [(120, []), (64, starts[:1])]
    assert arrived == starts
    assert "throttled" not in Batch.copy_from_cpu.__qualname__


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_simulation_measures_real_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "RATIOS", {"bf16": (3,)})
    monkeypatch.setattr(simulated, "EVERY", 4)
    monkeypatch.setattr(simulated, "WINDOW_S", 0.02)
    args = arguments("--simulate", "--rounds", "1", "--json", str(tmp_path / "report.json"))
    args.store_root = tmp_path / "stores"
    assert command.run(args) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["section"] == "simulated accelerator"
    assert [row["strategy"] for row in found["rows"]] == ["full", "spread"]
    assert all(row["equal"] for row in found["rows"])
    full = found["rows"][0]
    assert full["steps_spread_over"] == 1
    assert full["held_steps"]["min"] > 0.5  # two steps by its model; a slow machine holds less
    assert not list((tmp_path / "stores").iterdir())


def test_what_a_recovery_should_cost_at_most() -> None:
    restores = [{"records": count, "seconds": [1.0, 2.5, 9.0], "equal": True} for count in (1, 3)]
    measured = {"base_s": [1.0, 1.0, 2.0], "record_s": [[0.5, 0.25, 0.25]] * 3}
    measured |= {"update_s": [[0.75, 0.5, 0.25]] * 3, "restores": restores}
    measured |= {"bytes_s": [[0.25, 0.125, 0.125]] * 3}
    measured |= {"cache": "posix_fadvise", "base_bytes": 3, "record_bytes": 1}
    recovery = report.recovery_of(measured)
    assert recovery["first_record_s"]["median"] == 1.25
    assert recovery["record_s"]["median"] == 0.625
    one, three = recovery["restores"]
    assert (one["at_most_s"], three["at_most_s"]) == (2.25, 3.5)
    assert one["over"] == pytest.approx(2.5 / 2.25)
    assert one["over_bytes"] == pytest.approx(2.5 / 2)
    assert three["over_bytes"] == pytest.approx(2.5 / 3)
    assert one["over_rounds"]["max"] == pytest.approx(9 / 3.25)
    low, high = one["over_interval"]  # of three rounds the median may be any
    assert (low, high) == pytest.approx((1 / 2.25, 9 / 3.25))
    (said,) = tables._log_remarks({"spread_recovery": None, "contenders": {}, "recovery": recovery})
    assert "1000 ms for the base" in said
    assert "1250 ms for the first" in said
    alone = report.recovery_of({**measured, "record_s": [[0.5]] * 3, "update_s": [[0.75]] * 3})
    assert alone["record_s"] == alone["first_record_s"]  # no later ones are known


def test_more_rounds_make_the_interval_narrower() -> None:
    def interval(rounds: int) -> tuple[float, float]:
        seconds = [2.0 + 0.1 * (number % 3 - 1) for number in range(rounds)]
        parts = {"base_s": [1.0] * rounds, "record_s": [[0.5]] * rounds}
        parts |= {"update_s": [[0.5]] * rounds, "bytes_s": [[0.5]] * rounds}
        restores = [{"records": 1, "seconds": seconds, "equal": True}]
        measured = {**parts, "restores": restores, "cache": "", "base_bytes": 2, "record_bytes": 1}
        low, high = report.recovery_of(measured)["restores"][0]["over_interval"]
        return low, high

    assert interval(3) == pytest.approx((0.95, 1.05))
    assert interval(60) == pytest.approx((1.0, 1.0))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recovery_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "_RECOVERIES", 2)
    words = ("--recovery", "--size", "tiny", "--records", "1,3", "--rounds", "1")
    args = arguments(*words, "--json", str(tmp_path / "report.json"))
    args.store_root = tmp_path / "stores"
    assert command.run(args) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["section"] == "recovery"
    assert [(row["records"], row["equal"]) for row in found["restores"]] == [(1, True), (3, True)]
    for row in found["restores"]:
        low, high = row["over_interval"]
        assert 0 < low <= high
    assert "3 records after the base" in capsys.readouterr().out
    assert not list((tmp_path / "stores").iterdir())


def test_a_base_is_spread_over_the_steps_between() -> None:
    def block(name: str, seconds: float, bases: bool = False) -> dict[str, Any]:
        place = {"name": name, "every": int(name != "none"), "bases": bases}
        timed = {"seconds": seconds, "steps": 1, "finished_s": [1.0], "stall_s": [0.5]}
        return {**place, **timed, "processor_s": {"7": 2 * seconds}, "processor_steps": 1}

    none, record = block("none", 1), block("everstep-log", 1.1)
    blocks = [none, record, block("everstep-log", 1.6, bases=True), none]
    raw = {"blocks": blocks, "settings": {"every": [1], "base_every": 10}}
    found = report._bases(raw, "everstep-log")
    assert found["slowdown"]["median"] == pytest.approx(0.6)
    assert found["slowdown_with_bases"] == pytest.approx((0.6 + 9 * 0.1) / 10)
    assert found["processor_more_ms"]["median"] == pytest.approx(1200)
    assert report._bases({**raw, "blocks": [none, record, none]}, "everstep-log") is None


def test_a_block_holds_whole_intervals() -> None:
    assert plan.steps_of(Block("a", 1), 5) == 5
    assert plan.steps_of(Block("a", 10), 5) == 10
    assert plan.steps_of(Block("a", 10), 11) == 20
    assert plan.steps_of(Block("none", 0), 5) == 5


def test_slowdown_is_against_the_neighbouring_baselines() -> None:
    def block(name: str, seconds: float, steps: int = 10) -> dict[str, Any]:
        return {"name": name, "every": int(name != "none"), "seconds": seconds, "steps": steps}

    blocks = [block("none", 9), block("none", 10), block("a", 12), block("none", 14)]
    blocks += [block("a", 42, 20), block("none", 28, 20)]
    assert report.slowdowns(blocks, "a", 1) == pytest.approx([0.0, 0.5])


def test_processor_time_is_of_all_processes_and_beside_the_neighbouring_baselines() -> None:
    def block(name: str, steps: int, **seconds: float) -> dict[str, Any]:
        place = {"name": name, "every": int(name != "none")}
        return {**place, "processor_s": seconds, "processor_steps": steps}

    blocks = [block("none", 2, trainer=9), block("none", 2, trainer=2)]
    blocks += [block("a", 4, trainer=8, keeper=1), block("none", 2, trainer=4)]
    blocks += [block("b", 4, trainer=9), block("a", 2, trainer=3, keeper=1)]
    assert report.processor_more_ms(blocks, "a", 1) == pytest.approx([750, 0])
    assert report.processor_more_ms(blocks, "b", 1) == pytest.approx([250])


@pytest.mark.parametrize(
    ("full_ms", "log_ms", "quotient"), [(40.0, 10.0, 0.25), (4.0, -1.0, -0.25), (-1.0, 3.0, None)]
)
def test_what_a_record_costs_beside_a_state_is_said_of_processor_times_too(
    full_ms: float, log_ms: float, quotient: float | None
) -> None:
    def entry(slowdown: float, more_ms: float) -> dict[str, Any]:
        figures = {"slowdown": {"median": slowdown}, "processor_more_ms": {"median": more_ms}}
        return {"alone": None, "every": {"1": figures}}

    contenders = {"everstep": entry(0.04, full_ms), "everstep-log": entry(0.03, log_ms)}
    (aim,) = report._log_aims({"contenders": contenders, "recovery": None})
    assert aim["measured"] == pytest.approx(0.75)
    assert not aim["met"]  # by wall time, whatever processors say
    assert aim["processor"] == quotient
    console = Console(width=136, record=True, file=io.StringIO())
    console.print(tables._aims_table([aim]))
    row = next(line for line in console.export_text().splitlines() if "a record / a state" in line)
    said = [] if quotient is None else [f"{quotient:.2f}"]
    assert row.split()[-2 - len(said) :] == ["0.75", "missed", *said]


def test_the_99th_percentile_of_few_values_is_the_largest() -> None:
    assert report.percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert report.percentile(list(range(1, 201)), 0.99) == 198


def test_unknown_contenders_and_intervals_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown contenders \\['orbax'\\]"):
        plan.chosen(["orbax"])
    with pytest.raises(SystemExit):
        arguments("--every", "0")


def test_plain_writes_come_back(tmp_path: Path) -> None:
    size = floors.page_multiple(floors.EXTENT_BYTES + 5)
    buffer = floors.filled_buffer(size)
    assert floors.plain_write(tmp_path / "file", buffer) > 0
    assert (tmp_path / "file").read_bytes() == buffer[:]
    back = floors.filled_buffer(size)
    floors.plain_read(tmp_path / "file", back)
    assert back[:] == buffer[:]


def test_the_machine_is_described(tmp_path: Path) -> None:
    words = machine.describe(tmp_path)
    assert "cores" in words["processor"]
    assert " on " in words["file system"]
    assert machine.memory_bytes([1 << 30]) == 0


_WORKS = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end:
        pass
    print("done", flush=True)
"""


def test_processor_time_is_of_whoever_works_for_it_and_from_then_on() -> None:
    def work(seconds: float) -> None:
        print(seconds, file=child.stdin, flush=True)
        assert child.stdout
        assert child.stdout.readline() == "done\n"

    command = [sys.executable, "-c", _WORKS]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as child:
        work(0.03)
        watch = machine.ProcessorWatch("nobody has this argument")
        work(0.02)
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        found = watch.seconds()
        assert 0.02 <= found[str(child.pid)] <= machine.processor_s(child.pid) - 0.03
        assert 0.02 <= found[str(os.getpid())] <= time.process_time()
    assert str(child.pid) not in watch.seconds()
    with pytest.raises(OSError, match="Invalid argument"):
        machine.processor_s(child.pid)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_run_reports_all_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that spin would stand in each other's way
    monkeypatch.setattr(measuring, "_SETTLE_S", 0)
    monkeypatch.setattr(measuring, "WINDOWS", (1, 3))
    monkeypatch.setattr(measuring, "_RECOVERIES", 1)
    monkeypatch.setattr(measuring, "_SPREAD_RECOVERIES", 1)
    gone = Facts("a library that nobody has", "no_such_library", "no-such-library")
    monkeypatch.setitem(plan.CONTENDERS, "torchsnapshot", gone)
    args = arguments(
        *("--size", "tiny", "--rounds", "2", "--steps", "2", "--every", "1,2", "--tensors", "40"),
        *("--only", "torch.save,dcp-async,torchsnapshot,everstep", "--records", "1,3"),
        *("--json", str(tmp_path / "report.json"), "--picture", str(tmp_path / "report.png")),
        *("--store-root", str(tmp_path / "stores")),
    )
    assert command.run(args) == 0
    measured = json.loads((tmp_path / "report.json").read_text())
    assert measured["missing"] == {"torchsnapshot": "a library that nobody has"}
    ours = ["everstep", "everstep-spread", "everstep-log"]
    assert list(measured["contenders"]) == ["none", "plain", "torch.save", "dcp-async", *ours]
    for name, entry in measured["contenders"].items():
        assert entry["failed"] is None
        if name != "none":
            check_entry(entry, () if name == "everstep-spread" else ("1",))
    check_log(measured)
    check_processor_times(measured["raw"]["blocks"])
    restores = measured["spread_recovery"]["restores"]
    assert [row["window"] for row in restores] == [1, 3]
    assert all(row["equal"] and row["seconds"]["count"] == 2 for row in restores)
    assert restores[1]["bytes"] > restores[0]["bytes"]
    assert measured["tensors"]["tensors"] == 40
    assert len(measured["aims"]) >= 5
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "stores").iterdir())
    assert "missing, not measured: a library that nobody has" in capsys.readouterr().out


def check_log(measured: dict[str, Any]) -> None:
    """A log writes less for a step, and what it replays is equal."""
    entries, recovery = measured["contenders"], measured["recovery"]
    full, log = entries["everstep"], entries["everstep-log"]
    assert full["bases"] is None
    assert log["bases"]["slowdown"]["count"] == 2
    assert log["alone"]["bytes"] < 0.5 * full["alone"]["bytes"]
    assert [row["records"] for row in recovery["restores"]] == [1, 3]
    assert all(row["equal"] for row in recovery["restores"])
    assert all(row["seconds"]["count"] == 2 for row in recovery["restores"])
    assert recovery["record_bytes"] < 0.5 * recovery["base_bytes"]
    assert sum("log" in aim["aim"] or "record" in aim["aim"] for aim in measured["aims"]) >= 2


def check_processor_times(blocks: list[dict[str, Any]]) -> None:
    """All steps count but the first of a block; a keeper does, a block without saves has none."""
    for block in blocks:
        lead = 1 if block["name"] == "none" else plan.CONTENDERS[block["name"]].lead_steps
        if not block["name"].endswith("log") and block["every"] > 1:
            lead = 1
        assert block["processor_steps"] == block["steps"] + lead - 1
        is_alone = block["name"] in ("none", "torch.save", "dcp-async")
        assert len(block["processor_s"]) == (1 if is_alone else 2), block
        assert all(seconds > 0 for seconds in block["processor_s"].values())


def check_entry(entry: dict[str, Any], at_every_step: tuple[str, ...]) -> None:
    assert set(entry["every"]) == {*at_every_step, "2"}
    for every, blocks_times_saves in (*((every, 4) for every in at_every_step), ("2", 2)):
        training = entry["every"][every]
        assert training["stall_ms"]["count"] == blocks_times_saves
        assert training["stall_ms"]["min"] <= training["stall_ms"]["p99"]
        assert training["finished_s"]["min"] > 0
        assert training["slowdown"]["count"] == training["processor_more_ms"]["count"] == 2
        assert training["processor_ms"]["min"] > 0
        assert training["memory_bytes"] > 50e6
    assert entry["alone"]["durable_s"]["median"] >= entry["alone"]["finished_s"]["median"]
    assert entry["alone"]["bytes"] > 100_000
    assert entry["restore"]["equal"]
    assert entry["restore"]["seconds"]["count"] == 2


def test_a_contender_that_fails_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments("--size", "tiny", "--rounds", "1", "--steps", "1", "--only", "dcp")
    broken = measuring.Bench(args, ["none", "plain", "dcp"], tmp_path, print)
    monkeypatch.setattr(measuring, "_SETTLE_S", 0)
    asked: list[tuple[str, str]] = []

    class Fake:
        def __init__(self, root: Path, settings: dict[str, Any]) -> None:
            self.name = settings["name"]

        def ask(self, do: str, timeout_s: float, **request: Any) -> dict[str, Any]:
            asked.append((self.name, do))
            if self.name == "dcp" and do == "block":
                raise driver.WorkerFailed("block: no space")
            return {"state_bytes": 1}

        ask_watched = ask

        def stop(self) -> None:
            asked.append((self.name, "stop"))

    monkeypatch.setattr(measuring, "Driver", Fake)
    raw = broken.measure()
    assert raw["failed"] == {"dcp": "block: no space"}
    assert asked.count(("dcp", "block")) == 1
    assert ("dcp", "restore") not in asked
    assert ("plain", "restore") in asked
    assert asked[-1] == ("dcp", "stop")
