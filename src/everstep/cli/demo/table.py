"""The report of a demo as tables on a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from everstep.cli.demo.report import Kill, Report, Spread, lost_max

_MEGA = 1e6


def show(report: Report, console: Console) -> None:
    """Print the kills, the costs and the verdict."""
    console.print()
    if report.kills:
        console.print(_kill_table(report))
    console.print(_cost_table(report))
    for line in verdict(report):
        console.print(line)


def verdict(report: Report) -> list[Text]:
    """One line per comparison, and one per problem."""
    lines = []
    if report.ok:
        good = [
            f"{len(report.kills)} kills, {_promise(report.settings.every)}: "
            f"{sum(kill.lost or 0 for kill in report.kills)} lost in all",
            f"{report.losses_compared} losses of {report.settings.steps} steps "
            f"({report.losses_again} computed again after kills) equal bit for bit",
            f"final state equal: {report.state['tensors']} tensors of "
            f"{report.state['bytes'] / _MEGA:.1f} MB and {report.state['values']} other values",
        ]
        lines += [Text(f"✓ {text}", style="green") for text in good]
    lines += [Text(f"✗ {problem}", style="bold red") for problem in report.problems]
    if not report.ok:
        lines.append(Text("The comparison FAILED.", style="bold red"))
    if len(report.kills) < report.kills_planned:
        text = f"Only {len(report.kills)} of {report.kills_planned} kills came before the end."
        lines.append(Text(text, style="yellow"))
    return lines


def _promise(every: int) -> str:
    """What a kill may cost."""
    if every == 1:
        return "at most one step lost at each"
    return (
        f"at most {every + 1} steps lost at each (those since the last checkpoint, of which there "
        f"is one at every {every}th step, or since the one before it while that is copied)"
    )


def _kill_table(report: Report) -> Table:
    title = f"Kills by SIGKILL (strategy {report.settings.strategy}, seed {report.settings.seed})"
    table = Table(title=title, title_justify="left")
    is_log = report.is_log
    for name in ("kill", "at", "in step"):
        table.add_column(name, justify="right")
    table.add_column("hit in")
    table.add_column("saves in flight")
    restored = "restored = base + records" if is_log else "restored"
    for name in ("step() returned", restored, "lost"):
        table.add_column(name, justify="right")
    table.add_column("training again after", justify="right", no_wrap=True)
    for number, kill in enumerate(report.kills, 1):
        table.add_row(str(number), *_kill_cells(kill, is_log, report.settings.every))
    return table


def _kill_cells(kill: Kill, is_log: bool, every: int) -> list[Text | str]:
    lost: Text | str = "–"
    if kill.lost is not None:
        is_kept = kill.lost <= lost_max(every, kill.returned or 0)
        lost = Text(str(kill.lost), style="green" if is_kept else "bold red")
    return [
        f"{kill.at_s:.1f} s",
        _number(kill.step),
        kill.phase,
        _saves(kill.saves),
        _number(kill.returned),
        _number(kill.restored) + (_sum(kill) if is_log else ""),
        lost,
        _again(kill),
    ]


def _sum(kill: Kill) -> str:
    """Of a restored step: " = 40 + 7"."""
    return f" = {kill.base} + {kill.records}" if kill.records is not None else ""


def _again(kill: Kill) -> str:
    if kill.again_s is None:
        return "killed before"
    restore = f", restore {_time(kill.restore_s)}" if kill.restore_s is not None else ""
    return f"{_time(kill.again_s)}{restore}"


def _saves(saves: dict[int, str]) -> str:
    """{2: "writing", 3: "writing", 4: "copying"} → "2, 3 writing · 4 copying"."""
    by_level: dict[str, list[str]] = {}
    for step, level in saves.items():
        by_level.setdefault(level, []).append(str(step))
    groups = [f"{', '.join(steps)} {level}" for level, steps in by_level.items()]
    return " · ".join(groups) or "none"


def _cost_table(report: Report) -> Table:
    model = f"{report.parameters:,} parameters, {report.settings.threads} threads"
    title = f"A checkpoint at {report.when}, strategy {report.settings.strategy}: {model}"
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in cost_rows(report):
        table.add_row(name, value)
    return table


def cost_rows(report: Report) -> list[tuple[str, str]]:
    """What checkpoints cost, as names and values."""
    rows = [
        ("a step, checkpoint included", _spread(report.step_s)),
        ("a step of the run without checkpoints", _spread(report.plain_step_s)),
        ("stall in step()", _spread(report.stall_s)),
        ("update held for a copy", _spread(report.held_s)),
        ("durable after step()", _spread(report.durable_s)),
    ]
    return [*rows, *_byte_rows(report), *_restart_rows(report)]


def _byte_rows(report: Report) -> list[tuple[str, str]]:
    """What a step takes on the disk; of a log apart for bases and records."""
    state, record = report.bytes.get("state"), report.bytes.get("record")
    if record is None:
        return [("bytes of a checkpoint", f"{state.mean / _MEGA:.1f} MB")] if state else []
    rows = []
    if state:
        rows.append(("bytes of a base", f"{state.mean / _MEGA:.1f} MB, mean of {state.count}"))
    share = f", {record.mean / state.mean:.2f} of a base" if state else ""
    text = f"{record.mean / _MEGA:.1f} MB, mean of {record.count}{share}"
    return [*rows, ("bytes of a record", text)]


def _restart_rows(report: Report) -> list[tuple[str, str]]:
    is_replayed = report.is_log or report.settings.strategy == "spread"
    replay = ", records replayed" if is_replayed else ""
    names = {
        "again_s": "process start to training again",
        "imports_s": "  of that importing torch",
        "restore_s": f"  of that everstep's restore, verified{replay}",
    }
    found = {
        name: Spread.of(
            getattr(kill, field) for kill in report.kills if getattr(kill, field) is not None
        )
        for field, name in names.items()
    }
    return [(name, _spread(spread)) for name, spread in found.items() if spread]


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "not measured"
    return f"{_time(spread.median)} median, {_time(spread.p99)} p99, {_time(spread.max)} max"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if abs(seconds) < 0.9995 else f"{seconds:.2f} s"


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)
