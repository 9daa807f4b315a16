"""What the event logs of a demo say: kills, and whether both runs are equal. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from everstep.cli.demo.events import Event, Settings

PHASES = {
    "spawn": "importing torch",
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
    """A save of an attempt, in seconds. `done`: it came as far as durable; `kind`: "state" or
    "record"."""

    step: int
    begin: float
    copied: float
    durable: float
    done: bool
    kind: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One life of the trainer, from its start to a kill or to the end of the run."""

    events: Sequence[Event]

    @property
    def begin(self) -> float:
        """Of the process, in seconds."""
        return float(self.events[0]["at"])

    @property
    def end(self) -> float:
        """When it was killed, or was done."""
        return float(self.events[-1]["at"])

    def first(self, name: str) -> Event | None:
        """The first event of this name."""
        return next((event for event in self.events if event["event"] == name), None)

    def all(self, name: str) -> list[Event]:
        """All events of this name."""
        return [event for event in self.events if event["event"] == name]

    def by_step(self, name: str) -> dict[int, Event]:
        """The events of this name by their step."""
        return {event["step"]: event for event in self.all(name)}

    def steps(self) -> list[Step]:
        """All that were begun."""
        ends, now = self.by_step("returned"), {"at": self.end}
        return [
            Step(step, event["at"], ends.get(step, now)["at"], step in ends)
            for step, event in self.by_step("begin").items()
        ]

    def saves(self) -> list[Save]:
        """All that were begun. One whose end nobody saw is taken for what the last one was."""
        copied, durable, now = self.by_step("captured"), self.by_step("durable"), {"at": self.end}
        found, kind = [], "state"
        for step, event in self.by_step("returned").items():
            if event["due"]:
                copy, end = copied.get(step, now), durable.get(step, now)
                kind = end.get("kind") or kind
                times = event["at"], copy["at"], end["at"]
                found.append(Save(step, *times, step in durable, kind))
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

    @property
    def lost(self) -> int | None:
        """Steps that had returned, and were trained again."""
        return None if self.restored is None else max(0, self.returned - self.restored)


@dataclass(frozen=True, slots=True)
class Report:
    """All that the demo found out. `problems` is empty where all is as promised; `state`: see
    compare.py; `losses_again`: of those compared, the ones that a kill had computed again."""

    settings: Settings
    kills: tuple[Kill, ...]
    problems: tuple[str, ...]
    losses_compared: int
    losses_again: int
    state: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether every comparison held."""
        return not self.problems

    @property
    def lost(self) -> int:
        """Steps, by all kills together."""
        return sum(kill.lost or 0 for kill in self.kills)

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        kills = [{**asdict(kill), "lost": kill.lost} for kill in self.kills]
        return {"ok": self.ok, **asdict(self), "kills": kills}


def make_report(settings: Settings, killed: list[Event], reference: list[Event]) -> Report:
    """Reads the logs of both runs."""
    kills = describe_kills(split_attempts(killed))
    steps = [event["step"] for event in killed if event["event"] == "trained"]
    states = [event["state"] for event in reference if event["event"] == "compared"]
    state = states[0] if states else {"differences": ["the two were not compared"]}
    problems = _kill_problems(kills, settings.lost_max)
    problems += _loss_problems(settings.steps, killed, reference)
    problems += [f"final state: {difference}" for difference in state["differences"]]
    again = len(steps) - len(set(steps))
    return Report(settings, kills, tuple(problems), len(steps), again, state)


def split_attempts(events: Sequence[Event]) -> list[Attempt]:
    """The lives of the trainer, in their order."""
    starts = [index for index, event in enumerate(events) if event["event"] == "spawn"]
    return [Attempt(events[begin:end]) for begin, end in pairwise([*starts, len(events)])]


def describe_kills(attempts: Sequence[Attempt]) -> tuple[Kill, ...]:
    """One row per kill."""
    kills = []
    reached = 0
    for attempt, following in pairwise(attempts):
        if done := attempt.all("returned") or attempt.all("restored"):
            reached = done[-1]["step"]
        trace = [event for event in attempt.events if event["event"] in PHASES]
        again, restored = following.first("begin"), following.first("restored") or {}
        kill = Kill(
            at_s=attempt.end,
            step=trace[-1].get("step"),
            phase=PHASES[trace[-1]["event"]],
            saving=tuple(save.step for save in attempt.saves() if not save.done),
            returned=reached,
            restored=restored.get("step"),
            base=restored.get("base"),
            records=restored.get("records"),
            again_s=again["at"] - following.begin if again else None,
        )
        kills.append(kill)
    return tuple(kills)


def _kill_problems(kills: Sequence[Kill], lost_max: int) -> list[str]:
    return [
        f"kill {number}: {kill.lost} steps lost (step() of {kill.returned} had returned, "
        f"{kill.restored} was restored)"
        for number, kill in enumerate(kills, 1)
        if kill.lost is not None and kill.lost > lost_max
    ]


def _loss_problems(
    steps: int, killed: Sequence[Event], reference: Sequence[Event]
) -> Iterator[str]:
    """Each loss that differs or is missing."""
    expected = {event["step"]: event["loss"] for event in reference if event["event"] == "trained"}
    trained = [(event["step"], event["loss"]) for event in killed if event["event"] == "trained"]
    for which, known in (("uninterrupted", expected), ("killed", dict(trained))):
        missing = [step for step in range(1, steps + 1) if step not in known]
        yield from (f"step {step}: the {which} run has no loss" for step in missing)
    for step, loss in trained:
        if loss != expected.get(step, loss):
            was, now = float.fromhex(expected[step]), float.fromhex(loss)
            yield f"step {step}: loss {now!r}, {was!r} without interruption"
