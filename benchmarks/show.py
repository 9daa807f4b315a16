"""What a bench found: a report as data, its tables, and its picture."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.bench import BASELINE, BEFORE, LOG, PLAIN, Bench, Contender
from benchmarks.figures import Samples, ratio, summary

SCHEMA = 5
SETTINGS = (
    "params",
    "every",
    "steps",
    "rounds",
    "restores",
    "ranks",
    "onto",
    "parallel",
    "records",
    "tensors",
)
ROUNDS_MIN = 3
"""Of fewer rounds an interval tells nothing, and no difference is marked."""
Report = dict[str, Any]
Column = tuple[str, str, str]
"""Head, figure, and how it is shown (see `cell`)."""

TRAINING: tuple[Column, ...] = (
    ("step\ns", "step_s", "s"),
    ("slowdown\n%", "slowdown", "%"),
    ("in 19 of 20\n%", "slowdown", "interval %"),
    ("call\nms", "call_s", "ms"),
    ("its p99\nms", "call_s", "p99 ms"),
    ("held\ns", "held_s", "s"),
    ("finished\ns", "finished_s", "s"),
    ("durable, alone\ns", "durable_s", "s"),
    ("written\nMB", "bytes", "MB"),
    ("peak memory\nMiB", "memory_bytes", "MiB"),
)
RESTORES: tuple[Column, ...] = (
    ("cold disk\ns", "restore_s", "s"),
    ("in 19 of 20\ns", "restore_s", "interval s"),
    ("keeper's memory\ns", "memory_restore_s", "s"),
    ("in 19 of 20\ns", "memory_restore_s", "interval s"),
)
REMARKS = (
    "slowdown: a block's time per step over that of the neighbouring blocks without checkpoints, "
    "less one; in 19 of 20: where the median of such a bench lies (bootstrap over its rounds). "
    "finished: from the call, in the contender's own sense; durable: with the fsync of its files "
    "where it does not call it. peak memory: resident, with all its processes.",
    "restores: into a fresh run of new processes; every restored byte was compared.",
)


def report_of(
    bench: Bench,
    options: argparse.Namespace,
    contenders: Sequence[Contender],
    missing: Sequence[str],
    machine: dict[str, str],
    seconds: float,
) -> Report:
    """All figures, by contender, and the ratios of the present code to that of before."""
    entries = {}
    for one in contenders:
        figures = {name: summary(rounds) for name, rounds in _all(bench.samples, one.name)}
        entries[one.name] = {
            "label": one.label,
            "version": bench.versions[one.name],
            "imported from": bench.homes.get(one.name),
            "note": one.note,
            "figures": figures,
        }
    return {
        "schema": SCHEMA,
        "machine": machine,
        "seconds": seconds,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "missing": list(missing),
        "failed": bench.failed,
        "contenders": entries,
        "recovery": _recovery(bench.samples, contenders, options),
        "against": _against(bench.samples, contenders),
    }


def _all(samples: Samples, name: str) -> list[tuple[str, list[list[float]]]]:
    return [(figure, samples.rounds(name, figure)) for figure in samples.figures(name)]


def _recovery(
    samples: Samples, contenders: Sequence[Contender], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Of each log: restores with so many records over their bound."""
    found: dict[str, dict[str, Any]] = {}
    for one in contenders:
        for count in options.records:
            row = ratio(*(samples.rounds(one.name, f"{f}_{count}_s") for f in ("recover", "bound")))
            if row:
                found.setdefault(one.name, {})[str(count)] = row
    return found


def _against(samples: Samples, contenders: Sequence[Contender]) -> dict[str, dict[str, Any]]:
    """Of each contender that stands beside its code of before: the ratio of every figure."""
    found: dict[str, dict[str, Any]] = {}
    for one in contenders:
        for figure, rounds in _all(samples, one.name):
            row = ratio(rounds, samples.rounds(one.name + BEFORE, figure))
            if row and figure != "slowdown":  # a ratio of differences tells little: step_s does
                found.setdefault(one.name, {})[figure] = row
    return found


