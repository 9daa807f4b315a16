"""What a bench found: a report as data, and its tables."""

import argparse
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.bench import BEFORE, Bench, Contender
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
