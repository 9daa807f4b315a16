"""The section about several ranks: one FSDP2 run, saved by each contender in turn, and loaded on
twice as many ranks, and from twice as many.

Loads are of processes that did nothing before, from a cold cache; all tensors are compared. A peer
that fails at something is reported with what it said, and the others go on.
"""

from typing import Any

from rich.console import Console
from rich.table import Table

from everstep.cli.bench import report, tables
from everstep.cli.bench.driver import WorkerFailed
from everstep.cli.bench.gang import Gang
from everstep.cli.bench.measuring import TIMEOUT_S, Asked, Bench
from everstep.cli.bench.plan import BASELINE, CONTENDERS, OURS, ranked, rotated

SECTION = "ranks"
SCHEMA = 2
Report = dict[str, Any]


def chosen(only: list[str]) -> list[str]:
    """Who runs: of those that know of ranks, what was asked for (or all) and is installed."""
    return [name for name in ranked(only) if CONTENDERS[name].is_installed]


class RanksBench(Bench):
    """Blocks and single saves as with one process, of `--ranks` each; then the loads."""

    settings = ("ranks", "steps", "rounds", "size", "every")

    def _sections(self) -> None:
        few, many = self._args.ranks, 2 * self._args.ranks
        self._saved: dict[tuple[str, int], dict[str, Any]] = {}
        self.raw["loads"] = []
        self._start()
        for number in range(self._args.rounds):
            self._tell(f"round {number + 1} of {self._args.rounds}")
            self._round(number)
        loaded = [
            name for name in self._names if name != BASELINE and not CONTENDERS[name].loads_as
        ]
        for name in loaded:
            self._try(name, self._keep, few, self._driver(name))
        self._stop()  # what is loaded must come from the disk
        for name in loaded:
            self._tell(f"{CONTENDERS[name].label}: a save of {many} ranks")
            self._try(name, self._save_on, many)
        for number in range(self._args.rounds):
            for before, now in rotated([(many, few), (few, many)], number):
                self._tell(f"loads, round {number + 1} of {self._args.rounds}: {before} to {now}")
                for name in rotated(loaded, number):
                    self._load(name, before, now, number)

    def _new(self, name: str, every: int, settings: dict[str, Any]) -> Asked:
        return Gang(self._root / f"{name}-{every}", settings, self._args.ranks)

    def _missing(self) -> list[str]:
        return [name for name in ranked(self._args.only) if not CONTENDERS[name].is_installed]

    def _keep(self, name: str, ranks: int, asked: Asked) -> None:
        """Save what is loaded later; where it is, and a digest of it."""
        self._saved[name, ranks] = asked.ask("keep_one", TIMEOUT_S)

    def _save_on(self, name: str, ranks: int) -> None:
        gang = Gang(self._root / f"{name}-on-{ranks}", self._told(name, 1), ranks)
        try:
            gang.ask("warm_up", TIMEOUT_S)
            self._keep(name, ranks, gang)
        finally:
            gang.stop()

    def _load(self, name: str, before: int, now: int, number: int) -> None:
        """What a contender fails at here, it fails at alone: other loads of it are measured."""
        place = {"name": name, "from": before, "to": now}
        has_failed = any(
            place.items() <= row.items() for row in self.raw["loads"] if "failed" in row
        )
        if (name, before) not in self._saved or has_failed:
            return
        root = self._root / f"{name}-{before}-to-{now}-{number}"
        gang = Gang(root, self._told(name, 1), now)
        try:
            reply = gang.ask("load", TIMEOUT_S, **self._saved[name, before])
        except WorkerFailed as error:
            self._tell(f"{CONTENDERS[name].label}, {before} to {now} ranks, failed at {error}")
            reply = {"failed": str(error)}
        finally:
            gang.stop()
        self.raw["loads"].append({**place, "round": number, **reply})


def summarise(raw: dict[str, Any]) -> Report:
    """The report: that of one process without what belongs there only, and the loads."""
    found = report.summarise(raw)
    for name, entry in found["contenders"].items():
        entry["note"] = CONTENDERS[name].ranks_note or entry["note"]
    dropped = ("aims", "tensors", "recovery", "spread_recovery")
    return {
        "section": SECTION,
        **{key: value for key, value in found.items() if key not in dropped},
        "schema": SCHEMA,
        "loads": {name: _loads(raw, name) for name in found["contenders"] if name != BASELINE},
    }


