"""The bench's report as tables for a terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from everstep.cli.bench.plan import BASELINE, FLOOR, LOG, OURS, SPREAD

_STYLES = {
    OURS: "bold green",
    LOG: "bold green",
    SPREAD: "bold green",
    BASELINE: "dim",
    FLOOR: "dim",
}
SYNC_REMARK = "* with an fsync of its files and directories made afterwards by the bench"
PROCESSOR_REMARK = (
    "processor: user and system time of the trainer with its threads (spinning ones too) and of "
    "all processes that work for it, until a block's saves are finished, more than of the same "
    "neighbours"
)
Report = dict[str, Any]


def show(report: Report, console: Console) -> None:
    """Print the whole report."""
    console.print(heading(report))
    for every in report["settings"]["every"]:
        console.print(training_table(report, every))
    console.print(_single_table(report))
    if recovery := report["recovery"]:
        console.print(_recovery_table(recovery))
    if restores := report["spread_recovery"]:
        console.print(_spread_recovery_table(restores["restores"]))
    if tensors := report["tensors"]:
        console.print(_tensors_line(tensors))
    if report["aims"]:
        console.print(_aims_table(report["aims"]))
    for line in _remarks(report):
        console.print(line, style="yellow" if "failed" in line or "DIFFERS" in line else "dim")


def heading(report: Report) -> str:
    """Model, rounds, machine."""
    settings = report["settings"]
    size = (report["state_bytes"] or 0) / 1e6
    return (
        f"\n[bold]everstep bench[/]  model {settings['size']}, {size:.1f} MB of state, "
        f"{settings['rounds']} rounds of {settings['steps']} steps, "
        f"{report['seconds'] / 60:.1f} min\n{_machine(report)}"
    )


def _machine(report: Report) -> str:
    machine = report["machine"]
    words = ", ".join(f"{key} {value}" for key, value in machine.items() if key != "processor")
    return f"[dim]{machine['processor']}; {words}[/]\n"


def show_recovery(report: Report, console: Console) -> None:
    """Print the section about restores of a log by itself."""
    console.print(
        f"\n[bold]everstep bench --recovery[/]  model {report['settings']['size']}, "
        f"{report['base_s']['count']} restores of each, {report['seconds'] / 60:.1f} min\n"
        f"{_machine(report)}"
    )
    console.print(_recovery_table(report))
    console.print(_recovery_remark(report), style="dim")


def training_table(report: Report, every: int) -> Table:
    """What saves at every so many steps cost the loop."""
    title = "a save at every step" if every == 1 else f"a save at every {every}th step"
    table = new_table(f"Training, {title}")
    for column in ("stall in the call\nmedian, ms", "p99\nms", "step\ns", "slowdown\nmedian"):
        table.add_column(column, justify="right")
    table.add_column("min … max", justify="right", style="dim", no_wrap=True)
    columns = ("processor more\nms a step", "until finished\ns", "memory more\nMiB", "MB a save")
    for column in columns:
        table.add_column(column, justify="right")
    for name, entry in report["contenders"].items():
        if figures := entry["every"].get("0" if name == BASELINE else str(every)):
            size = f"{entry['alone']['bytes'] / 1e6:.1f}" if entry["alone"] else ""
            table.add_row(label_of(name, entry), *_training_cells(figures), size)
            if entry["bases"] and every == report["settings"]["every"][0]:
                table.add_row(*_base_cells(report, entry["bases"]), style="dim")
    return table


def _training_cells(figures: dict[str, Any]) -> list[str]:
    stall, slowdown = figures["stall_ms"], figures["slowdown"]
    processor = figures["processor_more_ms"]
    return [
        f"{stall['median']:.2f}" if stall else "",
        f"{stall['p99']:.2f}" if stall else "",
        f"{figures['step_s']['median']:.3f}",
        f"{100 * slowdown['median']:+.1f} %" if slowdown else "",
        f"{100 * slowdown['min']:+.1f} … {100 * slowdown['max']:+.1f}" if slowdown else "",
        f"{processor['median']:+.1f}" if processor else "",
        seconds_of(figures["finished_s"]),
        f"{figures['memory_over_baseline_bytes'] / 2**20:+.0f}" if stall else "",
    ]


def _base_cells(report: Report, bases: dict[str, Any]) -> list[str]:
    """Of a log's steps with a base, which are apart from the others."""
    recovery = report["recovery"]
    figures = {**bases, "stall_ms": bases["stall_ms"] and {**bases["stall_ms"], "p99": 0.0}}
    stall, _, *rest, _ = _training_cells({**figures, "memory_over_baseline_bytes": 0})
    size = f"{recovery['base_bytes'] / 1e6:.1f}" if recovery else ""
    return ["  its bases", stall, "", *rest, "", size]


