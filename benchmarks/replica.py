"""The live replica and the offloaded optimizer, beside whole states and a plain log.

    python -m benchmarks.replica [--only costs recoveries limited] [--millions 16] [--plot FILE]

Three tables: what a step costs (bytes that cross from the trainer into shared memory for each
parameter, memory of the trainer, length of a step, processor time of the worker); how long a
restart takes by the number of records since the base (the trainer is killed; a new process restores
from what its keeper holds); and a step of an optimizer whose process may have less memory than its
state takes (needs root, for a cgroup).
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import everstep
from benchmarks.codecs.states import Masters
from benchmarks.machine import describe
from everstep.restore import load

KINDS = ("none", "full", "log", "layerwise", "replica", "offload", "overlap")
OFFLOADED = ("offload", "overlap")
RECOVERS = ("full", "first", "log", "replica", "offload")
"""first: of a whole state the weights first."""
WIDTH = 1000
WARM = 3
"""Steps before those that are measured: processes start with them."""
SMALL_MILLIONS = 1
"""Parameters that are trained in the runs that are killed: each of their records is a file."""


def build(
    kind: str, millions: int, dtype: torch.dtype, states: str | None = None, frozen: int = 0
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Model, what has step(), and the state that is saved. `frozen`: millions of parameters more,
    which are not trained."""
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(millions)]
    model = nn.Sequential(*layers).to(dtype)
    weights = list(model.parameters())
    if frozen:
        still = torch.randn(frozen, WIDTH, WIDTH, dtype=dtype)
        model.register_parameter("still", nn.Parameter(still, requires_grad=False))
    if kind in OFFLOADED:
        adamw, overlap = torch.optim.AdamW, kind == "overlap"
        offloaded = everstep.OffloadedOptimizer(adamw, weights, states=states, overlap=overlap)
        return model, offloaded, {"model": model, "optimizer": offloaded}
    if dtype is torch.float32:
        plain = torch.optim.AdamW(weights)
        return model, plain, {"model": model, "optimizer": plain}
    masters = Masters(weights)
    return model, masters, {"model": model, "masters": masters.parameters, "opt": masters.optimizer}


