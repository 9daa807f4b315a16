"""Runs whose losses are compared: each a process of its own, with steps as users write them; what
has run is kept in build, and not run again; curves beside each other in a picture."""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional

from everstep.cli.workload import Loader

SMOOTH = 20
BUILD = Path(__file__).parents[1] / "build"
Losses = list[float]


def parsed(module: str, arguments: list[str] | None, picture: str = "") -> argparse.Namespace:
    """The options. `run`: of a process that is one of the runs: its folder, way and seed."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    if picture:
        parser.add_argument("--picture", type=Path, default=Path(picture))
        parser.add_argument("--run", nargs=3, metavar=("FOLDER", "WAY", "SEED"))
    return parser.parse_args(arguments)


def run_apart(module: str, folder: str, way: str, seed: int, steps: int) -> int:
    """A run as a process; its exit code."""
    command = [sys.executable, "-m", module, "--steps", str(steps), "--run", folder, way, str(seed)]
    return subprocess.run(command, check=False).returncode


def kept(name: str, run: Callable[[], Any]) -> Any:
    """What a run came to, now or before."""
    path = BUILD / f"{name}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run()))
    return json.loads(path.read_text())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> float:
    """The loss."""
    inputs, targets = loader.next()
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def smooth(curve: Sequence[float]) -> Losses:
    """Means of the last SMOOTH steps."""
    return [statistics.mean(curve[max(0, at - SMOOTH + 1) : at + 1]) for at in range(len(curve))]


def draw(
    found: Mapping[str, Sequence[Losses]],
    styles: Mapping[str, tuple[str, str, str]],
    path: Path,
    off_title: str,
    since: int = 0,
) -> None:
    """A curve for each run, and beside it by how much those of other ways than the first are off,
    from a step on. `found`: by way and seed; `styles`: label, line and colour of a way."""
    base, *_ = found.values()
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 4), dpi=130, layout="constrained")
        losses, off = figure.subplots(1, 2)
        for way, runs in found.items():
            label, line, color = styles[way]
            for number, (curve, plain) in enumerate(zip(runs, base, strict=True)):
                style: dict[str, Any] = {"ls": line, "color": color, "lw": 1}
                style["label"] = None if number else label
                losses.plot(smooth(curve), **style)
                if runs is not base:
                    rest = smooth([a - b for a, b in zip(curve, plain, strict=True)][since:])
                    off.plot(range(since, len(curve)), rest, **style)
        losses.set(title=f"loss, {len(base)} seeds, means of {SMOOTH} steps", xlabel="step")
        off.set(title=off_title, xlabel="step")
        for axes in (losses, off):
            axes.legend(frameon=False)
            if since:
                axes.axvline(since, color="#9aa5b1", lw=0.8, ls=":")
        figure.savefig(path)
