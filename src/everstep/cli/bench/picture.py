"""The bench's report as one picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.cli.bench.plan import BASELINE, FLOOR, LOG, OURS, SPREAD
from everstep.cli.bench.plot import load_pyplot

_OURS, _LOG, _SPREAD, _PEER, _FLOOR = "#0b6e63", "#63c5a4", "#2f9c88", "#7f8fa6", "#c9ced6"
_LIMIT = "#333333"
Entry = dict[str, Any]
Bar = tuple[float, float, float] | None


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture to `path` (PNG)."""
    pyplot = load_pyplot()
    entries = {name: entry for name, entry in report["contenders"].items() if name != BASELINE}
    figure, grid = pyplot.subplots(2, 4, figsize=(18, 7.5), layout="constrained")
    axes = grid.flatten()
    every = str(report["settings"]["every"][0])
    when = "every step" if every == "1" else f"every {every}th step"
    _bars(axes[0], entries, _slowdown(every), f"slowdown of the loop, {when} (%)")
    _bars(axes[1], entries, _stall(every), f"stall in the call, {when} (ms, log)", log=True)
    _bars(axes[2], entries, _memory(every), f"memory more, {when} (MiB)")
    _bars(axes[3], entries, _bytes, "bytes of a save (MB)")
    _bars(axes[4], entries, _durable, "until durable, by itself (s)", floor=True)
    _bars(axes[5], entries, _restored, "restore, cold cache (s)", floor=True)
    _other_interval(axes[6], report, entries)
    _recovery(axes[7], report["recovery"])
    for index in (1, 2, 3, 5, 6):
        axes[index].set_yticklabels([])
    figure.suptitle(_title(report), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(
    axes: Any,
    entries: dict[str, Entry],
    value: Callable[[Entry], Bar],
    title: str,
    log: bool = False,
    floor: bool = False,
) -> None:
    """One horizontal bar per contender, with a whisker from the smallest to the largest value."""
    names = list(entries)
    for row, name in enumerate(names):
        bar = value(entries[name])
        if bar is None:
            axes.text(0.01, row, "not measured", transform=axes.get_yaxis_transform(), fontsize=7)
            continue
        middle, low, high = bar
        axes.barh(row, middle, color=_colour(name), height=0.62)
        whisker = [[max(0, middle - low)], [max(0, high - middle)]]
        axes.errorbar(middle, row, xerr=whisker, color="#333333", lw=1, capsize=2)
        axes.annotate(
            f"{middle:.3g}", (max(middle, high), row), (4, 0), textcoords="offset points",
            va="center", fontsize=8, fontweight="bold" if name in (OURS, LOG, SPREAD) else "normal",
        )  # fmt: skip
    if floor and FLOOR in entries and (bar := value(entries[FLOOR])):
        axes.axvline(bar[0], color="#333333", lw=0.8, ls=":")
    axes.set_yticks(range(len(names)), [entries[name]["label"] for name in names], fontsize=9)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    if log:
        axes.set_xscale("log")
    axes.margins(x=0.18)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)


def _other_interval(axes: Any, report: dict[str, Any], entries: dict[str, Entry]) -> None:
    """The slowdown at the second interval, where there is one."""
    others = report["settings"]["every"][1:]
    if not others:
        axes.set_visible(False)
        return
    _bars(axes, entries, _slowdown(str(others[0])), f"slowdown, every {others[0]}th step (%)")


def _recovery(axes: Any, recovery: dict[str, Any] | None) -> None:
    """Restores of a log by their distance to the base, below the line that they should keep to."""
    if recovery is None:
        axes.set_visible(False)
        return
    rows = recovery["restores"]
    counts = [row["records"] for row in rows]
    seconds = [row["seconds"] for row in rows]
    middle = [value["median"] for value in seconds]
    whiskers = [
        [value["median"] - value["min"] for value in seconds],
        [value["max"] - value["median"] for value in seconds],
    ]
    limits = [recovery["base_s"]["median"], *(row["at_most_s"] for row in rows)]
    axes.plot([0, *counts], limits, ":", color=_LIMIT, lw=1.2, label="base, reads, updates")
    axes.errorbar(counts, middle, whiskers, fmt="o-", color=_LOG, capsize=2, label="restore")
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.set_xlabel("records after the base", fontsize=9)
    axes.set_title("restore of a log (s)", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _slowdown(every: str) -> Callable[[Entry], Bar]:
    return lambda entry: _bar(entry["every"].get(every, {}).get("slowdown"), 100)


def _stall(every: str) -> Callable[[Entry], Bar]:
    return lambda entry: _bar(entry["every"].get(every, {}).get("stall_ms"))


def _memory(every: str) -> Callable[[Entry], Bar]:
    def value(entry: Entry) -> Bar:
        if every not in entry["every"]:
            return None
        mebibytes = entry["every"][every]["memory_over_baseline_bytes"] / 2**20
        return mebibytes, mebibytes, mebibytes

    return value


def _bytes(entry: Entry) -> Bar:
    if not entry["alone"]:
        return None
    megabytes = entry["alone"]["bytes"] / 1e6
    return megabytes, megabytes, megabytes


def _durable(entry: Entry) -> Bar:
    return _bar(entry["alone"] and entry["alone"]["durable_s"])


def _restored(entry: Entry) -> Bar:
    return _bar(entry["restore"] and entry["restore"]["seconds"])


def _bar(values: dict[str, float] | None, scale: float = 1) -> Bar:
    if not values:
        return None
    return scale * values["median"], scale * values["min"], scale * values["max"]


def _colour(name: str) -> str:
    return {OURS: _OURS, LOG: _LOG, SPREAD: _SPREAD, FLOOR: _FLOOR}.get(name, _PEER)


def _title(report: dict[str, Any]) -> str:
    machine, settings = report["machine"], report["settings"]
    size = (report["state_bytes"] or 0) / 1e6
    return (
        f"everstep bench: {settings['size']} model, {size:.3g} MB of state, medians of "
        f"{settings['rounds']} rounds, whiskers from smallest to largest. Dotted: plain I/O\n"
        f"{machine['processor']}; {machine['file system']}; torch {machine['torch']}"
    )
