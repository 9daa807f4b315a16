"""The section about the simulated accelerator: runs it, and says what came of it. No torch here.

All times are in steps of training (waits of `window_s`), per checkpoint.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from everstep.cli.bench.plot import load_pyplot
from everstep.cli.bench.report import spread
from everstep.errors import Unavailable

SECTION = "simulated accelerator"
SCHEMA = 1
KINDS = {
    "bf16": "bf16 gradients, 12 bytes of state to 2 of gradient (RMSprop with momentum)",
    "fp32": "float32 gradients, 12 bytes of state to 4 of gradient (AdamW)",
}
STRATEGIES = ("full", "spread")
RATIOS = {"bf16": (0.5, 1, 2, 4, 7), "fp32": (1, 4, 7)}
"""Times to copy a state, over the window of one step."""
EVERY = 16
WINDOW_S = 0.1
FLOATS = 16384
SLACK_STEPS = 0.5
"""By how much a multi-step copy may measure longer than the single-step one: calls and noise."""
_FULL, _SPREAD, _MODEL = "#0b6e63", "#d7733d", "#7f8fa6"
Row = dict[str, Any]


def measure(root: Path, checkpoints: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the section in a process of its own; its report."""
    settings = {
        "ratios": RATIOS,
        "strategies": list(STRATEGIES),
        "window_s": WINDOW_S,
        "every": EVERY,
        "checkpoints": checkpoints,
        "floats": FLOATS,
    }
    command = [sys.executable, "-m", "everstep.cli.bench.accelerator"]
    rows = []
    with subprocess.Popen(
        [*command, json.dumps({**settings, "root": str(root)})], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            rows.append(json.loads(line))
            row = rows[-1]
            tell(f"{SECTION}: {row['kind']}, {row['strategy']}, copy = {row['ratio']:g} steps")
    if process.returncode:
        raise Unavailable(f"bench: the {SECTION} ended with status {process.returncode}")
    return {"settings": settings, "rows": rows}


def summarise(raw: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """The report: a row for each kind of training, time to copy, and strategy."""
    rows = [_summary(row) for row in raw["rows"]]
    worst = max((_excess(rows, row) for row in rows if row["strategy"] == "spread"), default=None)
    return {
        "section": SECTION,
        "schema": SCHEMA,
        "machine": machine,
        "settings": raw["settings"],
        "rows": rows,
        "spread_over_full_steps": worst,
        "is_never_slower": None if worst is None else worst <= SLACK_STEPS,
        "raw": raw["rows"],
    }


def gockpt_steps(copy_steps: float) -> float:
    """Steps that GoCkpt's model has updates wait, where the copy takes N = `copy_steps`."""
    return max(0.0, copy_steps * (copy_steps - 1) / 14)


def single_steps(copy_steps: float) -> float:
    """The same of a copy that begins at one step: N − 1."""
    return max(0.0, copy_steps - 1)


def _summary(row: Row) -> Row:
    unit = row["window_s"]
    times: dict[str, Any] = {
        f"{name}_steps": spread([period[f"{name}_s"] / unit for period in row["periods"]])
        for name in ("held", "call", "loop")
    }
    stalls = [(period["held_s"] + period["call_s"]) / unit for period in row["periods"]]
    kept = ("kind", "ratio", "strategy", "steps_spread_over", "bytes", "restore_s", "equal")
    return {
        **{key: row[key] for key in kept},
        "gradient_share": row["gradient_bytes"] / row["state_bytes"],
        **times,
        "stall_steps": spread(stalls),
        "predicted_steps": row["predicted_s"] / unit,
        "single_steps": single_steps(row["ratio"]),
        "gockpt_steps": gockpt_steps(row["ratio"]),
    }


def _excess(rows: list[Row], row: Row) -> float:
    """By how many steps it stalls longer than the full copy beside it."""
    beside = find(rows, row["kind"], row["ratio"], "full")
    if beside is None:
        return 0.0
    return float(row["stall_steps"]["median"] - beside["stall_steps"]["median"])


def find(rows: list[Row], kind: str, ratio: float, strategy: str) -> Row | None:
    """That row, if it was measured."""
    wanted = (kind, ratio, strategy)
    found = (row for row in rows if (row["kind"], row["ratio"], row["strategy"]) == wanted)
    return next(found, None)


def show(report: dict[str, Any], console: Console) -> None:
    """Print the section's tables."""
    rows, settings = report["rows"], report["settings"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        console.print(_table(kind, rows, settings))
    for row in rows:
        if not row["equal"]:
            text = f"{row['strategy']}, {row['ratio']:g}: what was restored DIFFERS"
            console.print(text, style="bold red")
    worst = report["spread_over_full_steps"]
    if worst is not None:
        word = "never slower" if report["is_never_slower"] else "SLOWER"
        console.print(
            f"spread is {word} than full: at most {worst:+.2f} steps of stall a checkpoint "
            f"(held and calls; up to {SLACK_STEPS:g} count as noise)",
            style="green" if report["is_never_slower"] else "bold red",
        )
    console.print(
        f"{SECTION}: forward and backward are waits of {1000 * settings['window_s']:g} ms without "
        f"any work, copies off the device are throttled; optimizer, everstep and disk are real. A "
        f"checkpoint at every {settings['every']}th step. Times in steps, per checkpoint: an "
        f"update held for a copy (median), and what calls took. Predicted: everstep's own model.",
        style="dim",
    )


def _table(kind: str, rows: list[Row], settings: dict[str, Any]) -> Table:
    title = f"Stall per checkpoint on a {SECTION} (in steps): {KINDS[kind]}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    columns = ("copy time\n/ window", "full\nheld", "calls", "N − 1", "spread\nsteps", "held")
    for column in (*columns, "calls", "predicted", "GoCkpt\nN(N−1)/14", "MB full", "MB spread"):
        table.add_column(column, justify="right", no_wrap=True)
    for ratio in settings["ratios"][kind]:
        full, spreads = (find(rows, kind, ratio, name) for name in STRATEGIES)
        if full and spreads:
            table.add_row(
                f"{ratio:g}",
                _steps(full["held_steps"]),
                _steps(full["call_steps"]),
                f"{full['single_steps']:.2f}",
                str(spreads["steps_spread_over"]),
                _steps(spreads["held_steps"]),
                _steps(spreads["call_steps"]),
                f"{spreads['predicted_steps']:.2f}",
                f"{spreads['gockpt_steps']:.2f}",
                f"{full['bytes'] / 1e6:.1f}",
                f"{spreads['bytes'] / 1e6:.1f}",
            )
    return table


def _steps(values: dict[str, float]) -> str:
    return f"{values['median']:.2f}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the section's picture (PNG): a panel for each kind of training."""
    pyplot = load_pyplot()
    kinds = list(dict.fromkeys(row["kind"] for row in report["rows"]))
    size = 6.2 * len(kinds), 4.6
    figure, grid = pyplot.subplots(
        1, len(kinds), figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for axes, kind in zip(grid[0], kinds, strict=True):
        _panel(axes, kind, report["rows"])
    grid[0][0].set_ylabel("stall per checkpoint (steps of training)")
    settings = report["settings"]
    figure.suptitle(
        f"everstep bench, {SECTION}: waits instead of forward and backward, throttled copies; "
        f"a checkpoint at every {settings['every']}th step",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axes: Any, kind: str, rows: list[Row]) -> None:
    chosen = [row for row in rows if row["kind"] == kind]
    top = max(row["ratio"] for row in chosen)
    line = [top * index / 60 for index in range(61)]
    axes.plot(line, [single_steps(x) for x in line], ":", color=_FULL, lw=1.2, label="full: N − 1")
    label = "GoCkpt's model: N(N−1)/14"
    axes.plot(line, [gockpt_steps(x) for x in line], "--", color=_MODEL, lw=1.2, label=label)
    for strategy, colour in (("full", _FULL), ("spread", _SPREAD)):
        own = sorted((row for row in chosen if row["strategy"] == strategy), key=_ratio)
        ratios = [row["ratio"] for row in own]
        stalls = [row["stall_steps"] for row in own]
        if strategy == "spread":
            predicted = [row["predicted_steps"] for row in own]
            axes.plot(ratios, predicted, ":", color=colour, lw=1.2, label="spread: predicted")
            for row, stall in zip(own, stalls, strict=True):
                axes.annotate(
                    f"{row['steps_spread_over']} st.", (row["ratio"], stall["median"]), (5, -12),
                    textcoords="offset points", fontsize=7.5, color=colour,
                )  # fmt: skip
        middle = [stall["median"] for stall in stalls]
        whiskers = [
            [stall["median"] - stall["min"] for stall in stalls],
            [stall["max"] - stall["median"] for stall in stalls],
        ]
        label = f"{strategy}: measured, held and calls"
        axes.errorbar(ratios, middle, whiskers, fmt="o", color=colour, ms=5, capsize=2, label=label)
    axes.set_xlabel(f"copy time / window, on a {SECTION}")
    axes.set_title(KINDS[kind], fontsize=8.5, loc="left")
    axes.set_xlim(0)
    axes.set_ylim(-0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _ratio(row: Row) -> float:
    return float(row["ratio"])
