"""What the event logs of a demo say: kills, losses compared, what checkpoints cost. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil
from statistics import mean, median
from typing import Any

from everstep.cli.demo.events import Event, Settings

# What a trainer is at, by its last event.
_PHASES = {
    "start": "importing torch",
    "imported": "building",
    "built": "restoring",
    "restored": "between steps",
    "begin": "forward",
    "forward": "backward",
    "backward": "update",
    "update": "between steps",
    "trained": "step()",
    "returned": "between steps",
}
_LEVELS = ("captured", "held", "local")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One life of the trainer, from its start to a kill or to the end of the run."""

    events: tuple[Event, ...]
    spawn_at: float
    kill_at: float | None

    def first(self, name: str) -> Event | None:
        """The first event of this name."""
        return next((event for event in self.events if event["event"] == name), None)

    def all(self, name: str) -> list[Event]:
        """All events of this name."""
        return [event for event in self.events if event["event"] == name]

    @property
    def reached(self) -> int | None:
        """The last step whose step() returned, or the one that was restored; None before that."""
        done = self.all("returned") or self.all("restored")
        return done[-1]["step"] if done else None


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: when, where it hit, and what it cost. None: killed again before that was known.

    `base`, `records`: the state that was restored, and how many records were replayed after it.
    """

    at_s: float
    step: int | None
    phase: str
    saves: dict[int, str]
    returned: int | None
    restored: int | None = None
    lost: int | None = None
    base: int | None = None
    records: int | None = None
    again_s: float | None = None
    imports_s: float | None = None
    restore_s: float | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """A number that was measured many times."""

    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None for no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(median(ordered), ordered[ceil(0.99 * len(ordered)) - 1], ordered[-1])


@dataclass(frozen=True, slots=True)
class Bytes:
    """What the commits of one kind take, on average; those of which that is known."""

    mean: float
    count: int


@dataclass(frozen=True, slots=True)
class Report:
    """All that the demo found out. `problems` is empty where all is as promised."""

    settings: Settings
    parameters: int
    kills_planned: int
    kills: tuple[Kill, ...]
    problems: tuple[str, ...]
    losses_compared: int
    losses_again: int
    state: dict[str, Any]
    seconds: float
    stall_s: Spread | None
    held_s: Spread | None
    durable_s: Spread | None
    step_s: Spread | None
    """Steps of the run that is killed, checkpoint included, ..."""
    plain_step_s: Spread | None
    """... and of the run without checkpoints, which comes after it."""
    bytes: dict[str, Bytes]
    """By kind of commit: "state", "record"."""

    @property
    def ok(self) -> bool:
        """Whether every comparison held."""
        return not self.problems

    @property
    def is_log(self) -> bool:
        """Whether there were records, or were to be."""
        return self.settings.strategy == "log" or "record" in self.bytes

    @property
    def when(self) -> str:
        """At which steps checkpoints were due, in words."""
        every = self.settings.every
        return "every step" if every == 1 else f"every {every}th step"

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {"ok": self.ok, **asdict(self)}


def lost_max(every: int, returned: int) -> int:
    """How many steps a kill may cost at most, where step() of `returned` was the last to return.

    At every step it is one: a call returns when the checkpoint before it is captured. Else the last
    due step's checkpoint may be lost while its copies go on, beside the step after it; then the one
    before it is restored.
    """
    since = returned % every
    return 1 if every == 1 else since + (every if since <= 1 else 0)


def make_report(
    settings: Settings, killed: list[Event], reference: list[Event], kills_planned: int
) -> Report:
    """Reads the logs of both runs."""
    attempts = split_attempts(killed)
    kills = describe_kills(attempts)
    again, loss_problems = compare_losses(settings.steps, killed, reference)
    state = next((event for event in reference if event["event"] == "compared"), {"step": None})
    parameters = [event["parameters"] for event in killed if event["event"] == "built"]
    return Report(
        settings=settings,
        parameters=parameters[0] if parameters else 0,
        kills_planned=kills_planned,
        kills=kills,
        problems=(*_kill_problems(kills, settings.every), *loss_problems, *_state_problems(state)),
        losses_compared=sum(event["event"] == "trained" for event in killed),
        losses_again=again,
        state={key: value for key, value in state.items() if key not in ("event", "at", "pid")},
        seconds=killed[-1]["at"] - killed[0]["at"] if killed else 0.0,
        stall_s=Spread.of(event["stall_s"] for event in killed if event["event"] == "returned"),
        held_s=Spread.of(event["held_s"] for event in killed if event["event"] == "returned"),
        durable_s=Spread.of(durable_seconds(attempts).values()),
        step_s=Spread.of(step_seconds(killed, "returned")),
        plain_step_s=Spread.of(step_seconds(reference, "trained")),
        bytes=count_bytes(killed),
    )


def split_attempts(events: Sequence[Event]) -> list[Attempt]:
    """The lives of the trainer, in their order."""
    starts = [index for index, event in enumerate(events) if event["event"] == "spawn"]
    attempts = []
    for begin, end in pairwise([*starts, len(events)]):
        life = events[begin + 1 : end]
        killed = [event["at"] for event in life if event["event"] == "kill"]
        own = tuple(event for event in life if event["event"] != "kill")
        attempts.append(Attempt(own, events[begin]["at"], killed[0] if killed else None))
    return attempts


def describe_kills(attempts: Sequence[Attempt]) -> tuple[Kill, ...]:
    """One row per kill."""
    kills = []
    reached: int | None = None
    for attempt, following in pairwise(attempts):
        if attempt.kill_at is None:
            continue
        reached = attempt.reached if attempt.reached is not None else reached
        kills.append(_describe(attempt, following, reached, attempts[0].spawn_at))
    return tuple(kills)


def _describe(attempt: Attempt, following: Attempt, reached: int | None, begin: float) -> Kill:
    assert attempt.kill_at is not None
    trace = [event for event in attempt.events if event["event"] in _PHASES]
    steps = [event["step"] for event in trace if "step" in event]
    imported, built = following.first("imported"), following.first("built")
    restored, again = following.first("restored"), following.first("begin")
    replayed = following.first("replayed")
    return Kill(
        at_s=attempt.kill_at - begin,
        step=steps[-1] if attempt.first("begin") else None,
        phase=_PHASES[trace[-1]["event"]] if trace else "starting python",
        saves=open_saves(attempt),
        returned=reached,
        restored=restored["step"] if restored else None,
        lost=max(0, (reached or 0) - restored["step"]) if restored else None,
        base=replayed["base"] if replayed else None,
        records=replayed["records"] if replayed else None,
        again_s=again["at"] - following.spawn_at if again else None,
        imports_s=imported["at"] - following.spawn_at if imported and again else None,
        restore_s=restored["at"] - built["at"] if restored and built else None,
    )


def open_saves(attempt: Attempt) -> dict[int, str]:
    """The saves that were not durable when the attempt ended: what each was at, by step."""
    saves = {event["step"]: "copying" for event in attempt.all("returned") if event["due"]}
    for level in _LEVELS:
        for event in attempt.all(level):
            if level == "local":
                saves.pop(event["step"], None)
            elif event["step"] in saves:
                saves[event["step"]] = "writing"
    return saves


def compare_losses(
    steps: int, killed: Sequence[Event], reference: Sequence[Event]
) -> tuple[int, list[str]]:
    """How many losses were computed again after a kill, and each that differs or is missing."""
    expected = {event["step"]: event["loss"] for event in reference if event["event"] == "trained"}
    found: dict[int, list[str]] = {}
    for event in killed:
        if event["event"] == "trained":
            found.setdefault(event["step"], []).append(event["loss"])
    problems = []
    for step in range(1, steps + 1):
        if step not in expected or step not in found:
            which = "uninterrupted" if step not in expected else "killed"
            problems.append(f"step {step}: the {which} run has no loss")
        for loss in found.get(step, []):
            if loss != expected.get(step, loss):
                was, now = float.fromhex(expected[step]), float.fromhex(loss)
                problems.append(f"step {step}: loss {now!r}, {was!r} without interruption")
    return sum(len(losses) - 1 for losses in found.values()), problems


def durable_seconds(attempts: Sequence[Attempt]) -> dict[int, float]:
    """By step, the time from the return of step() until the checkpoint was durable."""
    seconds = {}
    for attempt in attempts:
        returned = {event["step"]: event["at"] for event in attempt.all("returned")}
        for event in attempt.all("local"):
            if event["step"] in returned:
                seconds[event["step"]] = event["at"] - returned[event["step"]]
    return seconds


def step_seconds(events: Sequence[Event], end: str) -> Iterator[float]:
    """How long each step took, from its begin to the event `end`."""
    begun: dict[int, float] = {}
    for event in events:
        if event["event"] == "begin":
            begun[event["step"]] = event["at"]
        elif event["event"] == end and event["step"] in begun:
            yield event["at"] - begun.pop(event["step"])


def count_bytes(killed: Sequence[Event]) -> dict[str, Bytes]:
    """What states and records take on the disk."""
    sizes: dict[str, list[int]] = {}
    for event in killed:
        if event["event"] == "local" and "kind" in event:
            sizes.setdefault(event["kind"], []).append(event["bytes"])
    return {kind: Bytes(mean(found), len(found)) for kind, found in sorted(sizes.items())}


def _kill_problems(kills: Sequence[Kill], every: int) -> list[str]:
    return [
        f"kill {number}: {kill.lost} steps lost (step() of {kill.returned} had returned, "
        f"{kill.restored} was restored)"
        for number, kill in enumerate(kills, 1)
        if kill.lost is not None and kill.lost > lost_max(every, kill.returned or 0)
    ]


def _state_problems(state: Event) -> list[str]:
    if state["step"] is None and "differences" not in state:
        return ["the final states were not compared"]
    return [f"final state: {difference}" for difference in state["differences"]]
