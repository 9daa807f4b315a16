"""What the event logs of a demo say: kills, losses compared, what checkpoints cost. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

from everstep.cli.demo.events import Event, Settings

PHASES = {
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
"""What a trainer is at, by its last event."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of an attempt, in seconds. `done`: its last event came."""

    number: int
    begin: float
    end: float
    done: bool


@dataclass(frozen=True, slots=True)
class Save:
    """A save of an attempt, in seconds. `kind`: "state" or "record"; `done`: it came as far as
    durable; `bytes`: 0 where that is not known."""

    step: int
    begin: float
    copied: float
    durable: float
    done: bool
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One life of the trainer, from its start to a kill or to the end of the run."""

    events: tuple[Event, ...]
    begin: float
    end: float
    is_killed: bool

    def first(self, name: str) -> Event | None:
        """The first event of this name."""
        return next((event for event in self.events if event["event"] == name), None)

    def all(self, name: str) -> list[Event]:
        """All events of this name."""
        return [event for event in self.events if event["event"] == name]

    def by_step(self, name: str) -> dict[int, Event]:
        """The events of this name by their step."""
        return {event["step"]: event for event in self.all(name)}

    @property
    def reached(self) -> int | None:
        """The last step whose step() returned, or the one that was restored; None before that."""
        done = self.all("returned") or self.all("restored")
        return done[-1]["step"] if done else None

    def steps(self, last: str = "returned") -> list[Step]:
        """All that were begun; `last`: the event that ends a step."""
        ends, now = self.by_step(last), {"at": self.end}
        return [
            Step(step, event["at"], ends.get(step, now)["at"], step in ends)
            for step, event in self.by_step("begin").items()
        ]

    def saves(self) -> list[Save]:
        """All that were begun. One whose end nobody saw is taken for what the last one was."""
        copied, durable, now = self.by_step("captured"), self.by_step("local"), {"at": self.end}
        found, kind = [], "state"
        for step, event in self.by_step("returned").items():
            if event["due"]:
                copy, end = copied.get(step, now), durable.get(step, now)
                kind, size = end.get("kind", kind), end.get("bytes", 0)
                times = event["at"], copy["at"], end["at"]
                found.append(Save(step, *times, step in durable, kind, size))
        return found


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: when, where it hit, and what it cost. None: killed again before that was known.

    `saving`: the steps that were not durable yet; `base`, `records`: the state that was restored,
    and how many records were replayed after it.
    """

    at_s: float
    step: int | None
    phase: str
    saving: tuple[int, ...]
    returned: int
    restored: int | None
    base: int | None
    records: int | None
    again_s: float | None
    imports_s: float | None
    restore_s: float | None

    @property
    def lost(self) -> int | None:
        """Steps that had returned, and were trained again."""
        return None if self.restored is None else max(0, self.returned - self.restored)


@dataclass(frozen=True, slots=True)
class Report:
    """All that the demo found out; times are medians. `problems` is empty where all is as
    promised."""

    settings: Settings
    parameters: int
    kills_planned: int
    kills: tuple[Kill, ...]
    problems: tuple[str, ...]
    losses_compared: int
    losses_again: int
    state: dict[str, Any]
    seconds: float
    step_s: float | None
    """Of the run that is killed, checkpoint included, ..."""
    plain_step_s: float | None
    """... and of the run without checkpoints, which comes after it."""
    durable_s: float | None
    """From the return of step()."""
    bytes: dict[str, float]
    """By kind of commit ("state", "record"), on average."""

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
        kills = [{**asdict(kill), "lost": kill.lost} for kill in self.kills]
        return {"ok": self.ok, **asdict(self), "kills": kills}


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
    again, problems = compare_losses(settings.steps, killed, reference)
    compared = next((event for event in reference if event["event"] == "compared"), None)
    if compared is None:
        problems.append("the final states were not compared")
    state = {key: each for key, each in (compared or {}).items() if key not in ("event", "at")}
    problems += [f"final state: {difference}" for difference in state.get("differences", ())]
    steps = [step for attempt in attempts for step in attempt.steps()]
    plain = [step for attempt in split_attempts(reference) for step in attempt.steps("trained")]
    saves = [save for attempt in attempts for save in attempt.saves() if save.done]
    sizes = {
        kind: [save.bytes for save in saves if save.bytes and save.kind == kind]
        for kind in sorted({save.kind for save in saves if save.bytes})
    }
    return Report(
        settings=settings,
        parameters=next((e["parameters"] for e in killed if e["event"] == "built"), 0),
        kills_planned=kills_planned,
        kills=kills,
        problems=(*_kill_problems(kills, settings.every), *problems),
        losses_compared=sum(event["event"] == "trained" for event in killed),
        losses_again=again,
        state=state,
        seconds=killed[-1]["at"],
        step_s=median_of(step.end - step.begin for step in steps if step.done),
        plain_step_s=median_of(step.end - step.begin for step in plain if step.done),
        durable_s=median_of(save.durable - save.begin for save in saves),
        bytes={kind: mean(found) for kind, found in sizes.items()},
    )


