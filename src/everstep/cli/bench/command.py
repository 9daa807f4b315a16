"""`everstep bench`: checkpoints of every step, measured against other libraries on this machine."""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from everstep.cli import workload
from everstep.cli.bench import picture, ranks, report, simulated, tables
from everstep.cli.bench.driver import WorkerFailed
from everstep.cli.bench.machine import describe
from everstep.cli.bench.measuring import Bench, recover
from everstep.cli.bench.plan import OURS, PEERS, chosen
from everstep.cli.strategies import STRATEGIES, Strategy
from everstep.errors import Unavailable

_PLAIN_WIDTH = 136


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `everstep bench`."""
    add = parser.add_argument
    add("--steps", type=int, default=5, help="timed steps in a block (%(default)s)")
    add("--rounds", type=int, default=3, help="blocks of each contender (%(default)s)")
    add("--size", choices=("25m", "tiny"), default="25m", help="parameters of the model")
    add("--every", type=_intervals, default=[1, 10], help="steps between saves (1,10)")
    add("--only", type=_names, default=[], metavar="NAME,...", help=", ".join([*PEERS, OURS]))
    add("--strategy", type=_strategies, default=STRATEGIES, help="full,spread,log (default: all)")
    add("--base-every", type=int, default=50, help="steps that share a base's cost (%(default)s)")
    far = "records after a base, of which restores are timed (1,5,10,20)"
    add("--records", type=_intervals, default=[1, 5, 10, 20], help=far)
    recovery = "only the section about restores of a log (more --rounds: a narrower interval)"
    add("--recovery", action="store_true", help=recovery)
    simulate = "only the section about a simulated accelerator: full beside spread"
    add("--simulate", action="store_true", help=simulate)
    many = "only the section about several ranks of one FSDP2 run, and loads on others"
    add("--ranks", type=int, default=1, help=many)
    add("--tensors", type=int, default=10_000, help="in the model of small ones; 0: none")
    add("--text", metavar="FILE", help="what to train on (default: Python's own sources)")
    add("--store-root", type=Path, default=Path("runs"), metavar="DIR", help="where checkpoints go")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--picture", type=Path, metavar="FILE", help="write them as a picture (PNG)")


def run(args: argparse.Namespace) -> int:
    """Measure, show, and write what was asked for."""
    if args.steps < 1 or args.rounds < 1 or args.base_every < 1:
        raise ValueError("--steps, --rounds and --base-every must be positive")
    if args.ranks < 1 or (args.ranks > 1 and (args.simulate or args.recovery or args.picture)):
        raise ValueError(
            "--ranks must be positive, and goes with none of --simulate, --recovery, --picture"
        )
    if args.recovery and (args.simulate or args.picture):
        raise ValueError("--recovery goes with neither --simulate nor --picture")
    names = chosen(args.only, args.strategy) if args.ranks == 1 else ranks.chosen(args.only)
    workload.load_text(args.text)  # while nothing is begun
    args.store_root.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=args.store_root)).resolve()
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    if args.simulate:
        return _simulate(args, root, console)
    if args.recovery:
        return _recover(args, root, console)
    kind = Bench if args.ranks == 1 else ranks.RanksBench
    try:
        raw = kind(args, names, root, _teller()).measure()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if args.ranks > 1:
        return _ranks(args, raw, console)
    summary = report.summarise(raw)
    _write_json(args, {**summary, "raw": raw})
    tables.show(summary, console)
    if args.picture:
        picture.draw(summary, args.picture)
    return 0


def _ranks(args: argparse.Namespace, raw: dict[str, Any], console: Console) -> int:
    """Show the section about several ranks. Returns 1 where a loaded byte of ours differs."""
    summary = ranks.summarise(raw)
    _write_json(args, {**summary, "raw": raw})
    ranks.show(summary, console)
    return 0 if all(row["equal"] for row in summary["loads"].get(OURS, {}).values()) else 1


def _recover(args: argparse.Namespace, root: Path, console: Console) -> int:
    """The section about restores of a log. Returns 1 where a restored byte differs."""
    began, machine = time.monotonic(), describe(root)
    try:
        raw = recover(args, root, _teller())
    except WorkerFailed as error:
        raise Unavailable(f"bench: restoring a log failed at {error}") from error
    finally:
        shutil.rmtree(root, ignore_errors=True)
    settings = {"size": args.size, "records": args.records, "rounds": args.rounds}
    summary = {
        "section": "recovery",
        "machine": machine,
        "settings": settings,
        "seconds": time.monotonic() - began,
        **report.recovery_of(raw),
    }
    _write_json(args, {**summary, "raw": raw})
    tables.show_recovery(summary, console)
    return 0 if all(row["equal"] for row in summary["restores"]) else 1


def _simulate(args: argparse.Namespace, root: Path, console: Console) -> int:
    """The section about the simulated accelerator. Returns 1 where a restored byte differs."""
    try:
        raw = simulated.measure(root, args.rounds, _teller())
        summary = simulated.summarise(raw, describe(root))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    _write_json(args, summary)
    simulated.show(summary, console)
    if args.picture:
        simulated.draw(summary, args.picture)
    return 0 if all(row["equal"] for row in summary["rows"]) else 1


def _write_json(args: argparse.Namespace, found: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def _teller() -> Callable[[str], None]:
    began = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr)


def _intervals(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1 or len(set(values)) < len(values):
        raise ValueError(text)
    return values


def _strategies(text: str) -> tuple[Strategy, ...]:
    names = _names(text)
    if not names or set(names) - {*STRATEGIES, "all"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not all, or some of {','.join(STRATEGIES)}")
    return tuple(name for name in STRATEGIES if name in names or "all" in names)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
