"""`everstep bench`: checkpoints of every step, measured against other libraries on this machine.

Every contender lives in a process of its own, with the same model and text. The parent lets them
train in turn, a block of steps each, in an order that turns from round to round, with blocks
without checkpoints between them: whatever drifts, drifts for all, and a block is compared with its
neighbours.
"""

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

from everstep.cli.bench import picture, report, simulated, tables
from everstep.cli.bench.driver import Driver, WorkerFailed
from everstep.cli.bench.machine import describe, version
from everstep.cli.bench.plan import (
    BASELINE,
    CONTENDERS,
    FLOOR,
    LOG,
    OURS,
    PEERS,
    SPREAD,
    Block,
    chosen,
    intervals_of,
    missing,
    rotated,
    round_of,
    steps_of,
)
from everstep.cli.strategies import STRATEGIES, Strategy
from everstep.errors import Unavailable

_SETTLE_S = 0.3
_TIMEOUT_S = 600.0
_RECOVERIES = 7
"""At least so many restores of each kind: they take a third of a second, and vary by half."""
_TENSORS_SAVES = 15
_PLAIN_WIDTH = 136
WINDOWS = (1, 4, 8)
"""Of the spread checkpoints of which restores are timed; 1: a whole state."""
_LEAD_STEPS_MAX = max(facts.lead_steps for facts in CONTENDERS.values())
_SETTINGS = ("steps", "rounds", "size", "every", "strategy", "base_every", "tensors")


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
    simulate = "only the section about a simulated accelerator: full beside spread"
    add("--simulate", action="store_true", help=simulate)
    add("--tensors", type=int, default=10_000, help="in the model of small ones; 0: none")
    add("--text", metavar="FILE", help="what to train on (default: Python's own sources)")
    add("--store-root", type=Path, default=Path("runs"), metavar="DIR", help="where checkpoints go")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--picture", type=Path, metavar="FILE", help="write them as a picture (PNG)")


def run(args: argparse.Namespace) -> int:
    """Measure, show, and write what was asked for."""
    if args.steps < 1 or args.rounds < 1 or args.base_every < 1:
        raise ValueError("--steps, --rounds and --base-every must be positive")
    names = chosen(args.only, args.strategy)
    args.store_root.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=args.store_root)).resolve()
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    if args.simulate:
        return _simulate(args, root, console)
    try:
        raw = Bench(args, names, root, _teller()).measure()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    summary = report.summarise(raw)
    tables.show(summary, console)
    _write_json(args, {**summary, "raw": raw})
    if args.picture:
        picture.draw(summary, args.picture)
    return 0


def _simulate(args: argparse.Namespace, root: Path, console: Console) -> int:
    """The section about the simulated accelerator. Returns 1 where a restored byte differs."""
    try:
        raw = simulated.measure(root, args.rounds, _teller())
        summary = simulated.summarise(raw, describe(root))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    simulated.show(summary, console)
    _write_json(args, summary)
    if args.picture:
        simulated.draw(summary, args.picture)
    return 0 if all(row["equal"] for row in summary["rows"]) else 1


