"""The timeline of a demo as a picture: the run and its steps on one axis, one kill from near."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from everstep.cli import text
from everstep.cli.demo.events import Event
from everstep.cli.demo.report import PHASES, Attempt, Report, split_attempts
from everstep.versions.picture import BLUE, STYLE

Axes = Any  # matplotlib's own, which is not typed for us

KILL, DOWN = "#d7263d", "#eceff3"
SAVED = {"copied": "#f0a202", "record": "#63c5a4", "state": "#0b6e63"}
COLOURS = {
    "spawn": "#b8bfc9",
    "imported": "#959eab",
    "built": "#8e5ea2",
    "begin": "#9dc0e8",
    "forward": BLUE,
    "backward": "#1c3f74",
}
"""Of what the trainer is at after an event; no other begins anything that is shown."""


def draw(report: Report, killed: list[Event], path: Path) -> None:
    """Write the picture of a demo as a PNG."""
    attempts, said = split_attempts(killed), report.settings
    outcome = "every bit equal to the run without interruption" if report.ok else "NOT EQUAL"
    title = (
        f"Strategy {said.strategy}: {said.steps} steps, durable at every "
        f"{'step' if said.every == 1 else f'{said.every}th'}; {len(report.kills)} kills, "
        f"{text.plural(report.lost, 'step')} lost; {outcome}"
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(14, 9), layout="constrained")
        run, times, near = figure.subplots(3, height_ratios=[2.6, 1.3, 2.0])
        _draw_run(run, report, attempts)
        _draw_step_times(times, attempts)
        for axes in (run, times):
            axes.set_xlim(0, attempts[-1].end)
            for attempt in attempts:  # grey until training goes on, red at its end
                until = [event["at"] for event in attempt.all("begin")[:1]] or [attempt.end]
                axes.axvspan(attempt.begin, until[0], color=DOWN, zorder=0, lw=0)
                axes.axvline(attempt.end, color=KILL, lw=0.9, zorder=1)
        _draw_near(near, attempts)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path)


def _draw_run(axes: Axes, report: Report, attempts: list[Attempt]) -> None:
    """The step reached, what is durable, and what each kill cost."""
    handles: list[Axes] = []
    for attempt in attempts:
        handles = []
        for last, colour, label in (
            ("returned", BLUE, "trained, step() returned"),
            ("durable", SAVED["record"], "durable"),
        ):
            points = sorted((event["at"], event["step"]) for event in attempt.all(last))
            at, steps = [at for at, _ in points], [step for _, step in points]
            handles += axes.step(at, steps, where="post", color=colour, label=label)
        states = [event for event in attempt.all("durable") if event["kind"] == "state"]
        at, steps = [event["at"] for event in states], [event["step"] for event in states]
        look = {"color": SAVED["state"], "ms": 3, "label": "a whole state"}
        handles += axes.plot(at, steps, "D", **look)
    for kill in report.kills:
        axes.plot(kill.at_s, kill.returned, "X", color=KILL, ms=9)
        words = "" if kill.restored is None else f"{kill.lost} lost"
        words += f"\n{kill.base} + {text.plural(kill.records, 'record')}" if kill.records else ""
        look = {"va": "center", "textcoords": "offset points", "color": KILL}
        axes.annotate(words, (kill.at_s, kill.returned), (8, 0), **look)
    axes.set_ylim(0)
    axes.set_ylabel("step")
    axes.set_title("The run, killed at each cross")
    axes.legend(handles=handles, loc="lower right")


def _draw_step_times(axes: Axes, attempts: list[Attempt]) -> None:
    steps = [step for attempt in attempts for step in attempt.spans("begin", "returned")]
    for step in steps:
        seconds, colour = step.end - step.begin, BLUE if step.done else KILL
        axes.bar(step.begin, seconds * 1000, seconds, align="edge", color=colour, ec="white")
    done_ms = sorted((step.end - step.begin) * 1000 for step in steps if step.done)
    axes.set_ylim(0, 1.15 * done_ms[int(0.97 * (len(done_ms) - 1))])
    axes.set_ylabel("ms")
    axes.set_title("Time of each step, checkpoint included")


def _draw_near(axes: Axes, attempts: list[Attempt]) -> None:
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
    for one in (attempt, following):
        _draw_life(axes, one)
    axes.axvline(attempt.end, color=KILL, lw=1.5)
    axes.text(attempt.end, 2.62, " SIGKILL", color=KILL, fontweight="bold", va="center")
    axes.set_yticks([2, 0.5], ["trainer", "saves"])
    axes.set_xlim(attempt.all("returned")[-3]["at"], following.all("returned")[1]["at"])
    axes.set_ylim(-1.2, 2.85)  # the legend lies below
    axes.set_xlabel("seconds")
    axes.set_title(f"Kill {number} from near")
    colours = {PHASES[event]: colour for event, colour in COLOURS.items()}
    colours |= {name if name == "copied" else f"{name} written": c for name, c in SAVED.items()}
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, ncols=5, loc="lower right", fontsize=7)


def _draw_life(axes: Axes, attempt: Attempt) -> None:
    """What the trainer was at, from event to event; and each save as a bar: copied beside forward
    and backward, then written; × in flight."""
    for event, following in pairwise([*attempt.trace, {"at": attempt.end}]):
        begin, name = event["at"], event["event"]
        if name in COLOURS:
            axes.barh(2, following["at"] - begin, 0.62, left=begin, color=COLOURS[name])
        if name == "begin":
            axes.text(begin, 2.4, str(event["step"]), fontsize=8, clip_on=True)
    kinds = {event["step"]: event["kind"] for event in attempt.all("durable")}
    copies = attempt.spans("saving", "captured")
    for copy, save in zip(copies, attempt.spans("saving", "durable"), strict=True):
        lane, colour = 1 - save.step % 2, SAVED[kinds.get(save.step) or "record"]
        axes.barh(lane, copy.end - copy.begin, 0.62, left=copy.begin, color=SAVED["copied"])
        axes.barh(lane, save.end - copy.end, 0.62, left=copy.end, color=colour)
        if not save.done:
            axes.plot(save.end, lane, "x", color=KILL, ms=7, mew=2)
