"""The policy that routes: its invariants on any input, and what "auto" chooses."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.tiers.route import (
    NAMES,
    PROBE_S,
    SWITCH,
    Decision,
    Durable,
    Figures,
    Step,
    decide,
)
from examples import examples

sizes = st.integers(0, 50)
tiers_of = st.sets(st.sampled_from(NAMES)).map(frozenset)
speeds = st.none() | st.sampled_from([0.0, float("nan"), float("inf")]) | st.floats(0.1, 1000)
durables = st.builds(
    Durable, sizes.map(lambda n: 4 * n), speeds, st.floats(0, 100), sizes, st.booleans()
)
memories = st.integers(-50, 200)
figures_of = st.builds(
    Figures,
    st.dictionaries(st.sampled_from(NAMES), durables),
    memories,
    memories,
    sizes,
    st.sampled_from(NAMES),
    st.booleans(),
)
routes = st.sampled_from(["auto", "local", "remote"])


@st.composite
def waiting(draw: st.DrawFn) -> list[Step]:
    """Each record goes on from an older step, which may wait as well."""
    steps = []
    for number in draw(st.sets(st.integers(1, 30), max_size=12)):
        follows = draw(st.none() | st.integers(0, number - 1))
        writing = draw(st.none() | st.sampled_from(NAMES))
        flags = draw(st.booleans()), writing, draw(st.booleans())
        steps.append(Step(number, draw(sizes), *flags, follows, draw(tiers_of)))
    return steps


@given(waiting(), figures_of, routes)
@settings(max_examples=examples(600), deadline=None)
def test_invariants(steps: list[Step], figures: Figures, route: str) -> None:
    found = decide(steps, figures, route)
    by_number = {step.step: step for step in steps}

    # each step that is not being written has one outcome, and none was made up
    outcomes = [*(step for step, _ in found.writes), *found.waits, *found.dropped]
    assert sorted(outcomes) == sorted(step.step for step in steps if not step.writing)

    # budgets
    spilled = [by_number[step] for step in found.spills]
    assert not any(step.is_spilled or step.writing for step in spilled)
    assert sum(step.size_bytes for step in spilled) <= max(0, figures.spill_bytes)
    for name in NAMES:
        to_it = sum(by_number[step].size_bytes for step, tier in found.writes if tier == name)
        if to_it:
            tier = figures.tiers[name]
            assert tier.answers
            assert to_it + tier.queued_bytes <= tier.free_bytes

    # what must not be dropped
    for step in (by_number[number] for number in found.dropped):
        assert figures.drops
        assert not step.is_tagged
        assert step.step != max(by_number)
        assert not any(each.follows == step.step for each in steps)
    if found.dropped:  # not in vain
        gone = {*found.spills, *found.dropped}
        freed = sum(by_number[number].size_bytes for number in gone)
        assert figures.arena_bytes + freed >= figures.need_bytes

    # a record after what it goes on from, in a tier that has that
    for at, (number, tier) in enumerate(found.writes):
        step = by_number[number]
        if before := by_number.get(step.follows):
            assert tier == before.writing or (before.step, tier) in found.writes[:at]
        elif step.follows is not None:
            assert tier in step.beside

    # the same whatever the order
    assert decide(reversed(steps), figures, route) == found


class Executor:
    """Follows decisions: each tier writes one step at a time, and may be away for a while."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.steps: dict[int, Step] = {}
        self.durable: dict[int, str] = {}
        self.lost: set[int] = set()
        self.favourite = "local"

    def used(self, *, is_spilled: bool) -> int:
        return sum(s.size_bytes for s in self.steps.values() if s.is_spilled == is_spilled)

    def decide(self, answers: dict[str, bool], **more) -> Decision:
        busy = {step.writing: step.size_bytes for step in self.steps.values() if step.writing}
        speeds = [None, 1.0, 5.0]
        tiers = {
            name: Durable(1000, self.draw.choice(speeds), 0.0, busy.get(name, 0), answers[name])
            for name in NAMES
        }
        spill = 40 - self.used(is_spilled=True)
        assert spill >= 0
        arena = 30 - self.used(is_spilled=False)
        figures = Figures(tiers, arena, spill, favourite=self.favourite, **more)
        for number, step in self.steps.items():
            if step.follows in self.durable:
                beside = frozenset({self.durable[step.follows]})
                self.steps[number] = dataclasses.replace(step, beside=beside)
        return decide(self.steps.values(), figures)

    def follow(self, found: Decision, answers: dict[str, bool]) -> None:
        self.favourite = found.favourite
        for number in found.dropped:
            self.lost.add(number)
            del self.steps[number]
        for number in found.spills:
            self.steps[number] = dataclasses.replace(self.steps[number], is_spilled=True)
        for number, tier in found.writes:
            writing = {step.writing for step in self.steps.values()}
            if tier not in writing and self.steps[number].writing is None:
                self.steps[number] = dataclasses.replace(self.steps[number], writing=tier)
        for step in [each for each in self.steps.values() if each.writing]:
            if answers[step.writing]:
                assert step.follows is None or self.durable[step.follows] == step.writing
                self.durable[step.step] = step.writing
                del self.steps[step.step]


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=examples(90), deadline=None)
def test_nothing_starves(seed: int, drops: bool) -> None:
    """Steps arrive while tiers come and go. When both answer again, all is written or was dropped
    within as many decisions as there are steps."""
    executor = Executor(seed)
    draw = executor.draw
    last: int | None = None
    for number in range(1, 40):
        is_record = last is not None and last not in executor.lost and draw.random() < 0.5
        answers = {name: draw.random() < 0.6 for name in NAMES}
        if executor.used(is_spilled=False) + 10 <= 30:
            is_tagged, follows = draw.random() < 0.1, last if is_record else None
            executor.steps[number] = Step(number, 10, is_tagged=is_tagged, follows=follows)
            last = number
        executor.follow(executor.decide(answers, need_bytes=10, drops=drops), answers)
    both = dict.fromkeys(NAMES, True)
    for _ in range(len(executor.steps) + 2):
        executor.follow(executor.decide(both), both)
    assert not executor.steps