def _write_json(args: argparse.Namespace, found: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


class Bench:
    """One run of the bench. `raw` gathers what was measured, in the order in which it was."""

    def __init__(
        self, args: argparse.Namespace, names: list[str], root: Path, tell: Callable[[str], None]
    ) -> None:
        self._args = args
        self._names = names
        self._root = root
        self._tell = tell
        self._drivers: dict[tuple[str, int], Driver] = {}
        self.raw: dict[str, Any] = {
            "machine": describe(root),
            "settings": {key: getattr(args, key) for key in _SETTINGS},
            "versions": {name: version(CONTENDERS[name].distribution) for name in names},
            "missing": missing(args.only, args.strategy),
            "failed": {},
            "blocks": [],
            "alone": [],
            "restores": [],
        }

    def measure(self) -> dict[str, Any]:
        """Everything, in turn; what a contender fails at is noted, and the others go on."""
        began = time.monotonic()
        try:
            self._start()
            for number in range(self._args.rounds):
                self._tell(f"round {number + 1} of {self._args.rounds}")
                self._round(number)
            for name in self._names:
                self._try(name, self._keep_one)
            for number in range(self._args.rounds):
                self._tell(f"restores, round {number + 1} of {self._args.rounds}")
                for name in rotated(self._names, number):
                    self._try(name, self._restore, number)
            if self._args.tensors and OURS in self._names:
                self._tell(f"{self._args.tensors:,} tensors")
                self._try(OURS, self._tensors)
            if LOG in self._names:
                self._tell(f"recovery after {', '.join(map(str, self._args.records))} records")
                self._try(LOG, self._recovery)
            if SPREAD in self._names:
                self._tell(f"restores after windows of {', '.join(map(str, WINDOWS))} steps")
                self._try(SPREAD, self._spread_recovery)
        finally:
            for driver in self._drivers.values():
                driver.stop()
        self.raw["seconds"] = time.monotonic() - began
        return self.raw

    def _start(self) -> None:
        for name in self._names:
            self._tell(f"starting {CONTENDERS[name].label}")
            self._try(name, self._start_one)
        needed = self.raw.get("state_bytes", 0) * (self._args.steps + _LEAD_STEPS_MAX + 2)
        if shutil.disk_usage(self._root).free < needed:
            raise Unavailable(
                f"bench in {self._root}: {needed / 1e9:.1f} GB are needed for the saves of one "
                f"block. Free some space, or choose another place with --store-root"
            )

    def _start_one(self, name: str) -> None:
        intervals = self._intervals(name) if CONTENDERS[name].is_ours else [1]
        for every in intervals:
            settings = {
                "name": name,
                "size": self._args.size,
                "every": every,
                "text": self._args.text,
            }
            driver = self._drivers[name, every] = Driver(self._root / f"{name}-{every}", settings)
            self.raw["state_bytes"] = driver.ask("warm_up", _TIMEOUT_S)["state_bytes"]

    def _round(self, number: int) -> None:
        for block in round_of(self._names, self._args.every, number):
            self._try(block.name, self._block, block, number)
        for name in rotated(self._names, number):
            if name != BASELINE:
                self._try(name, self._alone, number)

    def _block(self, name: str, block: Block, number: int) -> None:
        facts = CONTENDERS[name]
        steps = self._args.steps if block.bases else steps_of(block, self._args.steps)
        lead = facts.lead_steps if block.every == 1 or name == LOG else 1
        every = 1 if block.bases else block.every
        request = {"every": every, "steps": steps, "lead": lead, "bases": block.bases}
        reply = self._driver(name, block.every).ask_watched("block", _TIMEOUT_S, **request)
        place = {"round": number, "name": name, "every": block.every, "bases": block.bases}
        self.raw["blocks"].append({**place, "steps": steps, **reply})

    def _alone(self, name: str, number: int) -> None:
        reply = self._driver(name).ask("alone", _TIMEOUT_S)
        self.raw["alone"].append({"round": number, "name": name, **reply})

    def _keep_one(self, name: str) -> None:
        if name != BASELINE:
            self._driver(name).ask("keep_one", _TIMEOUT_S)

    def _restore(self, name: str, number: int) -> None:
        if name != BASELINE:
            reply = self._driver(name).ask("restore", _TIMEOUT_S)
            self.raw["restores"].append({"round": number, "name": name, **reply})

    def _tensors(self, name: str) -> None:
        request = {"count": self._args.tensors, "saves": _TENSORS_SAVES}
        self.raw["tensors"] = self._driver(name).ask("tensors", _TIMEOUT_S, **request)

    def _recovery(self, name: str) -> None:
        rounds = max(self._args.rounds, _RECOVERIES)
        request = {"records": self._args.records, "rounds": rounds}
        self.raw["recovery"] = self._driver(name).ask("recovery", _TIMEOUT_S, **request)

    def _spread_recovery(self, name: str) -> None:
        rounds = max(self._args.rounds, _RECOVERIES)
        request = {"windows": WINDOWS, "rounds": rounds}
        reply = self._driver(name).ask("spread_recovery", _TIMEOUT_S, **request)
        self.raw["spread_recovery"] = reply

    def _driver(self, name: str, every: int = 0) -> Driver:
        """The process of a contender; for what is done once, that of its first interval."""
        own = CONTENDERS[name].is_ours
        return self._drivers[name, (every or self._intervals(name)[0]) if own else 1]

    def _intervals(self, name: str) -> list[int]:
        return intervals_of(name, self._args.every)

    def _try(self, name: str, action: Callable[..., None], *rest: Any) -> None:
        """Do something with a contender that has not failed before; baseline and floor must not."""
        if name in self.raw["failed"]:
            return
        try:
            action(name, *rest)
        except WorkerFailed as error:
            if name in (BASELINE, FLOOR):
                raise Unavailable(f"bench: {CONTENDERS[name].label} failed at {error}") from error
            self.raw["failed"][name] = str(error)
            self._tell(f"{CONTENDERS[name].label} failed at {error}")
        time.sleep(_SETTLE_S)


def _teller() -> Callable[[str], None]:
    began = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr)


def _intervals(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1 or len(set(values)) < len(values):
        raise ValueError(text)
    return values


def _strategies(text: str) -> tuple[Strategy, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names or set(names) - {*STRATEGIES, "all"}:
        raise ValueError(text)
    return tuple(name for name in STRATEGIES if name in names or "all" in names)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
