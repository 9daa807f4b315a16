"""Where a step goes first, what moves to the second memory, what waits and what is given up: a pure
function of measured figures.

"auto" in three sentences. A step goes to the durable tier that is expected to have it first: the
bytes before it and its own, over the bytes per second that this tier was measured to take. The one
that got the steps before keeps it, unless the other needs less than SWITCH of the time. A tier of
which nothing is known, or nothing since PROBE_S, is given a copy of a step that the other has
first, so that to find out delays nothing.

Whoever runs this asks again whenever something has changed (a step was sealed, or written; a tier
answers again): the first write of each tier is to be begun, the others are what it looks like.

Invariants:
* No budget is passed: what is spilled fits into the spill, what is written into its tier.
* What was promised is kept: a tagged step, and what it goes on from, is never given up, one that a
  tier must have, or that is the newest, never before it is durable. (But a record is, whatever it
  was promised, where no tier has what it goes on from, nor will.)
* A record goes to a tier that has what it goes on from, and after that.
* Nothing starves: what is nowhere durable is written oldest first, after tagged steps; the rest is
  copied newest first, and what exceeds the backlog is given up.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Route = Literal["auto", "local", "remote"]
Name = Literal["local", "remote"]
Place = Literal["arena", "spill", "tier"]

NAMES: tuple[Name, Name] = ("local", "remote")
SWITCH = 0.9
PROBE_S = 30.0
HALF_LIFE_S = 5.0


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
class Memory:
    """The arena, or the spill."""

    budget_bytes: int = 0
    used_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """What fits in."""
        return max(0, self.budget_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is sealed, and not yet in all the tiers that it must reach.

    place: where its bytes are taken from. promised: the tiers that must have it. durable: those
    that do. writing: one that it is being written into now. follows: the step that a record goes on
    from, and `beside` the tiers that have that one where it is not among the steps itself.
    """

    step: int
    size_bytes: int
    place: Place = "arena"
    promised: frozenset[Name] = frozenset()
    durable: frozenset[Name] = frozenset()
    writing: Name | None = None
    is_tagged: bool = False
    follows: int | None = None
    beside: frozenset[Name] = frozenset(NAMES)

    @property
    def missing(self) -> frozenset[Name]:
        """Tiers that it was promised to, and that have it not."""
        return self.promised - self.durable


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured. need_bytes: of the next capture, 0 for none. favourite: the tier that the
    last decision gave. drops: whether steps that were promised nothing are given up rather than
    that training waits. backlog_bytes: of steps that are durable, and must reach another tier."""

    tiers: Mapping[Name, Durable]
    arena: Memory = field(default_factory=Memory)
    spill: Memory = field(default_factory=Memory)
    need_bytes: int = 0
    favourite: Name = "local"
    drops: bool = False
    backlog_bytes: int = 1 << 62


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. writes: steps and tiers, in order. spills: steps, from the arena to the spill.
    waits: steps that no tier can take now. dropped: steps that will be nowhere. given_up: durable
    steps that are not copied to another tier any more. probe: a step that should also go to the
    tier that it will not be in, to measure that."""

    writes: tuple[tuple[int, Name], ...]
    spills: tuple[int, ...]
    waits: tuple[int, ...]
    dropped: tuple[int, ...]
    given_up: tuple[int, ...]
    favourite: Name
    probe: tuple[int, Name] | None


def decide(steps: Iterable[Step], figures: Figures, route: Route = "auto") -> Decision:
    """What becomes of the steps that wait. Deterministic, whatever order they come in."""
    waiting, hopeless = _attainable(_with_promises(steps), frozenset(figures.tiers))
    given_up = _given_up(waiting, figures.backlog_bytes)
    left = [each for each in waiting if each.step not in given_up and not each.writing]
    plan = _Plan(figures, route, waiting)
    for each in _in_order(left):
        plan.place(each)
    spills, dropped = _make_room(waiting, figures, plan.begun())
    writes = tuple((step, tier) for step, tier in plan.writes if step not in dropped)
    ended = {*dropped, *(step for step, _ in writes)}
    return Decision(
        writes,
        spills,
        tuple(each.step for each in left if each.step not in ended),
        tuple(sorted((*hopeless, *dropped))),
        given_up,
        plan.favourite,
        _probe(left, writes, figures) if route == "auto" else None,
    )