def _recovery_table(recovery: dict[str, Any]) -> Table:
    title = (
        f"Recovery of a log: a base of {recovery['base_bytes'] / 1e6:.1f} MB, records of "
        f"{recovery['record_bytes'] / 1e6:.1f} MB"
    )
    table = new_table(title)
    columns = (
        "restore\nmedian, s", "min … max", "at most\ns", "/ at most", "95%", "in each round"
    )  # fmt: skip
    for column in (*columns, "/ bytes and\nupdates alone"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in recovery["restores"]:
        seconds = row["seconds"]
        label = f"{row['records']} record{'' if row['records'] == 1 else 's'} after the base"
        table.add_row(
            Text(label + ("" if row["equal"] else " DIFFERS"), "" if row["equal"] else "bold red"),
            f"{seconds['median']:.3f}",
            f"{seconds['min']:.3f} … {seconds['max']:.3f}",
            f"{row['at_most_s']:.3f}",
            f"{row['over']:.2f}",
            "{:.2f} … {:.2f}".format(*row["over_interval"]),
            "{median:.2f} ({min:.2f} … {max:.2f})".format(**row["over_rounds"]),
            f"{row['over_bytes']:.2f}",
        )
    return table


def _spread_recovery_table(rows: list[dict[str, Any]]) -> Table:
    table = new_table("Restore of a spread checkpoint, its window given, beside a whole state")
    for column in ("restore\nmedian, s", "min … max", "/ whole\nstate", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        seconds, steps = row["seconds"], row["window"]
        label = "whole state (full)" if steps == 1 else f"spread over {steps} steps"
        table.add_row(
            Text(label + ("" if row["equal"] else " DIFFERS"), "" if row["equal"] else "bold red"),
            f"{seconds['median']:.3f}",
            f"{seconds['min']:.3f} … {seconds['max']:.3f}",
            f"{row['over']:.2f}",
            f"{row['bytes'] / 1e6:.1f}",
        )
    return table


def _single_table(report: Report) -> Table:
    floor = report["contenders"][FLOOR]
    table = new_table("One save and one restore, no training beside it")
    for column in ("until finished\ns", "until durable\ns", "/ plain\nwrite"):
        table.add_column(column, justify="right")
    table.add_column("fsyncs\nby itself", no_wrap=True)
    for column in ("restore,\ncold cache, s", "/ plain\nread", "MB"):
        table.add_column(column, justify="right")
    for name, entry in report["contenders"].items():
        if alone := entry["alone"]:
            restore = entry["restore"]
            table.add_row(
                label_of(name, entry),
                seconds_of(alone["finished_s"]),
                seconds_of(alone["durable_s"]) + ("" if alone["durable_by_itself"] else " *"),
                over(alone["durable_s"], floor["alone"] and floor["alone"]["durable_s"]),
                entry["syncs"],
                seconds_of(restore and restore["seconds"]),
                over(
                    restore and restore["seconds"], floor["restore"] and floor["restore"]["seconds"]
                ),
                f"{alone['bytes'] / 1e6:.1f}",
            )
    return table


def _aims_table(aims: list[dict[str, Any]]) -> Table:
    table = new_table("The aims")
    for column in ("aim", "measured", "", "of processor\ntimes"):
        table.add_column(column, justify="right")
    for aim in aims:
        mark = Text("met", "green") if aim["met"] else Text("missed", "bold red")
        limit, measured = _value(aim["limit"], aim), _value(aim["measured"], aim)
        processor = "" if aim["processor"] is None else _value(aim["processor"], aim)
        table.add_row(Text(aim["aim"]), f"≤ {limit}", measured, mark, processor)
    return table


def _tensors_line(tensors: dict[str, Any]) -> str:
    def ms(name: str) -> str:
        return f"{1000 * tensors[name]:.1f} ms"

    return (
        f"\n[bold]{tensors['tensors']:,} small tensors[/] ({tensors['bytes'] / 1e6:.1f} MB): "
        f"the call {ms('call_s')} (the first {ms('first_call_s')}), then until captured "
        f"{ms('call_to_captured_s')}, until durable {ms('captured_to_local_s')}; of that "
        f"plain write {ms('write_s')} and beside it digests {ms('digest_s')}, "
        f"the rest (table, manifest, their fsyncs) {ms('bookkeeping_s')}\n"
    )


def contender_remarks(report: Report) -> list[str]:
    """Who is missing, what is special about whom, and who failed at what."""
    lines = [f"missing, not measured: {label}" for label in report["missing"].values()]
    for entry in report["contenders"].values():
        if entry["note"]:
            lines.append(f"{entry['label']}: {entry['note']}")
        if entry["failed"]:
            lines.append(f"{entry['label']} failed: {entry['failed']}")
    return lines


def _remarks(report: Report) -> list[str]:
    lines = contender_remarks(report)
    cache = None
    for entry in report["contenders"].values():
        if entry["restore"]:
            cache = entry["restore"]["cache"]
            if not entry["restore"]["equal"]:
                lines.append(f"{entry['label']}: what was restored DIFFERS from what was saved")
    lines += _log_remarks(report)
    lines.append(SYNC_REMARK)
    lines.append(
        "slowdown: a block's time over that of the neighbouring blocks without checkpoints. "
        f"{PROCESSOR_REMARK}. "
        "memory: resident, with all its processes, more than without checkpoints. "
        f"restores: into a fresh run, {cache or 'no'} before each; every restored byte was compared"
    )
    return lines


def _log_remarks(report: Report) -> list[str]:
    lines = []
    spreads = report["spread_recovery"]
    if spreads and not all(row["equal"] for row in spreads["restores"]):
        lines.append(f"{SPREAD}: what was restored DIFFERS from what was saved")
    log = report["contenders"].get(LOG)
    if log and log["bases"] and log["bases"]["slowdown_with_bases"] is not None:
        mean, apart = log["bases"]["slowdown_with_bases"], log["bases"]["apart"]
        lines.append(f"{log['label']}: {100 * mean:+.1f} % with a base at every {apart}th step")
    if recovery := report["recovery"]:
        lines.append(_recovery_remark(recovery))
        if not all(row["equal"] for row in recovery["restores"]):
            lines.append(f"{LOG}: what was replayed DIFFERS from what was saved")
    return lines


def _recovery_remark(recovery: dict[str, Any]) -> str:
    base, first, later = (
        1000 * recovery[key]["median"] for key in ("base_s", "first_record_s", "record_s")
    )
    return (
        f"recovery, at most: {base:.0f} ms for the base, and to read a record (its manifest, "
        f"its bytes, verified, and clipped as in training) and update once {first:.0f} ms for "
        f"the first, whose memory is new, and {later:.0f} ms for each after it, each measured "
        f"by itself; 95%: of such benches (bootstrap); {recovery['cache']} before each"
    )


def new_table(title: str) -> Table:
    """An empty one, with a column for labels."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    return table


def label_of(name: str, entry: dict[str, Any]) -> Text:
    """A contender's, with the version of what is not torch's or ours."""
    shown = entry["version"] if name.startswith(("torchs", "torch_")) else ""
    label = Text(entry["label"], _STYLES.get(name, ""))
    return label.append(f" {shown}", "dim") if shown else label


def seconds_of(values: dict[str, float] | None) -> str:
    """The median; nothing of what was not measured."""
    return f"{values['median']:.3f}" if values else ""


def over(values: dict[str, float] | None, floor: dict[str, float] | None) -> str:
    """The ratio of the medians."""
    return f"{values['median'] / floor['median']:.2f}" if values and floor else ""


def _value(value: float, aim: dict[str, Any]) -> str:
    match aim["unit"]:
        case "share":
            return f"{100 * value:.1f} %"
        case "ms":
            return f"{value:.2f} ms"
        case _:
            return f"{value:.2f}"
