"""Where a step becomes durable first, what moves to the second memory, what waits and what is
dropped: a pure function of measured figures.

"auto" in three sentences. A step goes to the durable tier that is expected to have it first: the
bytes before it and its own, over the bytes per second that this tier was measured to take. The one
that got the steps before keeps it, unless the other needs less than SWITCH of the time. A tier of
which nothing is known, or nothing since PROBE_S, is given a copy of a step that the other has
first, so that to find out delays nothing.

Whoever runs this asks again whenever something has changed: the first write of each tier is to be
begun, the others are what it looks like. What is durable is not asked for any more: see
keeper/copies.py for how it reaches other tiers.

Invariants:
* No budget is passed: what is spilled fits into the spill, what is written into its tier.
* A tagged step, the newest, and what a record goes on from are never dropped.
* A record goes to a tier that has what it goes on from, and after that.
* Nothing starves: the oldest is written first.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Route = Literal["auto", "local", "remote"]
Name = Literal["local", "remote"]

NAMES: tuple[Name, Name] = ("local", "remote")
SWITCH = 0.9
PROBE_S = 30.0


@dataclass(frozen=True, slots=True)
class Durable:
    """A durable tier as measured. bytes_per_s: None where that is not known. age_s: since it was
    measured. queued_bytes: of what is being written there now."""

    free_bytes: int
    bytes_per_s: float | None = None
    age_s: float = 0.0
    queued_bytes: int = 0
    answers: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is sealed, and nowhere durable. writing: the tier that it is being written into
    now. follows: the step that a record goes on from, and `beside` the tiers that have that one
    where it is durable."""

    step: int
    size_bytes: int
    is_spilled: bool = False
    writing: Name | None = None
    is_tagged: bool = False
    follows: int | None = None
    beside: frozenset[Name] = frozenset(NAMES)


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured. arena_bytes, spill_bytes: that are free there. need_bytes: of the next
    capture, 0 for none. favourite: the tier that the last decision gave. drops: whether steps are
    dropped rather than that training waits."""

    tiers: Mapping[Name, Durable]
    arena_bytes: int = 0
    spill_bytes: int = 0
    need_bytes: int = 0
    favourite: Name = "local"
    drops: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. writes: steps and tiers, in order. spills: steps, from the arena to the spill.
    waits: steps that no tier can take now. dropped: steps that will be nowhere. probe: a step that
    should also go to the tier that it will not be in, to measure that."""

    writes: tuple[tuple[int, Name], ...]
    spills: tuple[int, ...]
    waits: tuple[int, ...]
    dropped: tuple[int, ...]
    favourite: Name
    probe: tuple[int, Name] | None


def decide(steps: Iterable[Step], figures: Figures, route: Route = "auto") -> Decision:
    """What becomes of the steps that wait. Deterministic, whatever order they come in."""
    waiting = sorted(steps, key=lambda each: each.step)
    plan = _Plan(figures, route, waiting)
    for each in waiting:
        if not each.writing:
            plan.place(each)
    spills, dropped = _make_room(waiting, figures, plan.begun())
    writes = [(step, tier) for step, tier in plan.writes if step not in dropped]
    busy = {*dropped, *(step for step, _ in writes)}
    return Decision(
        tuple(writes),
        tuple(spills),
        tuple(each.step for each in waiting if not each.writing and each.step not in busy),
        tuple(dropped),
        plan.favourite,
        _probe(waiting, writes, figures) if route == "auto" else None,
    )


class _Plan:
    """Writes, one after the other. Each tier takes what it is given in that order."""

    def __init__(self, figures: Figures, route: Route, waiting: Sequence[Step]) -> None:
        self.writes: list[tuple[int, Name]] = []
        self.favourite: Name = figures.favourite if route == "auto" else route
        self._is_auto = route == "auto"
        self._tiers = figures.tiers
        self._queued = {name: tier.queued_bytes for name, tier in figures.tiers.items()}
        self._goes_to = {each.step: each.writing for each in waiting}
        self._is_decided = False

    def begun(self) -> set[int]:
        """The steps whose write begins now: the first of each tier that writes nothing."""
        firsts = {tier: step for step, tier in reversed(self.writes)}
        return {step for tier, step in firsts.items() if not self._tiers[tier].queued_bytes}

    def place(self, step: Step) -> None:
        """Give the step to a tier, or to none."""
        if possible := [name for name in NAMES if self._can_take(name, step)]:
            name = self._choose(possible, step)
            self.writes.append((step.step, name))
            self._queued[name] += step.size_bytes
            self._goes_to[step.step] = name

    def _can_take(self, name: Name, step: Step) -> bool:
        tier = self._tiers.get(name)
        if tier is None or not tier.answers:
            return False
        if self._queued[name] + step.size_bytes > tier.free_bytes:
            return False
        if step.follows in self._goes_to:
            return self._goes_to[step.follows] == name
        return step.follows is None or name in step.beside

    def _choose(self, possible: Sequence[Name], step: Step) -> Name:
        """The favourite, unless another one is expected to be faster. What all steps but the first
        would do does not make another one the favourite: their turn comes."""
        favourite = self.favourite if self.favourite in possible else possible[0]
        if not self._is_auto:
            return favourite
        times = {name: self._expected_s(name, step.size_bytes) for name in possible}
        best = min(possible, key=lambda name: (times[name], name != favourite))
        if times[best] >= SWITCH * times[favourite]:
            best = favourite
        if step.follows is None and not self._is_decided:
            self.favourite, self._is_decided = best, True
        return best

    def _expected_s(self, name: Name, size: int) -> float:
        """Until a step of that size is durable there."""
        speed = self._tiers[name].bytes_per_s
        if speed is None or not speed > 0:
            return math.inf
        return (self._queued[name] + size) / speed


def _make_room(
    steps: Sequence[Step], figures: Figures, begun: set[int]
) -> tuple[list[int], list[int]]:
    """What is spilled, and what is dropped, oldest first, so that the next capture has memory. What
    does not help is not dropped."""
    need = figures.need_bytes - figures.arena_bytes
    room = figures.spill_bytes
    kept = {each.follows for each in steps} | {max((each.step for each in steps), default=0)}
    spills: list[int] = []
    dropped: list[int] = []
    for each in steps:
        if need <= 0 or each.writing or each.is_spilled or each.step in begun:
            continue
        if each.size_bytes <= room:
            spills.append(each.step)
            room -= each.size_bytes
        elif figures.drops and not each.is_tagged and each.step not in kept:
            dropped.append(each.step)
        else:
            continue
        need -= each.size_bytes
    return spills, dropped if need <= 0 else []


def _probe(
    steps: Sequence[Step], writes: Sequence[tuple[int, Name]], figures: Figures
) -> tuple[int, Name] | None:
    """A tier that should be measured, and the newest whole state that goes to another one."""
    whole = {each.step: each.size_bytes for each in steps if each.follows is None}
    wanted = {tier for _, tier in writes}
    for name in NAMES:
        tier = figures.tiers.get(name)
        if tier is None or not tier.answers or tier.queued_bytes or name in wanted:
            continue
        if tier.bytes_per_s is not None and tier.age_s < PROBE_S:
            continue
        fits = [step for step, _ in writes if whole.get(step, math.inf) <= tier.free_bytes]
        if fits:
            return max(fits), name
    return None
