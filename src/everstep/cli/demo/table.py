"""The report of a demo on a terminal: a table of kills, and the verdict."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from everstep.cli import text
from everstep.cli.demo.report import Kill, Report


def show(report: Report, console: Console) -> None:
    """Print the kills and the verdict."""
    console.print()
    if report.kills:
        console.print(_kill_table(report))
    for line in verdict(report):
        console.print(line)


def verdict(report: Report) -> list[Text]:
    """One line per comparison, and one per problem."""
    if not report.ok:
        lines = [f"✗ {problem}" for problem in report.problems]
        return [Text(line, style="bold red") for line in (*lines, "The comparison FAILED.")]
    lost_max = text.plural(report.settings.lost_max, "step")
    good = [
        f"{len(report.kills)} kills, at most {lost_max} lost at each: {report.lost} lost in all",
        f"{report.losses_compared} losses of {report.settings.steps} steps "
        f"({report.losses_again} computed again after kills) equal bit for bit",
        f"final state equal: {report.state['tensors']} tensors of "
        f"{text.size(report.state['bytes'])} and {report.state['values']} other values",
    ]
    return [Text(f"✓ {line}", style="green") for line in good]


def _kill_table(report: Report) -> Table:
    title = f"Kills by SIGKILL (strategy {report.settings.strategy}, seed {report.settings.seed})"
    table = Table(title=title, title_justify="left")
    names = "kill", "at", "in step", "hit in", "saves in flight", "returned", "restored"
    for name in (*names, "lost", "again after"):
        table.add_column(name, justify="left" if name == "hit in" else "right")
    for number, kill in enumerate(report.kills, 1):
        table.add_row(str(number), *_kill_cells(kill))
    return table


def _kill_cells(kill: Kill) -> list[str]:
    is_log = kill.base not in (None, kill.restored)
    replay = f" ({kill.base} + {text.plural(kill.records or 0, 'record')})" if is_log else ""
    return [
        text.seconds(kill.at_s),
        "–" if kill.step is None else str(kill.step),
        kill.phase,
        ", ".join(map(str, kill.saving)) or "none",
        str(kill.returned),
        "–" if kill.restored is None else f"{kill.restored}{replay}",
        "–" if kill.lost is None else str(kill.lost),
        "killed before" if kill.again_s is None else text.seconds(kill.again_s),
    ]