def median_of(values: Iterable[float]) -> float | None:
    """None for no values."""
    found = list(values)
    return median(found) if found else None


def split_attempts(events: Sequence[Event]) -> list[Attempt]:
    """The lives of the trainer, in their order."""
    starts = [index for index, event in enumerate(events) if event["event"] == "spawn"]
    attempts = []
    for begin, end in pairwise([*starts, len(events)]):
        life = events[begin + 1 : end]
        killed = [event["at"] for event in life if event["event"] == "kill"]
        own = tuple(event for event in life if event["event"] != "kill")
        until = killed[0] if killed else events[end - 1]["at"]
        attempts.append(Attempt(own, events[begin]["at"], until, bool(killed)))
    return attempts


def describe_kills(attempts: Sequence[Attempt]) -> tuple[Kill, ...]:
    """One row per kill."""
    kills = []
    reached = 0
    for attempt, following in pairwise(attempts):
        reached = reached if attempt.reached is None else attempt.reached
        trace = [event for event in attempt.events if event["event"] in PHASES]
        again = following.first("begin")
        imported, built = following.first("imported"), following.first("built")
        restored = following.first("restored") or {}
        kill = Kill(
            at_s=attempt.end,
            step=trace[-1].get("step") if trace else None,
            phase=PHASES[trace[-1]["event"]] if trace else "starting python",
            saving=tuple(save.step for save in attempt.saves() if not save.done),
            returned=reached,
            restored=restored.get("step"),
            base=restored.get("base"),
            records=restored.get("records"),
            again_s=again["at"] - following.begin if again else None,
            imports_s=imported["at"] - following.begin if imported and again else None,
            restore_s=restored["at"] - built["at"] if restored and built else None,
        )
        kills.append(kill)
    return tuple(kills)


def compare_losses(
    steps: int, killed: Sequence[Event], reference: Sequence[Event]
) -> tuple[int, list[str]]:
    """How many losses were computed again after a kill, and each that differs or is missing."""
    expected = {event["step"]: event["loss"] for event in reference if event["event"] == "trained"}
    trained = [event for event in killed if event["event"] == "trained"]
    problems = []
    for which, known in (("uninterrupted", expected), ("killed", {e["step"] for e in trained})):
        missing = [step for step in range(1, steps + 1) if step not in known]
        problems += [f"step {step}: the {which} run has no loss" for step in missing]
    for event in trained:
        step, loss = event["step"], event["loss"]
        if loss != expected.get(step, loss):
            was, now = float.fromhex(expected[step]), float.fromhex(loss)
            problems.append(f"step {step}: loss {now!r}, {was!r} without interruption")
    return len(trained) - len({event["step"] for event in trained}), problems


def _kill_problems(kills: Sequence[Kill], every: int) -> list[str]:
    return [
        f"kill {number}: {kill.lost} steps lost (step() of {kill.returned} had returned, "
        f"{kill.restored} was restored)"
        for number, kill in enumerate(kills, 1)
        if kill.lost is not None and kill.lost > lost_max(every, kill.returned)
    ]
