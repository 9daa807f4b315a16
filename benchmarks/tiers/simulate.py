"""`python -m benchmarks.tiers.simulate`: the policy that routes, on traces of two tiers' speeds.

A discrete-event simulation. Training takes a step of STEP_S, copies its state of STATE_BYTES into
the arena, and waits where there is no room. As in a keeper, one step after the other is written, at
the speed that the trace gives at that moment, times a random factor of its own for each write.
Which tier gets it, and what is spilled, is asked of `everstep.tiers.route`, the very functions that
keepers ask, with speeds as `Throughput` measured them from the writes before.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from everstep.tiers.route import Durable, Name, Route, choose, next_spill

STEP_S = 1.0
STATE_BYTES = 10**9
SLOTS = 3
SPILL_BYTES_PER_S = 5e9
"""Of a copy from the arena to the second memory."""
JITTER = 0.1
STEPS = 1200
HALF_LIFE_S = 5.0
ROUTES: tuple[Route, ...] = ("local", "remote", "auto")
PICTURE = Path(__file__).parents[2] / "docs" / "spill.png"

Speed = Callable[[float], float]
"""Bytes per second at a time."""


def constant(bytes_per_s: float) -> Speed:
    """Always the same."""
    return lambda now: bytes_per_s


def changing(first: float, second: float, period_s: float) -> Speed:
    """The one for a period, then the other, and so on."""
    return lambda now: second if int(now / period_s) % 2 else first


TRACES: dict[str, dict[Name, Speed]] = {
    "fast remote": {"local": constant(1.25e9), "remote": constant(2.5e9)},
    "slow remote": {"local": constant(1.25e9), "remote": constant(0.25e9)},
    "changing remote": {"local": constant(1.25e9), "remote": changing(2.5e9, 0.25e9, 150.0)},
}


@dataclass(slots=True)
class Outcome:
    """Of one run: seconds until each step was durable, by step; stall by the time at which it
    ended."""

    durable_s: dict[int, float] = field(default_factory=dict)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    copies: int = 0
    """Of steps that were durable already, to measure a tier."""
    seconds: float = 0.0
    """Until the last step of training had ended."""

    @property
    def mean_s(self) -> float:
        """Until durable."""
        return statistics.fmean(self.durable_s.values())

    @property
    def p99_s(self) -> float:
        """Until durable."""
        return statistics.quantiles(self.durable_s.values(), n=100)[-1]

    @property
    def stall_s(self) -> float:
        """Of training."""
        return sum(seconds for _, seconds in self.stalls)


class Throughput:
    """The bytes per second that a tier takes, of one write at a time. Times are of a monotonic
    clock.

    What was measured counts half when HALF_LIFE_S have passed: of a tier that always writes, an
    eighth of the difference to a new speed is left after three of them. A write that takes longer
    than was expected counts before it has ended.
    """

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._at: float | None = None
        self._running: tuple[float, int] | None = None

    def begin(self, size_bytes: int, now: float) -> None:
        """A write begins."""
        self._running = now, size_bytes

    def end(self, now: float) -> None:
        """It is over."""
        assert self._running
        began, size = self._running
        self._running = None
        kept = 0.5 ** ((now - self._at) / HALF_LIFE_S) if self._at is not None else 0.0
        self._bytes = kept * self._bytes + size
        self._seconds = kept * self._seconds + now - began
        self._at = now

    def age_s(self, now: float) -> float:
        """Since a write ended; infinite where none has."""
        return math.inf if self._at is None else max(0.0, now - self._at)

    def bytes_per_s(self, now: float) -> float | None:
        """What it takes; None where that is not known."""
        measured = self._bytes / self._seconds if self._seconds else None
        if self._running is None or self._running[0] >= now or measured is None:
            return measured
        began, size = self._running
        return min(measured, size / (now - began))


@dataclass(slots=True)
class SimulatedTier:
    """One tier: its speed, and whether it writes."""

    speed: Speed
    measured: Throughput = field(default_factory=Throughput)
    is_busy: bool = False


class Simulation:
    """One run. Everything happens in `_events`, in the order of time."""

    def __init__(
        self,
        tiers: dict[Name, Speed],
        route: Route,
        steps: int = STEPS,
        spill_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        self.outcome = Outcome()
        self._tiers = {name: SimulatedTier(speed) for name, speed in tiers.items()}
        self._route = route
        self._steps = steps
        self._spill_slots = spill_bytes // STATE_BYTES
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._waiting: list[int] = []
        """Steps that are sealed, and nowhere durable, nor being written."""
        self._spilled: set[int] = set()
        self._moving: int | None = None
        self._writing: int | None = None
        self._begun: dict[int, float] = {}
        self._newest = 0
        """The last that was captured: its image stays in the arena until there is another."""
        self._stalled_since: float | None = None
        self._favourite: Name = "local"

    def run(self) -> Outcome:
        """Until all steps are durable."""
        self._at(STEP_S, self._capture)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
            self._go_on()
        assert not self._waiting
        return self.outcome

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), event))

    # ---- training --------------------------------------------------------------------------

    def _capture(self) -> None:
        """A step of training has ended: its state is copied, where there is room."""
        if not self._free_slots():
            self._stalled_since = self._now if self._stalled_since is None else self._stalled_since
            return
        if self._stalled_since is not None:
            self.outcome.stalls.append((self._now, self._now - self._stalled_since))
            self._stalled_since = None
        self._newest += 1
        self._begun[self._newest] = self._now
        self._waiting.append(self._newest)
        self.outcome.seconds = self._now
        if self._newest < self._steps:
            self._at(STEP_S, self._capture)

    def _free_slots(self) -> int:
        """Of the arena."""
        held = {*self._waiting, self._newest, self._writing or 0, self._moving or 0} - {0}
        return SLOTS - len(held - self._spilled)

    # ---- the keeper ------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._writing is None and self._waiting:
            self._begin(self._waiting.pop(0))
        is_full = not self._free_slots() and self._newest < self._steps
        if is_full and self._moving is None:
            room = (self._spill_slots - len(self._spilled)) * STATE_BYTES
            waiting = {step: STATE_BYTES for step in self._waiting if step not in self._spilled}
            self._moving = next_spill(waiting, room, is_writing=self._writing is not None)
            if self._moving is not None:
                step = self._moving
                self._at(STATE_BYTES / SPILL_BYTES_PER_S, lambda: self._moved(step))
        if self._stalled_since is not None:
            self._capture()

    def _moved(self, step: int) -> None:
        self._moving = None
        if step in self._waiting:
            self._spilled.add(step)

    def _begin(self, step: int) -> None:
        self._writing = step
        tiers = {name: self._figures(tier) for name, tier in self._tiers.items()}
        chosen = choose(STATE_BYTES, tiers, self._favourite, self._route)
        assert chosen
        self._favourite = chosen
        is_measured = self._route != "auto" or not tiers["local"].is_unknown
        name = chosen if is_measured else "local"
        self._write(name, lambda: self._end(step, name))

    def _figures(self, tier: SimulatedTier) -> Durable:
        measured = tier.measured
        return Durable(1 << 60, measured.bytes_per_s(self._now), measured.age_s(self._now))

    def _end(self, step: int, name: Name) -> None:
        """It is durable; a remote tier that is to be measured gets a copy of it."""
        self._writing = None
        self._spilled.discard(step)
        self.outcome.durable_s[step] = self._now - self._begun[step]
        remote = self._tiers.get("remote")
        is_open = self._route == "auto" and name == "local" and remote and not remote.is_busy
        if remote and is_open and self._figures(remote).is_unknown:
            self.outcome.copies += 1
            self._write("remote", lambda: None)

    # ---- tiers -----------------------------------------------------------------------------

    def _write(self, name: Name, then: Callable[[], None]) -> None:
        tier = self._tiers[name]
        tier.is_busy = True
        tier.measured.begin(STATE_BYTES, self._now)
        factor = self._random.uniform(1 - JITTER, 1 + JITTER)

        def end() -> None:
            tier.is_busy = False
            tier.measured.end(self._now)
            then()

        self._at(self._duration(tier.speed, factor), end)

    def _duration(self, speed: Speed, factor: float) -> float:
        """Of a write that begins now, in slices of a tenth of a second."""
        left, seconds, slice_s = float(STATE_BYTES), 0.0, 0.1
        while (done := speed(self._now + seconds) * factor * slice_s) < left:
            left, seconds = left - done, seconds + slice_s
        return seconds + slice_s * left / done


def compare(steps: int = STEPS) -> dict[str, dict[str, Outcome]]:
    """Each route on each trace."""
    return {
        trace: {route: Simulation(tiers, route, steps).run() for route in ROUTES}
        for trace, tiers in TRACES.items()
    }


def show(found: dict[str, dict[str, Outcome]], console: Console) -> None:
    """One table."""
    heads = ("remote tier", "route", "durable after, mean", "99th percentile", "stall of training",
             "copies to measure")  # fmt: skip
    table = Table(*heads, title=f"{STATE_BYTES / 1e9:g} GB at every step of {STEP_S:g} s", box=None)
    for trace, outcomes in found.items():
        for route, outcome in outcomes.items():
            stall = outcome.stall_s / outcome.seconds
            table.add_row(trace, route, f"{outcome.mean_s:.2f} s", f"{outcome.p99_s:.2f} s",
                          f"{stall:.1%}", str(outcome.copies))  # fmt: skip
    console.print(table)


# ---- the spill ---------------------------------------------------------------------------------

DISKS: dict[str, Speed] = {
    "always 0.8 GB/s": constant(0.8e9),
    "1.5 GB/s, but 0.4 for 60 s in each 180 s": lambda now: 0.4e9 if now % 180 >= 120 else 1.5e9,
}
SPILL_SIZES = (0, 10, 20, 40, 80)
"""In states."""
STYLES = ("-", "-", "-", "-", "--")  # where two lie on one another, both are seen


def stalls(speed: Speed, steps: int, sizes: Sequence[int] = SPILL_SIZES) -> dict[int, Outcome]:
    """A disk that is slower than training, beside a second memory of so many states."""
    return {
        size: Simulation({"local": speed}, "local", steps, size * STATE_BYTES).run()
        for size in sizes
    }


def draw(path: Path, steps: int = 600) -> None:
    """The stall over time, by the size of the second memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(DISKS), figsize=(11, 4.2), layout="constrained")
    for axis, (title, speed) in zip(axes, DISKS.items(), strict=True):
        for (size, outcome), style in zip(stalls(speed, steps).items(), STYLES, strict=True):
            times = [0.0, *(at for at, _ in outcome.stalls), outcome.seconds]
            lost = [0.0, *itertools.accumulate(seconds for _, seconds in outcome.stalls)]
            label = f"{size * STATE_BYTES / 1e9:g} GB" if size else "none"
            axis.plot(
                times, [*lost, lost[-1]], label=label, linestyle=style, drawstyle="steps-post"
            )
        axis.set_title(f"disk: {title}", fontsize=10)
        axis.set_xlabel("seconds since the start")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds for which training stood still")
    axes[0].legend(title="second memory")
    figure.suptitle(
        f"A state of {STATE_BYTES / 1e9:g} GB at every step of {STEP_S:g} s (simulated)"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    """Show the table, and draw."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers.simulate", description=__doc__
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (%(default)s)")
    parser.add_argument("--plot", type=Path, nargs="?", const=PICTURE, metavar="FILE")
    args = parser.parse_args(words)
    show(compare(args.steps), Console(width=130))
    if args.plot:
        draw(args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
