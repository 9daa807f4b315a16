"""`python -m benchmarks.codecs.curves`: the losses of runs that send a hundredth of their gradients
and are killed ten times, beside those of runs that are not; as a picture, docs/topk.png.

A run is a process that checkpoints every step in a log, and a kill is SIGKILL. What top-k had not
sent yet is in whole states alone (`residual="bases"`), or in each record. Three seeds. What has run
is kept in build/codecs, and not run again.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import everstep
from benchmarks.codecs.residual import KILLS, OPTIMIZERS, SHAPE
from benchmarks.machine import await_end_of_keeper
from everstep.cli.workload import GPT, Loader, load_text

WAYS = {"no kills": "#1d2733", "records": "#f0a202", "bases": "#3b6fb6"}
"""By the way: a colour. "no kills" is with `residual="bases"`, which changes nothing then."""
SMOOTH = 20
KEPT = Path(__file__).parents[2] / "build" / "codecs"
Losses = list[float]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs.curves")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path, default=Path("docs/topk.png"))
    parser.add_argument("--run", nargs=3, metavar=("FOLDER", "WAY", "SEED"))
    args = parser.parse_args(arguments)
    if args.run:
        folder, way, seed = args.run
        train(Path(folder), way, int(seed), args.steps)
        return
    found: dict[str, list[Losses]] = {way: [] for way in WAYS}
    for seed in range(1, args.seeds + 1):
        for way in WAYS:
            kept = KEPT / f"topk-{args.steps}-{way}-{seed}.json"
            if not kept.exists():
                KEPT.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(run(way, seed, args.steps)))
            found[way].append(json.loads(kept.read_text()))
            print(f"{way}, seed {seed}: {statistics.mean(found[way][-1][-50:]):.3f}", flush=True)
    draw(found, args.picture)


def run(way: str, seed: int, steps: int) -> Losses:
    """The losses by step, of a run to its end; of what a kill has undone those of the second
    time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.codecs.curves", "--steps", str(steps)]
        command += ["--run", folder, way, str(seed)]
        kills = 0
        while (code := subprocess.run(command, check=False).returncode) == -signal.SIGKILL:
            kills += 1
        if code or kills != (KILLS if way != "no kills" else 0):
            raise RuntimeError(f"{way}: ended with {code} after {kills} kills")
        lines = (Path(folder) / "losses").read_text().splitlines()
        await_end_of_keeper(Path(folder) / "store")
    return list(dict(map(json.loads, lines)).values())


def train(folder: Path, way: str, seed: int, steps: int) -> None:
    """Go on where the store is; die at the next step of those at which that is due."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(GPT(SHAPE, dropout=0.0))
    where = "records" if way == "records" else "bases"
    hook = everstep.compress(model, "topk", ratio=0.01, residual=where)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    loader = Loader(load_text(), batch=SHAPE.batch, sequence=SHAPE.sequence, seed=seed)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "compression": hook}
    kills = random.Random(seed).sample(range(2, steps), KILLS) if way != "no kills" else []
    log = everstep.Log(base_every=100)
    with everstep.Checkpointer(folder / "store", state, strategy=log) as checkpointer:
        start = checkpointer.restore()
        for step in range(start + 1, steps + 1):
            inputs, targets = loader.next()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            with (folder / "losses").open("a") as file:
                file.write(json.dumps([step, loss.item()]) + "\n")
            checkpointer.step(step)
            if step in kills and not (done := folder / f"killed-{step}").exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def draw(found: dict[str, list[Losses]], path: Path) -> None:
    """A curve for each run, and in a second part by how much the killed ones are off."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 4), dpi=130, layout="constrained")
        losses, off = figure.subplots(1, 2)
        for way, runs in found.items():
            for number, curve in enumerate(runs):
                label = _label(way) if number == 0 else None
                style = "--" if way == "records" else "-"  # it lies on that without kills
                losses.plot(smooth(curve), style, color=WAYS[way], lw=1, label=label)
                if way != "no kills":
                    plain = smooth(found["no kills"][number])
                    differences = [a - b for a, b in zip(smooth(curve), plain, strict=True)]
                    off.plot(differences, color=WAYS[way], lw=1, alpha=0.8, label=label)
        count = len(found["no kills"])
        losses.set(title=f"loss, {count} seeds, means of {SMOOTH} steps", xlabel="step")
        off.set(title="more than without kills", xlabel="step")
        losses.legend(frameon=False)
        off.legend(frameon=False)
        figure.savefig(path)


def _label(way: str) -> str:
    return way if way == "no kills" else f'killed {KILLS} times, residual="{way}"'


def smooth(curve: Losses) -> Losses:
    """Means of the last SMOOTH steps."""
    return [statistics.mean(curve[max(0, at - SMOOTH + 1) : at + 1]) for at in range(len(curve))]


if __name__ == "__main__":
    main()
