"""`make gpu` without a GPU: limits, dumps of stacks, budget, what is read from traces and logs; and
all of it, tiny, on the processor."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import kills, limits, page, traces
from benchmarks.gpu.__main__ import Go, Part

HANGING = """
import subprocess, sys, threading
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], start_new_session=True)
def wait_in_a_thread():
    threading.Event().wait()
threading.Thread(target=wait_in_a_thread).start()
Path(sys.argv[1]).write_text(str(child.pid))
child.wait()
"""
DEAF = "import signal; signal.signal(signal.SIGABRT, signal.SIG_IGN); signal.pause()"


def is_running(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_part_that_hangs_leaves_all_stacks_and_no_process(tmp_path, monkeypatch):
    """Not even one in a session of its own, that hears nothing."""
    monkeypatch.setattr(limits, "DUMP_S", 0.5)
    words = [sys.executable, "-c", HANGING, str(tmp_path / "pid"), DEAF]
    how = limits.run(words, f"hanging-{os.getpid()}", tmp_path / "log", 3.0, {})
    assert how == "stopped at its limit of 3 s"
    text = (tmp_path / "log").read_text()
    assert "Fatal Python error: Aborted" in text
    assert "in wait_in_a_thread" in text
    assert "in <module>" in text
    child = int((tmp_path / "pid").read_text())
    assert not is_running(child)


def test_how_a_part_ended_is_told(tmp_path):
    for code, how in ((0, "ok"), (3, "exit 3")):
        words = [sys.executable, "-c", f"import sys; sys.exit({code})"]
        assert limits.run(words, f"ends-{os.getpid()}", tmp_path / "log", 60, {}) == how


@pytest.fixture
def go(tmp_path):
    """With a budget in which one part has room beside the end of what hangs."""

    def made(budget_s):
        args = command.argparse.Namespace(
            budget=budget_s, out=tmp_path, disk=tmp_path, device="cpu", small=True
        )
        return Go(args)

    return made


@pytest.mark.slow
def test_what_does_not_fit_is_dropped_by_name_and_the_rest_is_written(tmp_path, go):
    parts = [[Part("machine", "machine", 60, 1)], [Part("never", "figures", 60, 1000)]]
    run = go(100)
    run.run(parts)
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert told["parts"]["machine"]["ended"] == "ok"
    assert told["dropped"][0].startswith("never: ")
    text = (tmp_path / "gpu.txt").read_text()
    assert "pinned to host" in text
    assert "never: " in text
    assert page.problems(told) == []


@pytest.mark.slow
def test_a_part_that_fails_is_told_with_its_log(go):
    run = go(100)
    run.run([[Part("figures of nobody", "figures", 60, 1, {"contender": "nobody"})]])
    part = run.results["parts"]["figures of nobody"]
    assert part["ended"] == "exit 1"
    assert [row["block"] for row in part["rows"] if "block" in row] == ["before"]
    assert "KeyError: 'nobody'" in "\n".join(page.problems(run.results))


def test_a_stopped_run_ends_what_runs_and_begins_no_more(go, monkeypatch):
    run = go(100)

    def ask(part: Part, limit_s: float) -> dict:
        run.stop(signal.SIGTERM)
        return {"ended": "exit -9", "rows": [], "log": ""}

    monkeypatch.setattr(run, "_run", ask)
    run.run([[Part("first", "machine", 60, 1)], [Part("second", "machine", 60, 1)]])
    assert list(run.results["parts"]) == ["first"]
    assert run.results["dropped"] == ["second: the run was stopped"]


def test_all_parts_fit_into_ten_minutes():
    """The last may begin with all that is left, and pass its limit."""
    assert command.BUDGET_S + limits.KILL_S < 560  # of `make gpu`
    for stage in command.stages(command.WANTED):
        assert all(part.least_s < part.limit_s < command.BUDGET_S for part in stage)


LOG = """
[gw0] [ 33%] PASSED tests/gpu/test_cuda.py::test_a[graph first]
[gw1] [ 66%] FAILED tests/gpu/test_cuda.py::test_b[x-1]
tests/gpu/test_cuda.py::test_c SKIPPED (needs two) [100%]
=================================== FAILURES ===================================
E   AssertionError: 7
=========================== short test summary info ============================
FAILED tests/gpu/test_cuda.py::test_b[x-1] - AssertionError: 7
"""


def test_what_pytest_said_is_counted():
    row = command.row_of_tests(LOG)
    assert row["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert row["failed"] == ["tests/gpu/test_cuda.py::test_b[x-1]"]
    assert "AssertionError: 7" in row["failures"]
    assert command.row_of_tests("")["counts"] == {}


def span(name, cat, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_waits_are_told_by_thread_and_stack_and_copies_by_stream():
    found = traces.summed_up(
        [
            span("work", "gpu_user_annotation", 0, 3000, tid=7),
            span("work", "user_annotation", 0, 100),
            span("train.py(3): step", "python_function", 5, 50),
            span("aten::item", "cpu_op", 10, 20),
            span("cudaStreamSynchronize", "cuda_runtime", 12, 2000 / 1000),
            span("cudaEventSynchronize", "cuda_runtime", 12, 9, tid=2),
            span("cudaDeviceSynchronize", "cuda_runtime", 150, 9),  # after the work: as meant
            span("cudaLaunchKernel", "cuda_runtime", 40, 1),
            span("gemm", "kernel", 20, 1000, tid=7, stream=7),
            span("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 20, 2000, 13, stream=13, bytes=90),
            {"ph": "i", "name": "instant"},
        ]
    )
    assert found["waits"] == [
        {
            "call": "cudaStreamSynchronize",
            "count": 1,
            "ms": 0.002,
            "in": ["aten::item", "train.py(3): step"],
        }
    ]
    assert found["waits_of_other_threads"] == 1
    copies = {"what": "Memcpy DtoH (Device -> Pinned)", "stream": 13, "count": 1}
    assert {**copies, "ms": 2.0, "bytes": 90} in found["streams"]
    assert [row["stream"] for row in found["streams"] if row["what"] == "kernels"] == [7]


def test_bytes_that_differ_after_a_kill_are_found():
    expected = {step: f"digest {step}" for step in range(1, kills.STEPS + 1)}

    def life(restored, step):
        return {"restored": restored, "step": step, "begin": expected.get(restored, 0)}

    lives = [life(0, 3), life(3, 7), life(5, 9), life(9, 12), life(13, 15), life(15, 24)]
    lives[-1]["end"] = expected[kills.STEPS]
    row = kills.judged(lives, expected)
    assert (row["equal"], row["lost"]) == (True, [0, 2, 0, 0, 0])
    assert kills.judged([*lives[:2], {**lives[2], "begin": "other"}, *lives[3:]], expected)[
        "wrong"
    ] == [5]
    assert not kills.judged([*lives[:-1], {**lives[-1], "end": "other"}], expected)["equal"]
    assert not kills.judged(lives[:3], expected)["equal"]
    assert not kills.judged([*lives[:3], {}], expected)["equal"]


def block(name, step_s, **more):
    row = {"block": name, "wall_step_s": step_s, "steps": 10, "saves": 0, "device_bytes": 0}
    return {**row, "call_s": [0.001], "held_s": [], "durable_s": [], "skipped": 0, **more}


def test_aims_stand_beside_what_was_measured():
    base = [block("before", 0.1), block("after", 0.1)]
    copies = {"what": "Memcpy DtoH (Device -> Pinned)", "ms": 10.0, "bytes": 5e8, "stream": 1}
    link = [
        {
            "trace": True,
            "waits": [],
            "waits_of_other_threads": 0,
            "streams": [{**copies, "count": 1}],
        },
        {"pinned_to_host_bytes_per_s": 5.2e10},
    ]
    saved = {
        "everstep-full": [block("every 10", 0.1001, saves=1, host_bytes=0), *link],
        "everstep-full-skip": [block("every 1", 0.102, saves=5, host_bytes=0)],
        "everstep-log": [block("every 1", 0.102, saves=10, host_bytes=0)],
        "dcp-async": [block(f"every {n}", 0.2, saves=10 // n, host_bytes=0) for n in (1, 10)],
    }
    parts = {
        f"300m {name}": {"ended": "ok", "rows": [*base, *rows], "log": ""}
        for name, rows in saved.items()
    }
    results = {"parts": parts, "dropped": [], "seconds": 1.0}
    judged = {words: (value, met) for _, words, value, met in page._aims(results)}
    assert judged["slowdown of full at every step ≤ 3%"][1] == "yes"
    assert judged["slowdown of log at every step ≤ 1%"][1] == "no"
    share, met = judged["device to host / plain pinned ≥ 0.9"]
    assert (round(share, 2), met) == (0.96, "yes")
    assert judged["stall less than DCP async's by ≥ 86.7%"] == (pytest.approx(0.999), "yes")
    assert judged["log's throughput over DCP async's ≥ 38.4%"][1] == "yes"
    assert "+2.0%" in page.text_of(results)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_it_runs_tiny_on_the_processor(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that spin would stand in each other's way
    monkeypatch.setattr(
        command,
        "CONTENDERS",
        {"300m": "everstep-full everstep-log dcp-async everstep-spread torch.save"},
    )
    words = ["--device", "cpu", "--small", "--out", str(tmp_path), "--disk", str(tmp_path / "disk")]
    parts = ["--parts", "kills,restores,300m", "--budget", "800"]
    began = time.monotonic()
    assert command.main([*words, *parts]) == 0
    assert time.monotonic() - began < 800
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["dropped"] == []
    rows = [row for part in results["parts"].values() for row in part["rows"]]
    assert {row["strategy"] for row in rows if "lost" in row} == set(kills.STRATEGIES)
    assert all(len(row["restored"]) == kills.KILLS + 1 for row in rows if "lost" in row)
    assert len([row for row in rows if row.get("restore")]) == 4
    for name in ("everstep-full", "everstep-log", "dcp-async", "torch.save"):
        blocks = page._blocks(results, f"300m {name}")
        assert list(blocks) == ["before", "every 1", "every 10", "after"]
        assert blocks["every 1"]["saves"] == 4
    text = (tmp_path / "gpu.txt").read_text()
    assert all(word in text for word in ("Kills", "Restores", "Traces", "Aims"))
    assert not list((tmp_path / "disk").iterdir())
