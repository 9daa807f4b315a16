"""everstep top: what the keeper of a store is doing, while a run goes on."""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.target import add_words, split_words
from everstep.errors import Missing
from everstep.keeper.home import status_of

_COUNTERS = ("saves", "skips", "failures", "stall_seconds", "copied", "given_up", "bytes")
"""Of figures: those that only grow."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds (1)")
    parser.add_argument(
        "--openmetrics",
        metavar="FILE",
        help="keep a textfile for Prometheus' node exporter, in place of the view",
    )


def run(args: argparse.Namespace) -> Answer:
    """Show it again and again until Ctrl-C, or the keeper has ended; once with --json."""
    disk, _ = split_words(args.words, 0)
    path = str(disk.root)
    if args.json:
        return Answer(status(path), ())
    if args.openmetrics:
        file = Path(args.openmetrics)
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        for found in _snapshots(path, args.interval):
            draft.write_text("".join(f"{line}\n" for line in openmetrics(found)))
            draft.replace(file)  # a reader sees this one or the one before it
    else:
        _watch(path, args.interval)
    return Answer({}, ())


def status(store: str) -> dict[str, Any]:
    """What the keeper of the store on this node says of itself. Raises Missing where none runs."""
    said = status_of(store)
    if said is None:
        raise Missing(
            f"looking at {store}: no keeper of it runs on this node, so that nothing is being "
            f"saved. `everstep ls {store}` shows what is there"
        )
    return {"store": store, "time": time.time(), **said}


def _snapshots(store: str, interval_s: float) -> Iterator[dict[str, Any]]:
    yield status(store)
    with contextlib.suppress(Missing):  # the run has ended
        while True:
            time.sleep(interval_s)
            yield status(store)


def _watch(store: str, interval_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(refresh_per_second=4) as live:
        for found in _snapshots(store, interval_s):
            live.update(Text("\n".join(lines(found))))


def lines(found: dict[str, Any]) -> list[str]:
    """The view."""
    now = found["time"]
    memory = sum(trainer["memory_bytes"] for trainer in found["trainers"])
    lives = sum(trainer["lives"] for trainer in found["trainers"])
    head = f"{found['store']}   keeper {found['pid']}   {text.plural(lives, 'trainer')}"
    shown = [f"{head}   {text.size(memory)} of memory", ""]
    rows = [_tier_row(tier, now) for tier in found["tiers"]]
    titles = ("level", "newest", "age", "waiting", "speed", "given up", "place")
    shown += [*text.table(titles, rows, ("newest", "age", "waiting", "speed", "given up")), ""]
    saves = [save for trainer in found["trainers"] for save in trainer["saves"]]
    rows = [[str(save["step"]), save["level"], text.size(save["bytes"])] for save in saves]
    shown += text.table(("step", "is", "bytes"), rows, ("step", "bytes")) if rows else ["no saves"]
    for trainer in found["trainers"]:
        if figures := trainer["figures"]:
            said = {key.replace("_seconds", "_s"): value for key, value in figures.items()}
            shown += ["", f"trainer {trainer['pid']}: {text.settings(said)}"]
    problems = [f"{tier['level']}: {tier['problem']}" for tier in found["tiers"] if tier["problem"]]
    return [*shown, *map(text.clean, problems)]


def _tier_row(tier: dict[str, Any], now: float) -> list[str]:
    speed = tier["bytes_per_s"]
    return [
        tier["level"],
        "" if tier["newest"] is None else str(tier["newest"]),
        "" if tier["newest_at"] is None else text.seconds(max(0.0, now - tier["newest_at"])),
        str(tier["waiting"]),
        text.speed(speed) if speed else "",
        str(tier["given_up"]),
        text.clean(tier["place"]),
    ]


def openmetrics(found: dict[str, Any]) -> Iterator[str]:
    """One snapshot as OpenMetrics text. Of two runs of a store, of which one has ended, its tier
    has the figures of the later one."""
    samples: dict[tuple[str, str], float] = {}
    for trainer in found["trainers"]:
        figures = {"memory_bytes": trainer["memory_bytes"], **trainer["figures"]}
        figures["saves_in_flight"] = len(trainer["saves"])
        samples |= {(key, f'pid="{trainer["pid"]}"'): value for key, value in figures.items()}
    for tier in sorted(found["tiers"], key=lambda tier: tier["newest_at"] or 0.0):
        values = {key: value for key, value in tier.items() if isinstance(value, int | float)}
        if (at := values.pop("newest_at", None)) is not None:
            values["newest_age_seconds"] = max(0.0, found["time"] - at)
        samples |= {(key, f'level="{tier["level"]}"'): value for key, value in values.items()}
    for name in sorted({name for name, _ in samples}):
        is_counter = name in _COUNTERS
        yield f"# TYPE everstep_{name} {'counter' if is_counter else 'gauge'}"
        for (each, label), value in samples.items():
            if each == name:
                yield f"everstep_{name}{'_total' * is_counter}{{{label}}} {value}"
    yield "# EOF"