def show(report: Report, console: Console) -> None:
    """Print the tables."""
    machine, settings = report["machine"], report["settings"]
    ranks = f"{settings['ranks']} ranks ({settings['parallel']})" if settings["ranks"] > 1 else ""
    when = "every step" if settings["every"] == 1 else f"every {settings['every']}th step"
    what = [
        f"params {settings['params']}",
        ranks,
        f"a save at {when}",
        f"{report['seconds']:.0f} s",
    ]
    console.print("[bold]everstep beside its peers[/]: " + ", ".join(filter(None, what)))
    console.print("; ".join(f"{name} {words}" for name, words in machine.items()), style="dim")
    for title, columns in (("Training", TRAINING), ("Restores", RESTORES)):
        _print_table(console, report, title, columns)
    _print_recovery(console, report)
    for tensors in settings["tensors"]:
        prefix = f"{tensors}_tensors_"
        columns = (
            ("call\nms", f"{prefix}call_s", "ms"),
            ("in 19 of 20\nms", f"{prefix}call_s", "interval ms"),
            ("its p99\nms", f"{prefix}call_s", "p99 ms"),
            ("of it the user's\nstate_dict(), ms", f"{prefix}user_s", "ms"),
            ("then until durable\nms", f"{prefix}local_s", "ms"),
            ("torch's state_dict()s\nby themselves, ms", f"{prefix}state_dict_s", "ms"),
        )
        _print_table(console, report, f"The call, {tensors} small tensors", columns)
    _print_against(console, report)
    for label in report["missing"]:
        console.print(f"missing, not measured: {label}", style="yellow")
    for what, error in report["failed"].items():
        console.print(Text(f"{what}: failed at {error}", "yellow"))
    for entry in report["contenders"].values():
        if entry["note"]:
            console.print(Text(f"{entry['label']}: {entry['note']}", "dim"))
    for line in REMARKS:
        console.print(line, style="dim")


def _print_table(console: Console, report: Report, title: str, columns: Sequence[Column]) -> None:
    """A row for each contender of which a figure was measured; empty columns are left out."""
    entries = [entry["figures"] for entry in report["contenders"].values()]
    columns = [column for column in columns if any(column[1] in found for found in entries)]
    if not columns:
        return
    table = _table(title, [head for head, _, _ in columns])
    for name, entry in report["contenders"].items():
        cells = [cell(entry["figures"].get(figure), form) for _, figure, form in columns]
        if any(cells):
            table.add_row(_label(name, entry), *cells)
    console.print(table)


def _print_recovery(console: Console, report: Report) -> None:
    counts = report["settings"]["records"]
    heads = ["the base\ns"]
    for count in counts:
        heads += [f"and {count} more\ns", "/ bound", "in 19 of 20"]
    table = _table("Recovery of a log; bound: base, plain reads, updates", heads)
    for name, ratios in report["recovery"].items():
        entry = report["contenders"][name]
        cells = [cell(entry["figures"].get("recover_0_s"), "s")]
        for count in counts:
            cells.append(cell(entry["figures"].get(f"recover_{count}_s"), "s"))
            cells += _ratio_cells(ratios.get(str(count)))
        table.add_row(_label(name, entry), *cells)
    if table.row_count:
        console.print(table)


def _print_against(console: Console, report: Report) -> None:
    """The present code over that of before: what differs by more than its spread is marked."""
    figures = list(dict.fromkeys(name for row in report["against"].values() for name in row))
    names = list(report["against"])
    table = _table("Now / before", [report["contenders"][name]["label"] for name in names])
    for figure in figures:
        cells = []
        for name in names:
            found = report["against"][name].get(figure)
            low, high = found["interval"] if found and found["rounds"] >= ROUNDS_MIN else (0, 2)
            style = "bold red" if low > 1 else "green" if high < 1 else ""
            cells.append(Text(" ".join(_ratio_cells(found)), style))
        table.add_row(figure.removesuffix("_s").replace("_", " "), *cells)
    if table.row_count:
        console.print(table)


def cell(found: dict[str, Any] | None, form: str) -> str:
    """A figure as `form` says: which of it ("p99", "interval" or the median), and in which unit."""
    if found is None:
        return ""
    which, _, unit = form.rpartition(" ")
    scale, digits = {"s": (1, 3), "ms": (1e3, 2), "%": (1e2, 1), "MB": (1e-6, 1)}.get(
        unit, (1 / 2**20, 0)
    )
    sign = "+" if unit == "%" else ""
    values = found[which or "median"]
    row = values if isinstance(values, list) else [values]
    return " … ".join(f"{scale * value:{sign}.{digits}f}" for value in row)


def _when(settings: dict[str, Any]) -> str:
    every = settings["every"]
    return "every step" if every == 1 else f"every {every}th step"


