"""`python -m benchmarks.tailor`: runs that fail, and go on from whole states, from states of which
half of the blocks is saved at a time, and from states of which the middle ones are saved at each
fifth save (LLMTailor's two cases, Minqiu Sun et al., 2025); a table, and docs/tailor.png.

A GPT of 24 million parameters is saved every ten steps, in a store for each way, and killed in the
middle of its training. It goes on from each store: from the whole states exactly as if nothing had
happened. Three seeds. What has run is kept in build/tailor, and not run again.
"""

import json
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import everstep
from benchmarks.losses import draw, kept, parsed, run_apart, train_step
from benchmarks.machine import await_end_of_keeper
from everstep.cli.workload import GPT, Loader, Shape, load_text

SHAPE = Shape(layers=16, heads=8, width=352, sequence=64, batch=2, learning_rate=3e-4)
EVERY, LOST = 10, 5
WAYS = {
    "whole": everstep.Full(),
    "halves": everstep.Full(thin={"model.blocks.*": 2}),
    "outer first": everstep.Full(
        thin={f"model.blocks.{block}": 5 for block in range(2, SHAPE.layers - 2)}
    ),
}
"""The outer ones: the first two and the last two, which are in each save."""
COLORS = {"whole": "#1d2733", "halves": "#3b6fb6", "outer first": "#f0a202"}
MODULE = "benchmarks.tailor"
_AGE = 0
"""In the place of a step: how many steps old the oldest tensor of the restored state is."""
Found = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    args = parsed(MODULE, arguments, "docs/tailor.png")
    if args.run:
        folder, way, seed = args.run
        train(Path(folder), way, int(seed), args.steps)
        return
    found = []
    for seed in range(1, args.seeds + 1):
        found.append(kept(f"tailor/{args.steps}-{seed}", partial(run, seed, args.steps)))
        print(f"seed {seed} of {args.seeds}", flush=True)
    Console(width=100).print(table(found))
    losses = {way: [seed[way]["losses"] for seed in found] for way in WAYS}
    styles = {way: (way, "-", color) for way, color in COLORS.items()}
    title = "more than from whole states, after the failure"
    draw(losses, styles, args.picture, title, since=args.steps // 2)


def run(seed: int, steps: int) -> dict[str, Found]:
    """By the way: the losses by step, and of each save its seconds and bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for way in ("", *WAYS):
            code = run_apart(MODULE, name, way, seed, steps)
            if code != (0 if way else -signal.SIGKILL):
                raise RuntimeError(f"{way or 'the run that fails'}: ended with {code}")
        rows = [json.loads(line) for line in (folder / "rows").read_text().splitlines()]
        for way in WAYS:
            await_end_of_keeper(folder / way)
    found: dict[str, Found] = {way: {"losses": {}, "saves": []} for way in WAYS}
    for way, at, *values in rows:
        for each in [way] if way else WAYS:
            if len(values) == 1:
                found[each]["losses"][at] = values[0]
            else:
                found[each]["saves"].append(values)
    for each in found.values():
        each["age"] = each["losses"].pop(_AGE)
        each["losses"] = list(each["losses"].values())
    return found


def train(folder: Path, way: str, seed: int, steps: int) -> None:
    """Up to the failure, with a save of each way in turn; or on from there, from the store of
    one."""
    torch.manual_seed(seed)
    model = GPT(SHAPE, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=SHAPE.learning_rate, fused=True)
    loader = Loader(load_text(), batch=SHAPE.batch, sequence=SHAPE.sequence, seed=seed)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    keep = everstep.Keep(last=2)
    savers = {
        each: everstep.Checkpointer(folder / each, state, strategy=strategy, keep=keep)
        for each, strategy in WAYS.items()
        if way in ("", each)
    }
    start = savers[way].restore() if way else 0
    end = steps if way else steps // 2 + LOST
    rows: list[tuple[Any, ...]] = []
    if way:
        plan = everstep.Store(folder / way).restore_plan(start)
        rows.append((way, _AGE, start - min(plan.values())))
    for step in range(start + 1, end + 1):
        rows.append((way, step, train_step(model, optimizer, loader)))
        if not way and step % EVERY == 0:
            order = list(savers)[step // EVERY % len(savers) :] + list(savers)
            for each in order[: len(savers)]:
                began = time.perf_counter()
                handle = savers[each].save(step)
                handle.wait("local")
                rows.append((each, step, time.perf_counter() - began, handle.bytes))
    with (folder / "rows").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    if not way:
        os.kill(os.getpid(), signal.SIGKILL)
    with savers[way] as saver:
        saver.save(end)  # its keeper waits for no other run then


def table(found: list[dict[str, Found]]) -> Table:
    """Means over seeds; of saves the medians but for the first, which has all."""
    rows = Table("saved", "MB each", "s to durable", "steps old", "loss at the end", "to whole")
    medians: dict[str, list[float]] = {}
    ends: dict[str, list[float]] = defaultdict(list)
    for way in WAYS:
        saves = [save for seed in found for save in seed[way]["saves"][1:]]
        seconds, written = zip(*saves, strict=True)
        medians[way] = [statistics.mean(written) / 1e6, statistics.median(seconds)]
        ends[way] = [statistics.mean(seed[way]["losses"][-50:]) for seed in found]
        size, took = (
            f"{mine:.3g} ({whole / mine:.2f}×)" if way != "whole" else f"{mine:.3g}"
            for mine, whole in zip(medians[way], medians["whole"], strict=True)
        )
        off = [mine - whole for mine, whole in zip(ends[way], ends["whole"], strict=True)]
        age = max(seed[way]["age"] for seed in found)
        each = f"{statistics.mean(off):+.4f} ({', '.join(f'{one:+.4f}' for one in off)})"
        rows.add_row(way, size, took, str(age), f"{statistics.mean(ends[way]):.3f}", each)
    return rows


if __name__ == "__main__":
    main()