def strategy_of(kind: str) -> Any:
    """What a Checkpointer is given."""
    if kind in ("full", "first"):
        return everstep.Full()
    by_replica, layerwise = kind in ("replica", *OFFLOADED), kind == "layerwise"
    return everstep.Log(base_every=100_000, replica=by_replica, layerwise=layerwise)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run so many steps; what they cost."""
    dtype = getattr(torch, args.dtype)
    model, optimizer, state = build(args.kind, args.millions, dtype, args.states, args.frozen)
    saver = None
    if args.limit:
        sys.executable = args.limit
    if args.kind != "none" and not args.bare:
        raw = everstep.Tiers(codecs="raw")
        saver = everstep.Checkpointer(args.store, state, strategy=strategy_of(args.kind), tiers=raw)
        saver.restore()
    inputs, seconds, handle = torch.randn(args.batch, WIDTH).to(dtype), [], None
    before = 0.0
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        model.zero_grad()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        handle = saver.step(step) if saver else None
        seconds.append(time.perf_counter() - began)
        if step == WARM:
            before = _worker_s(args, saver, optimizer, step)
    if saver and handle:
        handle.wait("local")
    after = _worker_s(args, saver, optimizer, args.steps)
    said = {
        "step_s": median(seconds[len(seconds) // 3 :]),
        "private": _status(os.getpid(), "RssAnon"),
        "saved": handle.bytes if handle else 0,
        "worker_s": (after - before) / max(1, args.steps - WARM),
    }
    return said


def _worker_s(args: argparse.Namespace, saver: Any, optimizer: Any, step: int) -> float:
    """Processor time of the worker, or both, up to this step, to which a replica has come."""
    found, deadline = 0.0, time.monotonic() + 300
    if saver and args.kind in ("replica", *OFFLOADED):
        while saver.metrics.replica_step != step:
            assert time.monotonic() < deadline, saver.metrics.last_error
            time.sleep(0.01)
        found = saver.metrics.replica_seconds
    if args.kind in OFFLOADED:
        found += _processor_s(optimizer._process.worker.pid)
    return found


def restore(args: argparse.Namespace) -> dict[str, Any]:
    """How long it takes to have the state, and until the first forward pass is done; and the bytes
    that were read for it."""
    dtype = getattr(torch, args.dtype)
    model, _, state = build(args.kind, args.millions, dtype, frozen=args.frozen)
    saver = everstep.Checkpointer(args.store, state, strategy=strategy_of(args.kind))
    crossed, read_from = [], load._Task._read_from

    def count(task: Any, span: Any, source: Any) -> None:
        crossed.append(span.size)
        read_from(task, span, source)

    load._Task._read_from = count  # type: ignore[method-assign]
    began = time.perf_counter()
    step = saver.restore(first="model" if args.kind == "first" else None)
    seconds = time.perf_counter() - began
    model(torch.randn(args.batch, WIDTH).to(dtype))
    forward = time.perf_counter() - began
    each = sum(crossed) / (args.millions * WIDTH * WIDTH)
    return {"step": step, "restore_s": seconds, "forward_s": forward, "bytes/parameter": each}


def _status(pid: int, key: str) -> int:
    rows = (row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(dict(rows)[key].split()[0]) << 10


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _run(role: str, store: str, *words: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.replica", "--role", role, "--store", store]
    with subprocess.Popen(
        [*command, *map(str, words)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{role} {words} has said nothing")
        process.send_signal(signal.SIGKILL)
        process.stdout.read()
    found: dict[str, Any] = json.loads(line)
    return found


def costs(folder: str, args: argparse.Namespace) -> list[str]:
    """The first table."""
    rows = ["| weights | strategy | bytes/parameter | trainer MB | step s | worker s/step |"]
    rows += ["|---|---|---|---|---|---|"]
    count = args.millions * WIDTH * WIDTH
    for dtype in ("float32", "bfloat16"):
        for kind in KINDS:
            store = os.path.join(folder, f"{dtype}-{kind}")
            words = ("--kind", kind, "--dtype", dtype, "--millions", args.millions)
            said = _run("train", store, *words, "--steps", args.steps, "--batch", args.batch)
            item = 4 if dtype == "float32" else 2
            exchanged = 2 * item if kind in OFFLOADED else 0  # gradients and weights
            crossed = said["saved"] / count + exchanged
            rows.append(
                f"| {dtype} | {kind} | {crossed:.1f} | {said['private'] / 1e6:.0f} | "
                f"{said['step_s']:.3f} | {said['worker_s']:.3f} |"
            )
            print(rows[-1], flush=True)
            shutil.rmtree(store, ignore_errors=True)
    return rows


def recoveries(folder: str, args: argparse.Namespace) -> dict[str, list[tuple[int, float, float]]]:
    """By strategy: records since the base, seconds to the state, and to the first forward pass."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for kind in args.recovers:
        for distance in args.distances:
            if kind in ("full", "first") and distance != args.distances[0]:
                continue
            store = os.path.join(folder, f"recover-{kind}-{distance}")
            words = ("--kind", kind, "--millions", SMALL_MILLIONS, "--batch", 8)
            words = (*words, "--frozen", args.frozen)
            _run("train", store, *words, "--steps", distance + 2)
            restores = []
            # After another death before the next checkpoint the optimizer's state is read, too.
            for _ in range(1 if kind == "offload" else args.restores):
                time.sleep(1.0)  # the next trainer is not there at once
                restores.append(_run("restore", store, *words))
                assert restores[-1]["step"] == distance + 2
            said = {key: median(each[key] for each in restores) for key in restores[0]}
            spread = [min(each["restore_s"] for each in restores)]
            spread.append(max(each["restore_s"] for each in restores))
            found.setdefault(kind, []).append((distance, said["restore_s"], said["forward_s"]))
            print(kind, distance, said, "between", spread, flush=True)
            shutil.rmtree(store, ignore_errors=True)
    return found


