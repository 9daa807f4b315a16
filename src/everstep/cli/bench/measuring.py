"""What `everstep bench` does, in which order: the contenders train in turn.

Every contender lives in a process of its own, with the same model and text. The parent lets them
train in turn, a block of steps each, in an order that turns from round to round, with blocks
without checkpoints between them: whatever drifts, drifts for all, and a block is compared with its
neighbours.
"""

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from everstep.cli.bench.driver import Driver, WorkerFailed
from everstep.cli.bench.machine import describe, version
from everstep.cli.bench.plan import (
    BASELINE,
    CONTENDERS,
    FLOOR,
    LOG,
    OURS,
    SPREAD,
    Block,
    intervals_of,
    missing,
    rotated,
    round_of,
    steps_of,
)
from everstep.errors import Unavailable

TIMEOUT_S = 600.0
_SETTLE_S = 0.3
_RECOVERIES, _SPREAD_RECOVERIES = 15, 7
"""At least so many restores of each kind: they take a third of a second, and vary by half. A log's
are compared with a sum of parts, each of which varies, too."""
_TENSORS_SAVES = 15
WINDOWS = (1, 4, 8)
"""Of the spread checkpoints of which restores are timed; 1: a whole state."""
_LEAD_STEPS_MAX = max(facts.lead_steps for facts in CONTENDERS.values())


class Asked(Protocol):
    """Who is asked: the process of a contender, or those of its ranks."""

    def ask(self, do: str, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Call a method, and return its reply. Raises WorkerFailed."""

    def ask_watched(self, do: str, timeout_s: float, **request: Any) -> dict[str, Any]:
        """The same, with the peak memory in the reply."""

    def stop(self) -> None:
        """End it, and all that it started."""


class Bench:
    """One run of the bench. `raw` gathers what was measured, in the order in which it was."""

    settings: tuple[str, ...] = (
        "steps",
        "rounds",
        "size",
        "every",
        "strategy",
        "base_every",
        "tensors",
    )

    def __init__(
        self, args: argparse.Namespace, names: list[str], root: Path, tell: Callable[[str], None]
    ) -> None:
        self._args = args
        self._names = names
        self._root = root
        self._tell = tell
        self._drivers: dict[tuple[str, int], Asked] = {}
        self.raw: dict[str, Any] = {
            "machine": describe(root),
            "settings": {key: getattr(args, key) for key in self.settings},
            "versions": {name: version(CONTENDERS[name].distribution) for name in names},
            "missing": self._missing(),
            "failed": {},
            "blocks": [],
            "alone": [],
            "restores": [],
        }

    def measure(self) -> dict[str, Any]:
        """Everything, in turn; what a contender fails at is noted, and the others go on."""
        began = time.monotonic()
        try:
            self._sections()
        finally:
            self._stop()
        self.raw["seconds"] = time.monotonic() - began
        return self.raw

    def _sections(self) -> None:
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
        self._stop()  # after a crash nobody else holds memory, see recovery.py
        if LOG in self._names:
            self._try(LOG, self._recovery)
        if SPREAD in self._names:
            self._tell(f"restores after windows of {', '.join(map(str, WINDOWS))} steps")
            self._try(SPREAD, self._spread_recovery)

    def _stop(self) -> None:
        for driver in self._drivers.values():
            driver.stop()
        self._drivers.clear()

    def _new(self, name: str, every: int, settings: dict[str, Any]) -> Asked:
        return Driver(self._root / f"{name}-{every}", settings)

    def _missing(self) -> list[str]:
        return missing(self._args.only, self._args.strategy)

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
            driver = self._drivers[name, every] = self._new(name, every, self._told(name, every))
            self.raw["state_bytes"] = driver.ask("warm_up", TIMEOUT_S)["state_bytes"]

    def _told(self, name: str, every: int) -> dict[str, Any]:
        """What a worker needs to know."""
        return {"name": name, "size": self._args.size, "every": every, "text": self._args.text}

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
        reply = self._driver(name, block.every).ask_watched("block", TIMEOUT_S, **request)
        place = {"round": number, "name": name, "every": block.every, "bases": block.bases}
        self.raw["blocks"].append({**place, "steps": steps, **reply})

    def _alone(self, name: str, number: int) -> None:
        reply = self._driver(name).ask("alone", TIMEOUT_S)
        self.raw["alone"].append({"round": number, "name": name, **reply})

    def _keep_one(self, name: str) -> None:
        if name != BASELINE:
            self._driver(name).ask("keep_one", TIMEOUT_S)

    def _restore(self, name: str, number: int) -> None:
        if name != BASELINE:
            reply = self._driver(name).ask("restore", TIMEOUT_S)
            self.raw["restores"].append({"round": number, "name": name, **reply})

    def _tensors(self, name: str) -> None:
        request = {"count": self._args.tensors, "saves": _TENSORS_SAVES}
        self.raw["tensors"] = self._driver(name).ask("tensors", TIMEOUT_S, **request)

    def _recovery(self, name: str) -> None:
        self.raw["recovery"] = recover(self._args, self._root, self._tell)

    def _spread_recovery(self, name: str) -> None:
        rounds = max(self._args.rounds, _SPREAD_RECOVERIES)
        self.raw["spread_recovery"] = _recovered(
            self._args, self._root, "spread", rounds, windows=WINDOWS
        )

    def _driver(self, name: str, every: int = 0) -> Asked:
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


def recover(args: argparse.Namespace, root: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Restores of a log, and what they are made of. Raises WorkerFailed."""
    rounds, records = max(args.rounds, _RECOVERIES), ", ".join(map(str, args.records))
    tell(f"recovery after {records} records, {rounds} rounds")
    return _recovered(args, root, "log", rounds, records=args.records)


def _recovered(
    args: argparse.Namespace, root: Path, do: str, rounds: int, **request: Any
) -> dict[str, Any]:
    told = {"size": args.size, "text": args.text}
    driver = Driver(root / "recovery", told, module="recovery")
    try:
        return driver.ask(do, rounds * TIMEOUT_S, rounds=rounds, **request)
    finally:
        driver.stop()
