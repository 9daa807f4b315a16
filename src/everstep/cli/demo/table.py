"""The report of a demo as tables on a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from everstep.cli import text
from everstep.cli.demo.report import Kill, Report, median_of

_MEGA = 1e6


def show(report: Report, console: Console) -> None:
    """Print the kills, the costs and the verdict."""
    console.print()
    if report.kills:
        console.print(_kill_table(report))
    console.print(_cost_table(report))
    for line in verdict(report):
        console.print(line)
    if len(report.kills) < report.kills_planned:
        few = f"Only {len(report.kills)} of {report.kills_planned} kills came before the end."
        console.print(few, style="yellow")


def verdict(report: Report) -> list[Text]:
    """One line per comparison, and one per problem."""
    if not report.ok:
        lines = [f"✗ {problem}" for problem in report.problems]
        return [Text(line, style="bold red") for line in (*lines, "The comparison FAILED.")]
    good = [
        f"{len(report.kills)} kills, {_promise(report.settings.every)}: "
        f"{sum(kill.lost or 0 for kill in report.kills)} lost in all",
        f"{report.losses_compared} losses of {report.settings.steps} steps "
        f"({report.losses_again} computed again after kills) equal bit for bit",
        f"final state equal: {report.state['tensors']} tensors of "
        f"{report.state['bytes'] / _MEGA:.1f} MB and {report.state['values']} other values",
    ]
    return [Text(f"✓ {line}", style="green") for line in good]


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
    if report.is_log:
        title += "; restored: base + records"
    table = Table(title=title, title_justify="left")
    names = "kill", "at", "in step", "hit in", "saves in flight", "returned", "restored"
    for name in (*names, "lost", "again after", "its restore"):
        table.add_column(name, justify="left" if name == "hit in" else "right")
    for number, kill in enumerate(report.kills, 1):
        table.add_row(str(number), *_kill_cells(kill, report.is_log))
    return table


def _kill_cells(kill: Kill, is_log: bool) -> list[str]:
    replay = f" = {kill.base} + {kill.records}" if is_log and kill.records is not None else ""
    return [
        text.seconds(kill.at_s),
        "–" if kill.step is None else str(kill.step),
        kill.phase,
        ", ".join(map(str, kill.saving)) or "none",
        str(kill.returned),
        "–" if kill.restored is None else f"{kill.restored}{replay}",
        "–" if kill.lost is None else str(kill.lost),
        "killed before" if kill.again_s is None else text.seconds(kill.again_s),
        "–" if kill.restore_s is None else text.seconds(kill.restore_s),
    ]


def _cost_table(report: Report) -> Table:
    model = f"{report.parameters:,} parameters, {report.settings.threads} threads"
    title = f"A checkpoint at {report.when}, strategy {report.settings.strategy}: {model}; medians"
    table = Table(title=title, title_justify="left", show_header=False)
    kills = report.kills
    times = {
        "a step, checkpoint included": report.step_s,
        "a step of the run without checkpoints": report.plain_step_s,
        "durable after step()": report.durable_s,
        "process start to training again": median_of(k.again_s for k in kills if k.again_s),
        "  of that importing torch": median_of(k.imports_s for k in kills if k.imports_s),
        "  of that everstep's restore": median_of(k.restore_s for k in kills if k.restore_s),
    }
    for name, seconds in times.items():
        if seconds is not None:
            table.add_row(name, text.seconds(seconds))
    for kind, size in report.bytes.items():
        table.add_row(f"bytes of a {kind}", f"{size / _MEGA:.1f} MB")
    return table