def plot(found: dict[str, list[tuple[int, float, float]]], path: str) -> None:
    """Seconds by distance."""
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(6, 4))
    for kind, rows in found.items():
        if kind in ("full", "first"):
            style = {"full": ":", "first": "--"}[kind]
            label = {"full": "a whole state from memory", "first": "its weights first"}[kind]
            axes.axhline(rows[0][1], ls=style, color="gray", label=label)
            continue
        axes.plot([row[0] for row in rows], [row[1] for row in rows], "o-", label=kind)
    axes.set(xscale="log", yscale="log", xlabel="records since the base", ylabel="restore(), s")
    axes.legend()
    pyplot.savefig(path, dpi=120, bbox_inches="tight")


def limited(folder: str, args: argparse.Namespace) -> None:
    """The third table: bfloat16 with masters, nothing saved beside it."""
    millions = args.large_millions
    state_mb, limit_mb = 12 * millions * WIDTH * WIDTH / 1e6, args.limit_mb
    print(f"state {state_mb:.0f} MB, the process may have {limit_mb} MB where it is limited")
    print("| state in | limited | step s | worker s/step | trainer MB |\n|---|---|---|---|---|")
    with _limit(folder, limit_mb) as program:
        for place, limit in (("memory", ""), ("a file", ""), ("a file", program)):
            words = ["--kind", "offload", "--dtype", "bfloat16", "--millions", millions, "--bare"]
            words += ["--states", folder] if place == "a file" else []
            words += ["--limit", limit] if limit else []
            said = _run("train", folder, *words, "--steps", args.steps, "--batch", args.batch)
            print(
                f"| {place} | {'yes' if limit else 'no'} | {said['step_s']:.3f} | "
                f"{said['worker_s']:.3f} | {said['private'] / 1e6:.0f} |",
                flush=True,
            )


@contextlib.contextmanager
def _limit(folder: str, megabytes: int) -> Iterator[str]:
    """A program in the place of Python, which has so much memory, page cache included."""
    group = Path(tempfile.mkdtemp(prefix="everstep-", dir="/sys/fs/cgroup/memory"))
    (group / "memory.limit_in_bytes").write_text(str(megabytes << 20))
    program = Path(folder) / "python"
    tasks = group / "cgroup.procs"
    program.write_text(f'#!/bin/sh\necho $$ > {tasks}\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    try:
        yield str(program)
    finally:
        while tasks.read_text():
            time.sleep(0.01)
        group.rmdir()


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", default="all")
    parser.add_argument("--store")
    parser.add_argument("--kind", choices=(*KINDS, "first"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--millions", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--distances", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--recovers", nargs="+", choices=RECOVERS, default=RECOVERS)
    parser.add_argument("--frozen", type=int, default=0, help="millions of parameters more")
    parser.add_argument("--restores", type=int, default=5, help="of each run that was killed")
    parser.add_argument("--states", help="a directory for the offloaded state")
    parser.add_argument("--limit", help="the program that starts the worker")
    parser.add_argument("--bare", action="store_true", help="save nothing")
    parser.add_argument("--large-millions", type=int, default=100)
    parser.add_argument("--limit-mb", type=int, default=512)
    tables = ["costs", "recoveries", "limited"]
    parser.add_argument("--only", nargs="+", choices=tables, default=tables[:2])
    parser.add_argument("--plot")
    parser.add_argument("--directory")
    args = parser.parse_args()
    if args.role != "all":
        print(json.dumps({"train": train, "restore": restore}[args.role](args)), flush=True)
        signal.pause()
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        print(describe(Path(folder)))
        if "costs" in args.only:
            costs(folder, args)
        found = recoveries(folder, args) if "recoveries" in args.only else {}
        if "limited" in args.only:
            limited(folder, args)
    if args.plot and found:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
