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
        settings = report.settings
        title = f"Kills by SIGKILL (strategy {settings.strategy}, seed {settings.seed})"
        table = Table(title=title, title_justify="left")
        rows = [_kill_cells(*row) for row in enumerate(report.kills, 1)]
        for name in rows[0]:
            table.add_column(name, justify="left" if name == "hit in" else "right")
        for row in rows:
            table.add_row(*row.values())
        console.print(table)
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


def _kill_cells(number: int, kill: Kill) -> dict[str, str]:
    is_log = kill.base not in (None, kill.restored)
    replay = f" ({kill.base} + {text.plural(kill.records or 0, 'record')})" if is_log else ""
    return {
        "kill": str(number),
        "at": text.seconds(kill.at_s),
        "in step": "–" if kill.step is None else str(kill.step),
        "hit in": kill.phase,
        "saves in flight": ", ".join(map(str, kill.saving)) or "none",
        "returned": str(kill.returned),
        "restored": "–" if kill.restored is None else f"{kill.restored}{replay}",
        "lost": "–" if kill.lost is None else str(kill.lost),
        "again after": "killed before" if kill.again_s is None else text.seconds(kill.again_s),
    }