def _loads(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """By what was loaded on what ("4 to 2")."""
    rows = [row for row in raw["loads"] if row["name"] == (CONTENDERS[name].loads_as or name)]
    found = {}
    for key in sorted({f"{row['from']} to {row['to']}" for row in rows}, reverse=True):
        these = [row for row in rows if f"{row['from']} to {row['to']}" == key]
        well = [row for row in these if "failed" not in row]
        found[key] = {
            "seconds": report.spread([row["seconds"] for row in well]),
            "equal": bool(well) and all(row["equal"] for row in well),
            "cache": next((row["cache"] for row in well), None),
            "failed": next((row["failed"] for row in these if "failed" in row), None),
        }
    return found


def show(summary: Report, console: Console) -> None:
    """Print the report."""
    console.print(tables.heading(summary))
    for every in summary["settings"]["every"]:
        console.print(tables.training_table(summary, every))
    console.print(_saves_table(summary))
    console.print(_loads_table(summary))
    for line in _remarks(summary):
        console.print(line, style="yellow" if "failed" in line or "DIFFERS" in line else "dim")


def _saves_table(summary: Report) -> Table:
    """Single saves, beside everstep's."""
    ours = summary["contenders"].get(OURS)
    table = tables.new_table(
        f"One save of {summary['settings']['ranks']} ranks, no training beside it"
    )
    heads = (
        "until finished\ns",
        "until durable\ns",
        "/ everstep",
        "fsyncs\nby itself",
        "files",
        "MB",
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name, entry in summary["contenders"].items():
        if alone := entry["alone"]:
            table.add_row(
                tables.label_of(name, entry),
                tables.seconds_of(alone["finished_s"]),
                tables.seconds_of(alone["durable_s"])
                + ("" if alone["durable_by_itself"] else " *"),
                tables.over(
                    alone["durable_s"], ours and ours["alone"] and ours["alone"]["durable_s"]
                ),
                entry["syncs"],
                str(alone["files"]),
                f"{alone['bytes'] / 1e6:.1f}",
            )
    return table


def _loads_table(summary: Report) -> Table:
    """Loads on other ranks, beside everstep's."""
    loads = {name: rows for name, rows in summary["loads"].items() if rows}
    keys = sorted({key for rows in loads.values() for key in rows}, reverse=True)
    table = tables.new_table("Loads on other ranks, new processes, cold cache")
    for key in keys:
        for head in (f"{key} ranks\nmedian, s", "min … max", "/ everstep"):
            table.add_column(head, justify="right", no_wrap=True)
    for name, rows in loads.items():
        if not CONTENDERS[name].loads_as:
            cells = [_load_cells(rows.get(key), loads.get(OURS, {}).get(key)) for key in keys]
            entry = summary["contenders"][name]
            table.add_row(tables.label_of(name, entry), *(cell for row in cells for cell in row))
    return table


def _load_cells(row: dict[str, Any] | None, ours: dict[str, Any] | None) -> list[str]:
    if row is None or row["failed"]:
        return ["failed" if row else "", "", ""]
    seconds = row["seconds"]
    return [
        tables.seconds_of(seconds) + ("" if row["equal"] else " DIFFERS"),
        f"{seconds['min']:.3f} … {seconds['max']:.3f}",
        tables.over(seconds, ours and ours["seconds"]),
    ]


def _remarks(summary: Report) -> list[str]:
    lines = tables.contender_remarks(summary)
    cache = "no cold cache"
    for name, loads in summary["loads"].items():
        if other := CONTENDERS[name].loads_as:
            same = CONTENDERS[other].label
            lines.append(f"{CONTENDERS[name].label}: loads are those of {same}, measured once")
            continue
        for key, row in loads.items():
            cache = row["cache"] or cache
            if row["failed"]:
                lines.append(f"{CONTENDERS[name].label}, {key} ranks, failed: {row['failed']}")
            elif not row["equal"]:
                lines.append(f"{CONTENDERS[name].label}, {key} ranks: what was loaded DIFFERS")
    lines.append(tables.SYNC_REMARK)
    lines.append(
        "times are of the slowest rank; slowdown: a block's time over that of the neighbouring "
        f"blocks without checkpoints. {tables.PROCESSOR_REMARK}; of all ranks together. "
        "loads: into fresh runs of new processes, "
        f"{cache} before each; every loaded tensor was gathered and compared"
    )
    return lines