def _with_promises(steps: Iterable[Step]) -> list[Step]:
    """By number; what a record was promised is promised to what it goes on from, too."""
    found = {each.step: each for each in steps}
    for number in sorted(found, reverse=True):
        each = found[number]
        before = found.get(each.follows) if each.follows is not None else None
        if before and before.step >= number:  # nonsense: it would wait for itself
            found[number] = replace(each, follows=None)
        elif before:
            promised = before.promised | each.promised
            is_tagged = before.is_tagged or each.is_tagged
            found[before.step] = replace(before, promised=promised, is_tagged=is_tagged)
    return [found[number] for number in sorted(found)]


def _attainable(steps: Sequence[Step], tiers: frozenset[Name]) -> tuple[list[Step], list[int]]:
    """Without promises that cannot be kept any more, as no such tier is there, or it will never
    have what a record goes on from; and the records of which that holds for all tiers."""
    reach: dict[int, frozenset[Name]] = {}
    found, hopeless = [], []
    for each in steps:
        possible = frozenset(NAMES)
        if each.follows is not None:
            possible = reach.get(each.follows, each.beside)
        promised = each.promised & possible & tiers
        if not (possible or each.durable or each.writing):
            hopeless.append(each.step)
        else:
            found.append(replace(each, promised=promised) if each.durable else each)
        will_be = each.durable | promised | ({each.writing} if each.writing else frozenset())
        reach[each.step] = will_be if each.durable or not possible else possible
    return found, hopeless


def _given_up(waiting: Sequence[Step], backlog_bytes: int) -> tuple[int, ...]:
    """What is durable and needs nothing more; and the oldest of what should still be copied, with
    the records that go on from it, until the rest is no more than the backlog."""
    settled = [each for each in waiting if each.durable and not each.writing]
    backlog = [each for each in settled if each.missing]
    size = sum(each.size_bytes for each in backlog)
    lost: list[int] = []
    for each in backlog:
        if not each.is_tagged and (size > backlog_bytes or each.follows in lost):
            lost.append(each.step)
            size -= each.size_bytes
    return tuple(each.step for each in settled if not each.missing or each.step in lost)


def _in_order(steps: Sequence[Step]) -> list[Step]:
    """Tagged ones that are durable; what is nowhere durable; the rest newest first, each after what
    it goes on from."""
    copied = [each for each in steps if each.durable and each.missing]
    tagged = [each for each in copied if each.is_tagged]
    first = [each for each in steps if not each.durable]
    rest: dict[int, Step] = {}
    by_number = {each.step: each for each in copied}
    for newest in reversed(copied):
        chain: list[Step] = []
        each: Step | None = newest
        while each and each.step not in rest:
            chain.append(each)
            each = by_number.get(each.follows) if each.follows is not None else None
        rest.update((each.step, each) for each in reversed(chain))
    return [*tagged, *first, *(each for each in rest.values() if not each.is_tagged)]


