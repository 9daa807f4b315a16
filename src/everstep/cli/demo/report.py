"""What the event logs of a demo say: kills, and whether both runs are equal. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

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


class Span(NamedTuple):
    """From one event of a step to another, in seconds. `done`: the other came."""

    step: int
    begin: float
    end: float
    done: bool


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

    @property
    def trace(self) -> list[Event]:
        """Those after which it was at something else."""
        return [event for event in self.events if event["event"] in PHASES]

    def all(self, name: str) -> list[Event]:
        """All events of this name."""
        return [event for event in self.events if event["event"] == name]

    def spans(self, first: str, last: str) -> list[Span]:
        """Of each step that has the first event: up to the last one, or to the attempt's end."""
        ends = {event["step"]: event["at"] for event in self.all(last)}
        steps = [(event["step"], event["at"]) for event in self.all(first)]
        return [Span(n, begin, ends.get(n, self.end), n in ends) for n, begin in steps]


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: when, where it hit, and what it cost. None: killed again before that was known.

    `saving`: the steps that were not durable yet; `returned`: the newest one of which step() had;
    `base`, `records`: the state that was restored, and how many records were replayed after it;
    `lost`: steps that had returned, and were trained again.
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
    lost: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """All that the demo found out. `problems` is empty where all is as promised; `state`: see
    trainer.py; `losses_again`: of those compared, the ones that a kill had computed again."""

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


def make_report(settings: Settings, killed: list[Event], reference: list[Event]) -> Report:
    """Reads the logs of both runs."""
    kills = tuple(_kills(split_attempts(killed)))
    steps = [event["step"] for event in killed if event["event"] == "trained"]
    states = [event["state"] for event in reference if event["event"] == "compared"]
    state = states[0] if states else {"differences": ["the two were not compared"]}
    problems = [
        f"kill {number}: {kill.lost} steps lost (step() of {kill.returned} had returned, "
        f"{kill.restored} was restored)"
        for number, kill in enumerate(kills, 1)
        if kill.lost is not None and kill.lost > settings.lost_max
    ]
    problems += _loss_problems(settings.steps, killed, reference)
    problems += [f"final state: {difference}" for difference in state["differences"]]
    again = len(steps) - len(set(steps))
    return Report(settings, kills, tuple(problems), len(steps), again, state)


def split_attempts(events: Sequence[Event]) -> list[Attempt]:
    """The lives of the trainer, in their order."""
    starts = [index for index, event in enumerate(events) if event["event"] == "spawn"]
    return [Attempt(events[begin:end]) for begin, end in pairwise([*starts, len(events)])]


def _kills(attempts: Sequence[Attempt]) -> Iterator[Kill]:
    returned = 0
    for attempt, following in pairwise(attempts):
        if done := attempt.all("returned") or attempt.all("restored"):
            returned = done[-1]["step"]
        last, began = attempt.trace[-1], following.all("begin")
        said = next(iter(following.all("restored")), {})
        restored = said.get("step")
        yield Kill(
            at_s=attempt.end,
            step=last.get("step"),
            phase=PHASES[last["event"]],
            saving=tuple(save.step for save in attempt.spans("saving", "durable") if not save.done),
            returned=returned,
            restored=restored,
            base=said.get("base"),
            records=said.get("records"),
            again_s=began[0]["at"] - following.begin if began else None,
            lost=None if restored is None else max(0, returned - restored),
        )


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
