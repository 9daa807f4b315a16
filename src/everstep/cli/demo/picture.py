"""The timeline of a demo as a picture: steps, saves and kills on one axis, one kill from near."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from everstep.cli.demo.events import Event
from everstep.cli.demo.report import Attempt, Report, Save, split_attempts

Axes = Any  # matplotlib's own, which is not typed for us

INK, FAINT, PAPER = "#1d2733", "#c3cad3", "#ffffff"
TRAIN, FORWARD, BACKWARD, UPDATE = "#3b6fb6", "#9dc0e8", "#3b6fb6", "#1c3f74"
COPY, KILL, DOWN = "#f0a202", "#d7263d", "#eceff3"
WRITTEN = {"state": "#0b6e63", "record": "#63c5a4"}
_BEHIND_TEXT = {"fc": PAPER, "alpha": 0.8, "lw": 0, "pad": 0.6}
_MEGA = 1e6
IMPORT, BUILD, RESTORE = "#b8bfc9", "#959eab", "#8e5ea2"

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def _written_handles(attempts: Sequence[Attempt]) -> list[Patch]:
    """For a legend: the kinds of saves that there are."""
    kinds = {save.kind for attempt in attempts for save in attempt.saves()}
    return [Patch(color=WRITTEN[kind], label=f"{kind} written") for kind in sorted(kinds)]


def draw(report: Report, killed: list[Event], reference: list[Event], path: Path) -> None:
    """Write the picture of a demo as a PNG."""
    attempts = split_attempts(killed)
    with mpl.rc_context(_STYLE):
        heights = [2.6, 1.3, 1.1, 1.9]
        figure = Figure(figsize=(14, 3.2 + 1.05 * sum(heights)), dpi=150, facecolor=PAPER)
        figure.set_layout_engine("constrained")
        grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
        progress = figure.add_subplot(grid[0, :])
        rows = [progress]
        rows += [
            figure.add_subplot(grid[n, :], sharex=progress) for n in range(1, len(heights) - 1)
        ]
        _draw_progress(progress, attempts, reference)
        _draw_step_times(rows[1], attempts)
        _draw_saves(rows[2], attempts)
        for axes in rows:
            _draw_downtime(axes, attempts)
        progress.set_xlim(0, attempts[-1].end)
        rows[-1].set_xlabel("seconds")
        _draw_near(figure.add_subplot(grid[-1, :2]), attempts)
        _draw_losses(figure.add_subplot(grid[-1, 2]), killed, reference)
        figure.suptitle(_title(report), x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path)


def _title(report: Report) -> str:
    lost = sum(kill.lost or 0 for kill in report.kills)
    steps = "step" if lost == 1 else "steps"
    outcome = "every bit equal to the run without interruption" if report.ok else "NOT EQUAL"
    return (  # one line of the figure: the table has the rest
        f"Strategy {report.settings.strategy}: {report.settings.steps} steps, durable at "
        f"{report.when}; "
        f"{len(report.kills)} kills, {lost} {steps} lost; {outcome}"
    )


def _draw_progress(axes: Axes, attempts: Sequence[Attempt], reference: Sequence[Event]) -> None:
    """The step reached, what is durable, and how the run without interruption went."""
    plain = [(event["at"], event["step"]) for event in reference if event["event"] == "trained"]
    axes.plot(*zip(*plain, strict=True), "--", color=FAINT, lw=1.5)
    for attempt in attempts:
        saves = [save for save in attempt.saves() if save.done]
        durable = sorted((save.durable, save.step) for save in saves)
        points = [(step.end, step.number) for step in attempt.steps() if step.done]
        if points:
            axes.step(*zip(*points, strict=True), where="post", color=TRAIN, lw=2)
        if durable:
            axes.step(*zip(*durable, strict=True), where="post", color=WRITTEN["record"], lw=1.2)
        states = [(save.durable, save.step) for save in saves if save.kind == "state"]
        if states:
            axes.plot(*zip(*states, strict=True), "D", color=WRITTEN["state"], ms=3, zorder=4)
    _draw_kills(axes, attempts)
    _draw_replays(axes, attempts)
    axes.set_ylim(0)
    axes.set_ylabel("step")
    axes.set_title("The run")
    axes.legend(
        handles=[
            Line2D([], [], color=TRAIN, lw=2, label="trained, step() returned"),
            Line2D([], [], color=WRITTEN["record"], lw=1.2, label="durable"),
            Line2D([], [], color=WRITTEN["state"], marker="D", ls="", ms=3, label="a whole state"),
            Line2D([], [], color=FAINT, lw=1.5, ls="--", label="without checkpoints and kills"),
            Line2D([], [], color=KILL, marker="X", ls="", label="killed"),
            Patch(color=DOWN, label="starting again"),
        ],
        loc="lower right",
        frameon=True,
        framealpha=1.0,
        edgecolor=PAPER,
    )


def _draw_kills(axes: Axes, attempts: Sequence[Attempt]) -> None:
    """A cross where each kill hit, with the steps that it cost."""
    reached, last = 0, float("-inf")
    for attempt, following in pairwise(attempts):
        if not attempt.is_killed:
            continue
        reached = reached if attempt.reached is None else attempt.reached
        at = attempt.end
        axes.plot(at, reached, "X", color=KILL, ms=9, mec=PAPER, mew=0.8, zorder=5)
        if restored := following.first("restored"):
            crowded = at - last < 0.04 * attempts[-1].end
            offset = (6, 5) if crowded else (6, -11)
            text = f"{max(0, reached - restored['step'])} lost"
            axes.annotate(text, (at, reached), offset, textcoords="offset points", color=KILL)
            last = at


def _draw_replays(axes: Axes, attempts: Sequence[Attempt]) -> None:
    """What each restart began with: so many records after a base."""
    for attempt in attempts[1:]:
        restored, built = attempt.first("restored"), attempt.first("built")
        if restored and restored.get("records") and built:
            seconds = restored["at"] - built["at"]
            text = f"{restored['base']} + {restored['records']} records\n{seconds:.2g} s"
            at = (restored["at"], restored["step"])
            style = {"color": RESTORE, "fontsize": 7.5, "ha": "right", "va": "bottom", "zorder": 6}
            axes.annotate(text, at, (2, 9), textcoords="offset points", bbox=_BEHIND_TEXT, **style)


def _draw_step_times(axes: Axes, attempts: Sequence[Attempt]) -> None:
    rows = [step for attempt in attempts for step in attempt.steps()]
    for done, colour in ((True, TRAIN), (False, KILL)):
        chosen = [(row.begin, row.end - row.begin) for row in rows if row.done is done]
        if chosen:
            begins, widths = zip(*chosen, strict=True)
            heights = [width * 1000 for width in widths]
            axes.bar(begins, heights, widths, align="edge", color=colour, ec=PAPER, lw=0.4)
    done_ms = sorted((row.end - row.begin) * 1000 for row in rows if row.done)
    if done_ms:
        axes.set_ylim(0, 1.15 * done_ms[int(0.97 * (len(done_ms) - 1))])
    axes.set_ylabel("ms")
    axes.set_title("Time of each step, checkpoint included")


def _draw_saves(axes: Axes, attempts: Sequence[Attempt]) -> None:
    """Each save as a bar: copied beside forward and backward, then written."""
    lanes = 3
    for attempt in attempts:
        for save in attempt.saves():
            lane = save.step % lanes
            _draw_save(axes, save, lane, lw=0.8)  # a record is written in less than a pixel
            if not save.done and attempt.is_killed:
                axes.plot(save.durable, lane, "x", color=KILL, ms=5, mew=1.5)
    axes.set_yticks([])
    axes.set_ylim(-0.7, lanes - 0.3)
    saves = [save for attempt in attempts for save in attempt.saves()]
    sizes = {save.kind: save.bytes for save in saves if save.bytes}
    each = ", ".join(f"a {kind} has {size / _MEGA:.3g} MB" for kind, size in sizes.items())
    axes.set_title(f"Saves: copied, then written until durable; × in flight when killed. {each}")
    handles = [Patch(color=COPY, label="copied"), *_written_handles(attempts)]
    axes.legend(handles=handles, loc="upper right", bbox_to_anchor=(1, 1.35), ncols=len(handles))


def _draw_save(axes: Axes, save: Save, lane: float, lw: float = 0) -> None:
    _bar(axes, lane, save.begin, save.copied, COPY, ec=COPY, lw=lw)
    written = WRITTEN[save.kind]
    _bar(axes, lane, save.copied, save.durable, written, ec=written, lw=lw)


def _bar(axes: Axes, lane: float, begin: float, end: float, colour: str, **more: Any) -> None:
    axes.barh(lane, end - begin, 0.62, left=begin, color=colour, **more)


def _draw_downtime(axes: Axes, attempts: Sequence[Attempt]) -> None:
    """Grey from each kill (or start) until training goes on, a red line at each kill."""
    for attempt in attempts:
        first = attempt.first("begin")
        until = first["at"] if first else attempt.end
        axes.axvspan(attempt.begin, until, color=DOWN, zorder=0, lw=0)
        if attempt.is_killed:
            axes.axvline(attempt.end, color=KILL, lw=0.9, zorder=1)


def _draw_near(axes: Axes, attempts: Sequence[Attempt]) -> None:
    """One kill from near: what the trainer did, what was being saved, and how it came back."""
    pairs = pairwise(attempts)
    good = [
        (index, pair)
        for index, pair in enumerate(pairs)
        if len(pair[0].all("returned")) > 2 and len(pair[1].all("returned")) > 2
    ]
    if not good:
        axes.set_axis_off()
        return
    index, (attempt, following) = good[len(good) // 2]
    killed = attempt.end
    before = [step for step in attempt.steps() if step.done]
    axes.set_xlim(before[-2].begin, following.steps()[1].end)
    for one in (attempt, following):
        _draw_phases(axes, one)
        for save in one.saves():
            lane = 1 - save.step % 2
            _draw_save(axes, save, lane)
            if not save.done:
                axes.plot(save.durable, lane, "x", color=KILL, ms=7, mew=2)
    axes.axvline(killed, color=KILL, lw=1.5)
    axes.text(killed, 2.62, " SIGKILL", color=KILL, fontweight="bold", va="center")
    axes.set_yticks([2, 0.5], ["trainer", "saves"])
    axes.tick_params(left=False)
    axes.set_ylim(-0.6, 2.85)
    axes.set_xlabel("seconds")
    axes.set_title(f"Kill {index + 1} from near")
    _near_legend(axes, attempts)


def _draw_phases(axes: Axes, attempt: Attempt) -> None:
    """What the trainer was at, from event to event."""
    colours = {
        "start": IMPORT,
        "imported": BUILD,
        "built": RESTORE,
        "begin": FORWARD,
        "forward": BACKWARD,
        "backward": UPDATE,
        "update": UPDATE,
    }
    names = (*colours, "restored", "trained", "returned")
    trace = [event for event in attempt.events if event["event"] in names]
    ends = [event["at"] for event in trace[1:]] + [attempt.end]
    low, high = axes.get_xlim()
    for event, end in zip(trace, ends, strict=True):
        begin = event["at"]
        if event["event"] in colours and end > low and begin < high:
            _bar(axes, 2, begin, end, colours[event["event"]])
        if event["event"] == "begin" and low <= begin <= high:
            axes.text(begin, 2.4, str(event["step"]), fontsize=8, ha="left", va="bottom")


def _near_legend(axes: Axes, attempts: Sequence[Attempt]) -> None:
    names = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "update": UPDATE,
        "imports": IMPORT,
        "build": BUILD,
        "restore": RESTORE,
        "copied": COPY,
    }
    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    handles += _written_handles(attempts)
    axes.legend(
        handles=handles,
        ncols=len(handles),
        loc="upper right",
        bbox_to_anchor=(1, 1.17),
        handlelength=1.2,
        columnspacing=1.2,
        handletextpad=0.5,
    )


def _draw_losses(axes: Axes, killed: Sequence[Event], reference: Sequence[Event]) -> None:
    """The losses of both runs, which lie on one another."""
    read: Callable[[Event], float] = lambda event: float.fromhex(event["loss"])  # noqa: E731
    for events, style, label in (
        (reference, {"color": FAINT, "lw": 5}, "without interruption"),
        (killed, {"color": KILL, "lw": 0, "marker": ".", "ms": 4}, "killed and restored"),
    ):
        trained = [event for event in events if event["event"] == "trained"]
        axes.plot([e["step"] for e in trained], [read(e) for e in trained], label=label, **style)
    axes.set_xlabel("step")
    axes.set_title("Loss of both runs")
    axes.legend(loc="upper right")