def _ratio_cells(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["", ""]
    low, high = found["interval"]
    return [f"{found['ratio']:.2f}", f"{low:.2f} … {high:.2f}"]


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _label(name: str, entry: dict[str, Any]) -> Text:
    return Text(entry["label"], "bold green" if name.startswith("everstep") else "")


# The picture

OURS, LOGS, PEERS, FLOOR, INK = "#0b6e63", "#63c5a4", "#7f8fa6", "#c9ced6", "#333333"
PANELS: tuple[tuple[str, str, float, bool], ...] = (
    ("slowdown of the loop (%)", "slowdown", 100, False),
    ("the call (ms, log)", "call_s", 1000, True),
    ("peak memory (MiB)", "memory_bytes", 2**-20, False),
    ("bytes of a save (MB)", "bytes", 1e-6, False),
    ("until finished, training beside it (s)", "finished_s", 1, False),
    ("until durable, by itself (s)", "durable_s", 1, False),
    ("restore, cold disk (s)", "restore_s", 1, False),
)


def draw(report: Report, path: Path) -> None:
    """Write the figures as a picture (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = {
        name: entry
        for name, entry in report["contenders"].items()
        if name != BASELINE.name and entry["figures"]
    }
    figure, grid = pyplot.subplots(2, 4, figsize=(18, 8), layout="constrained")
    panels = [*grid.flatten()]
    for panel, (title, name, scale, is_log) in zip(panels, PANELS, strict=False):
        _draw_bars(panel, entries, title, name, scale, is_log)
        if panel not in (panels[0], panels[4]):
            panel.set_yticklabels([])
    _draw_recovery(panels[7], report)
    figure.suptitle(_title(report), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_bars(
    panel: Any, entries: dict[str, Any], title: str, name: str, scale: float, is_log: bool
) -> None:
    """One bar per contender, with a whisker over its interval."""
    for row, (who, entry) in enumerate(entries.items()):
        found = entry["figures"].get(name)
        if found is None:
            continue
        middle, (low, high) = scale * found["median"], (scale * v for v in found["interval"])
        panel.barh(row, middle, color=_colour(who), height=0.62)
        whisker = [[max(0, middle - low)], [max(0, high - middle)]]
        panel.errorbar(middle, row, xerr=whisker, color=INK, lw=1, capsize=2)
        weight = "bold" if who.startswith("everstep") else "normal"
        panel.annotate(
            f"{middle:.3g}",
            (max(middle, high), row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            fontweight=weight,
        )
    if found := entries.get(PLAIN.name, {}).get("figures", {}).get(name):
        panel.axvline(scale * found["median"], color=INK, lw=0.8, ls=":")
    panel.set_yticks(range(len(entries)), [entry["label"] for entry in entries.values()])
    panel.tick_params(axis="y", length=0, labelsize=9)
    panel.set_ylim(len(entries) - 0.5, -0.5)
    if is_log:
        panel.set_xscale("log")
    panel.margins(x=0.18)
    _dress(panel, title)
    panel.spines["left"].set_visible(False)


def _draw_recovery(panel: Any, report: Report) -> None:
    """Restores of a log by the number of records, below the line that they should keep to."""
    for name in report["recovery"]:
        figures = report["contenders"][name]["figures"]
        counts = [0, *report["settings"]["records"]]
        rows = [figures[f"recover_{count}_s"] for count in counts]
        middle = [row["median"] for row in rows]
        whiskers = [
            [m - row["interval"][0] for m, row in zip(middle, rows, strict=True)],
            [row["interval"][1] - m for m, row in zip(middle, rows, strict=True)],
        ]
        bounds = [middle[0], *(figures[f"bound_{count}_s"]["median"] for count in counts[1:])]
        label = report["contenders"][name]["label"]
        colour = _colour(name)
        panel.errorbar(counts, middle, whiskers, fmt="o-", color=colour, capsize=2, label=label)
        panel.plot(counts, bounds, ":", color=INK, lw=1.2, label="base, plain reads, updates")
    if not report["recovery"]:
        panel.set_visible(False)
        return
    panel.set_xlim(0)
    panel.set_ylim(0)
    panel.set_xlabel("records after the base", fontsize=9)
    panel.legend(frameon=False, fontsize=8, loc="upper left")
    _dress(panel, "restore of a log (s)")


def _dress(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=10, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="x", color="#eeeeee")
    panel.set_axisbelow(True)


def _colour(name: str) -> str:
    if name.endswith(BEFORE):
        return "#d7a15a"
    if name.startswith(LOG.name):
        return LOGS
    if name.startswith("everstep"):
        return OURS
    return FLOOR if name == PLAIN.name else PEERS


def _title(report: Report) -> str:
    machine, settings = report["machine"], report["settings"]
    sizes = [entry["figures"].get("state_bytes") for entry in report["contenders"].values()]
    size = max((found["median"] for found in sizes if found), default=0) / 1e6
    return (
        f"everstep beside its peers: {size:.3g} MB of state, a save at {_when(settings)}, medians "
        f"of {settings['rounds']} rounds, whiskers: where 19 of 20 such benches lie. "
        f"Dotted: plain I/O\n{machine['processor']}; {machine['file system']}; "
        f"torch {machine['torch']}"
    )