@pytest.mark.parametrize(("remote", "first"), [(4.0, "remote"), (0.5, "local"), (None, "local")])
def test_auto_takes_the_tier_that_has_it_first(remote: float | None, first: str) -> None:
    tiers = {"local": Durable(1000, 1.0), "remote": Durable(1000, remote)}
    found = decide([Step(1, 10)], Figures(tiers))
    assert found.writes == ((1, first),)
    assert found.favourite == first


def test_auto_counts_what_is_written_already() -> None:
    tiers = {"local": Durable(1000, 1.0, queued_bytes=50), "remote": Durable(1000, 0.5)}
    assert decide([Step(1, 10)], Figures(tiers)).writes == ((1, "remote"),)


def test_auto_uses_both_where_one_is_not_enough() -> None:
    tiers = {"local": Durable(1000, 1.0), "remote": Durable(1000, 1.0)}
    found = decide([Step(n, 10) for n in range(4)], Figures(tiers))
    assert [tier for _, tier in found.writes] == ["local", "remote", "local", "remote"]


def test_auto_does_not_flap() -> None:
    """The figures vary by less than the hysteresis."""
    draw = random.Random(1)
    favourite = "local"
    for _ in range(200):
        tiers = {name: Durable(1000, draw.uniform(SWITCH, 1.0)) for name in NAMES}
        favourite = decide([Step(1, 10)], Figures(tiers, favourite=favourite)).favourite
        assert favourite == "local"


def test_another_tier_is_taken_where_the_named_one_is_away_or_full() -> None:
    away = {"local": Durable(1000, 1.0), "remote": Durable(1000, 9.0, answers=False)}
    assert decide([Step(1, 10)], Figures(away), "remote").writes == ((1, "local"),)
    full = {"local": Durable(5, 9.0), "remote": Durable(1000, 1.0)}
    assert decide([Step(1, 10)], Figures(full), "local").writes == ((1, "remote"),)


def test_what_is_unknown_or_old_is_measured_by_a_copy() -> None:
    unknown = {"local": Durable(1000, 1.0), "remote": Durable(1000, None)}
    found = decide([Step(1, 10)], Figures(unknown))
    assert (found.writes, found.probe) == (((1, "local"),), (1, "remote"))
    old = {"local": Durable(1000, 1.0), "remote": Durable(1000, 0.5, PROBE_S)}
    assert decide([Step(1, 10)], Figures(old)).probe == (1, "remote")
    new = {"local": Durable(1000, 1.0), "remote": Durable(1000, 0.5, PROBE_S - 1)}
    assert decide([Step(1, 10)], Figures(new)).probe is None
    assert decide([Step(1, 10)], Figures(old), "local").probe is None


def test_the_image_that_waits_longest_is_spilled() -> None:
    tiers = {"local": Durable(1000, 1.0, queued_bytes=10)}
    arena, spill = 0, 100
    found = decide([Step(2, 10), Step(3, 10)], Figures(tiers, arena, spill, need_bytes=10))
    assert found.spills == (2,)
    full = 5
    found = decide([Step(2, 10), Step(3, 10)], Figures(tiers, arena, full, need_bytes=10))
    assert (found.spills, found.dropped, found.waits) == ((), (), ())


def test_where_nothing_is_to_wait_the_oldest_is_dropped() -> None:
    tiers = {"local": Durable(1000, 1.0, queued_bytes=10)}
    figures = Figures(tiers, need_bytes=10, drops=True)
    steps = [Step(2, 10, is_tagged=True), Step(3, 10), Step(4, 10)]
    assert decide(steps, figures).dropped == (3,)
    assert decide(steps, dataclasses.replace(figures, need_bytes=30)).dropped == ()  # in vain