class _Plan:
    """Writes, one after the other. Each tier takes what it is given in that order."""

    def __init__(self, figures: Figures, route: Route, waiting: Sequence[Step]) -> None:
        self.writes: list[tuple[int, Name]] = []
        self.favourite: Name = figures.favourite if route == "auto" else route
        self._is_auto = route == "auto"
        self._figures = figures
        self._queued = {name: tier.queued_bytes for name, tier in figures.tiers.items()}
        self._went = {
            each.step: each.durable | ({each.writing} if each.writing else set())
            for each in waiting
        }
        self._moved = False

    def begun(self) -> set[int]:
        """The steps whose write begins now: the first of each tier that writes nothing."""
        idle = {name for name, tier in self._figures.tiers.items() if not tier.queued_bytes}
        firsts: dict[Name, int] = {}
        for step, tier in self.writes:
            firsts.setdefault(tier, step)
        return {step for tier, step in firsts.items() if tier in idle}

    def place(self, step: Step) -> None:
        """Give the step to the tier that it reaches next, or to none."""
        possible = [name for name in NAMES if self._can_take(name, step)]
        if step.durable:
            possible = [name for name in possible if name in step.missing]
        if possible:
            name = self._choose(possible, step)
            self.writes.append((step.step, name))
            self._queued[name] += step.size_bytes
            self._went[step.step] = step.durable | {name}

    def _can_take(self, name: Name, step: Step) -> bool:
        tier = self._figures.tiers.get(name)
        if tier is None or not tier.answers:
            return False
        if self._queued[name] + step.size_bytes > tier.free_bytes:
            return False
        return step.follows is None or name in self._went.get(step.follows, step.beside)

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
        if not step.durable and step.follows is None and not self._moved:
            self.favourite, self._moved = best, True
        return best

    def _expected_s(self, name: Name, size: int) -> float:
        """Until a step of that size is durable there."""
        tier = self._figures.tiers[name]
        speed = tier.bytes_per_s
        if speed is None or not speed > 0:
            return math.inf
        return (self._queued[name] + size) / speed


def _make_room(
    steps: Sequence[Step], figures: Figures, begun: set[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is spilled, and what is dropped, oldest first, so that the next capture has memory. What
    does not help is not dropped."""
    need = figures.need_bytes - figures.arena.free_bytes
    spill = figures.spill.free_bytes
    busy = begun | {each.step for each in steps if each.writing}
    held = [each for each in steps if each.step not in busy and each.place != "tier"]
    movable = [each for each in held if each.place == "arena"]
    victims = _droppable(steps, held) if figures.drops else []
    spills: list[int] = []
    dropped: list[int] = []
    spilled_before: int | None = None
    while need > 0:
        if moved := next((each for each in movable if each.size_bytes <= spill), None):
            movable.remove(moved)
            victims = [each for each in victims if each is not moved]
            spills.append(moved.step)
            need, spill = need - moved.size_bytes, spill - moved.size_bytes
            continue
        lost = next((each for each in victims if movable or each.place == "arena"), None)
        if lost is None:
            break
        spilled_before = len(spills) if spilled_before is None else spilled_before
        victims.remove(lost)
        dropped.append(lost.step)
        if lost.place == "arena":
            movable.remove(lost)
            need -= lost.size_bytes
        else:
            spill += lost.size_bytes
    if need > 0 and dropped:
        return tuple(spills[:spilled_before]), ()
    return tuple(spills), tuple(dropped)


def _droppable(steps: Sequence[Step], held: Sequence[Step]) -> list[Step]:
    """What was promised nothing: it is nowhere durable, no tier must have it, no record goes on
    from it, and it is not the newest, from which a crash would be recovered."""
    followed = {each.follows for each in steps}
    newest = max((each.step for each in steps), default=-1)
    return [
        each
        for each in held
        if not (each.promised or each.durable or each.is_tagged)
        and each.step not in followed
        and each.step != newest
    ]


def _probe(
    steps: Sequence[Step], writes: Sequence[tuple[int, Name]], figures: Figures
) -> tuple[int, Name] | None:
    """A tier that should be measured, and the newest whole state that goes to another one."""
    whole = {each.step: each for each in steps if each.follows is None and not each.durable}
    wanted = {name for each in steps for name in each.missing} | {tier for _, tier in writes}
    for name in NAMES:
        tier = figures.tiers.get(name)
        if tier is None or not tier.answers or tier.queued_bytes or name in wanted:
            continue
        if tier.bytes_per_s is not None and tier.age_s < PROBE_S:
            continue
        fits = [s for s, _ in writes if s in whole and whole[s].size_bytes <= tier.free_bytes]
        if fits:
            return max(fits), name
    return None


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

    def end(self, now: float, *, has_failed: bool = False) -> None:
        """It is over; one that has failed says nothing."""
        if self._running is None:
            return
        began, size = self._running
        self._running = None
        if has_failed or now <= began or not size:
            return
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
