"""The timeline of a demo as a picture: the run and its steps on one axis, one kill from near."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from everstep.cli import text
from everstep.cli.demo.events import Event
from everstep.cli.demo.report import PHASES, Attempt, Report, Step, split_attempts
from everstep.versions.picture import BLUE, FAINT, STYLE

Axes = Any  # matplotlib's own, which is not typed for us

KILL, DOWN, PAPER = "#d7263d", "#eceff3", "white"
SAVED = {"copied": "#f0a202", "state": "#0b6e63", "record": "#63c5a4"}
COLOURS = {
    "spawn": "#b8bfc9",
    "imported": "#959eab",
    "built": "#8e5ea2",
    "begin": "#9dc0e8",
    "forward": BLUE,
    "backward": "#1c3f74",
}
"""Of what the trainer is at after an event; no other begins anything that is shown."""


def draw(report: Report, killed: list[Event], reference: list[Event], path: Path) -> None:
    """Write the picture of a demo as a PNG."""
    attempts = split_attempts(killed)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(14, 9), layout="constrained")
        grid = figure.add_gridspec(3, 3, height_ratios=[2.6, 1.3, 2.0])
        run = figure.add_subplot(grid[0, :], xlim=(0, attempts[-1].end))
        times = figure.add_subplot(grid[1, :], sharex=run)
        for axes in (run, times):
            _draw_downtime(axes, attempts)
        _draw_run(run, report, attempts, reference)
        _draw_step_times(times, [step for attempt in attempts for step in attempt.steps()])
        _draw_near(figure.add_subplot(grid[2, :2]), attempts)
        _draw_losses(figure.add_subplot(grid[2, 2]), killed, reference)
        figure.suptitle(_title(report), x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path)


def _title(report: Report) -> str:
    said, outcome = report.settings, "every bit equal to the run without interruption"
    return (
        f"Strategy {said.strategy}: {said.steps} steps, durable at every "
        f"{'step' if said.every == 1 else f'{said.every}th'}; {len(report.kills)} kills, "
        f"{text.plural(report.lost, 'step')} lost; {outcome if report.ok else 'NOT EQUAL'}"
    )


def _draw_downtime(axes: Axes, attempts: Sequence[Attempt]) -> None:
    """Grey from each kill (or start) until training goes on, a red line at each kill."""
    for index, attempt in enumerate(attempts):
        first = attempt.first("begin")
        until = first["at"] if first else attempt.end
        label = "_" * index + "starting again"  # one of them is in the legend
        axes.axvspan(attempt.begin, until, color=DOWN, zorder=0, lw=0, label=label)
        if index:
            axes.axvline(attempts[index - 1].end, color=KILL, lw=0.9, zorder=1)


def _draw_run(
    axes: Axes, report: Report, attempts: Sequence[Attempt], reference: Sequence[Event]
) -> None:
    """The step reached, what is durable, and how the run without interruption went."""
    lives = [attempt.steps() for attempt in attempts]
    steps = [[(step.end, step.number) for step in life if step.done] for life in lives]
    saves = [[save for save in attempt.saves() if save.done] for attempt in attempts]
    durable = [sorted((save.durable, save.step) for save in life) for life in saves]
    states = [(s.durable, s.step) for life in saves for s in life if s.kind == "state"]
    plain = [(event["at"], event["step"]) for event in reference if event["event"] == "trained"]
    for points, colour, width, label in (
        (steps, BLUE, 2, "trained, step() returned"),
        (durable, SAVED["record"], 1.2, "durable"),
    ):
        x, y = _columns(point for life in points for point in (*life, (math.nan, math.nan)))
        axes.step(x, y, where="post", color=colour, lw=width, label=label)
    look = {"color": SAVED["state"], "ms": 3, "zorder": 4}
    axes.plot(*_columns(states), "D", label="a whole state", **look)
    axes.plot(*_columns(plain), "--", color=FAINT, label="without checkpoints and kills")
    _draw_kills(axes, report)
    axes.set_ylim(0)
    axes.set_ylabel("step")
    axes.set_title("The run")
    axes.legend(loc="lower right")


def _columns(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    found = list(points)
    return [x for x, _ in found], [y for _, y in found]


def _draw_kills(axes: Axes, report: Report) -> None:
    """A cross where each kill hit, with the steps that it cost and what the restart replayed."""
    hits = [(kill.at_s, kill.returned) for kill in report.kills]
    look = {"color": KILL, "ms": 9, "mec": PAPER, "mew": 0.8, "zorder": 5}
    axes.plot(*_columns(hits), "X", label="killed", **look)
    last = float("-inf")
    for at, kill in zip(hits, report.kills, strict=True):
        if kill.restored is not None:
            words = f"{kill.lost} lost"
            words += f"\n{kill.base} + {kill.records} records" if kill.records else ""
            is_crowded = kill.at_s - last < 0.08 * axes.get_xlim()[1]
            is_low = kill.returned < 0.15 * max(each.returned for each in report.kills)
            offset, side = ((6, 4), "bottom") if is_crowded or is_low else ((6, -4), "top")
            axes.annotate(words, at, offset, va=side, textcoords="offset points", color=KILL)
            last = kill.at_s


def _draw_step_times(axes: Axes, steps: Sequence[Step]) -> None:
    for step in steps:
        seconds, colour = step.end - step.begin, BLUE if step.done else KILL
        axes.bar(step.begin, seconds * 1000, seconds, align="edge", color=colour, ec=PAPER, lw=0.4)
    done_ms = sorted((step.end - step.begin) * 1000 for step in steps if step.done)
    axes.set_ylim(0, 1.15 * done_ms[int(0.97 * (len(done_ms) - 1))])
    axes.set_ylabel("ms")
    axes.set_xlabel("seconds")
    axes.set_title("Time of each step, checkpoint included")


def _draw_near(axes: Axes, attempts: Sequence[Attempt]) -> None:
    """One kill from near: what the trainer did, what was being saved, and how it came back."""
    good = [
        (number, *pair)
        for number, pair in enumerate(pairwise(attempts), 1)
        if all(len(attempt.all("returned")) > 2 for attempt in pair)
    ]
    if not good:
        axes.set_axis_off()
        return
    number, attempt, following = good[len(good) // 2]
    before = [step for step in attempt.steps() if step.done]
    low, high = before[-2].begin, following.steps()[1].end
    for one in (attempt, following):
        _draw_phases(axes, one, low, high)
        _draw_saves(axes, one)
    axes.axvline(attempt.end, color=KILL, lw=1.5)
    axes.text(attempt.end, 2.62, " SIGKILL", color=KILL, fontweight="bold", va="center")
    axes.set_yticks([2, 0.5], ["trainer", "saves"])
    axes.tick_params(left=False)
    axes.set_xlim(low, high)
    axes.set_ylim(-0.6, 2.85)
    axes.set_xlabel("seconds")
    axes.set_title(f"Kill {number} from near")
    kinds = {save.kind for attempt in attempts for save in attempt.saves()}
    colours = {PHASES[event]: colour for event, colour in COLOURS.items()}
    colours |= {"copied": SAVED["copied"]}
    colours |= {f"{kind} written": SAVED[kind] for kind in sorted(kinds)}
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, ncols=5, loc="lower right", fontsize=7)


def _draw_phases(axes: Axes, attempt: Attempt, low: float, high: float) -> None:
    """What the trainer was at, from event to event."""
    trace = [event for event in attempt.events if event["event"] in PHASES]
    ends = [event["at"] for event in trace[1:]] + [attempt.end]
    for event, end in zip(trace, ends, strict=True):
        begin, name = event["at"], event["event"]
        if name in COLOURS and end > low and begin < high:
            axes.barh(2, end - begin, 0.62, left=begin, color=COLOURS[name])
        if name == "begin" and low <= begin <= high:
            axes.text(begin, 2.4, str(event["step"]), fontsize=8, ha="left", va="bottom")


def _draw_saves(axes: Axes, attempt: Attempt) -> None:
    """Each save as a bar: copied beside forward and backward, then written; × in flight."""
    for save in attempt.saves():
        lane = 1 - save.step % 2
        axes.barh(lane, save.copied - save.begin, 0.62, left=save.begin, color=SAVED["copied"])
        written = save.durable - save.copied
        axes.barh(lane, written, 0.62, left=save.copied, color=SAVED[save.kind])
        if not save.done:
            axes.plot(save.durable, lane, "x", color=KILL, ms=7, mew=2)


def _draw_losses(axes: Axes, killed: Sequence[Event], reference: Sequence[Event]) -> None:
    """The losses of both runs, which lie on one another."""
    for events, style, label in (
        (reference, {"color": FAINT, "lw": 5}, "without interruption"),
        (killed, {"color": KILL, "lw": 0, "marker": ".", "ms": 4}, "killed and restored"),
    ):
        trained = [event for event in events if event["event"] == "trained"]
        losses = [float.fromhex(event["loss"]) for event in trained]
        axes.plot([event["step"] for event in trained], losses, label=label, **style)
    axes.set_xlabel("step")
    axes.set_title("Loss of both runs")
    axes.legend(loc="upper right")
