"""The policy that routes: its invariants on any input, and what "auto" chooses."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.tiers.route import (
    HALF_LIFE_S,
    NAMES,
    PROBE_S,
    SWITCH,
    Decision,
    Durable,
    Figures,
    Memory,
    Step,
    Throughput,
    decide,
)
from examples import examples

GIGA = 10**9
LOCAL, REMOTE = frozenset({"local"}), frozenset({"remote"})

sizes = st.integers(0, 50)
tiers_of = st.sets(st.sampled_from(NAMES)).map(frozenset)
speeds = st.none() | st.sampled_from([0.0, float("nan"), float("inf")]) | st.floats(0.1, 1000)
durables = st.builds(
    Durable, sizes.map(lambda n: 4 * n), speeds, st.floats(0, 100), sizes, st.booleans()
)
memories = st.builds(Memory, st.integers(0, 200), st.integers(0, 250))
figures_of = st.builds(
    Figures,
    st.dictionaries(st.sampled_from(NAMES), durables),
    memories,
    memories,
    sizes,
    st.sampled_from(NAMES),
    st.booleans(),
    st.integers(0, 200),
)
routes = st.sampled_from(["auto", "local", "remote"])


@st.composite
def waiting(draw: st.DrawFn) -> list[Step]:
    steps = draw(
        st.lists(
            st.builds(
                Step,
                st.integers(0, 30),
                sizes,
                st.sampled_from(["arena", "spill"]),
                tiers_of,
                tiers_of,
                st.none() | st.sampled_from(NAMES),
                st.booleans(),
                st.none() | st.integers(0, 30),
                tiers_of,
            ),
            max_size=12,
            unique_by=lambda step: step.step,
        )
    )
    return [dataclasses.replace(s, place="tier" if s.durable else s.place) for s in steps]


def kept(steps: list[Step]) -> set[int]:
    """Tagged ones, and all that they go on from."""
    found = {step.step for step in steps if step.is_tagged}
    for step in sorted(steps, key=lambda each: -each.step):
        if step.step in found and step.follows is not None and step.follows < step.step:
            found.add(step.follows)
    return found


def hopeless(steps: list[Step]) -> set[int]:
    """Records of which no tier has, or can have, what they go on from."""
    found: set[int] = set()
    numbers = {step.step for step in steps}
    for step in sorted(steps, key=lambda each: each.step):
        follows = step.follows
        is_waiting = follows in numbers
        if follows is None or step.durable or step.writing or (is_waiting and follows >= step.step):
            continue
        if follows in found or not (is_waiting or step.beside):
            found.add(step.step)
    return found


@given(waiting(), figures_of, routes)
@settings(max_examples=examples(600), deadline=None)
def test_invariants(steps: list[Step], figures: Figures, route: str) -> None:
    found = decide(steps, figures, route)
    by_number = {step.step: step for step in steps}
    written = {step for step, _ in found.writes}

    # each step that is not being written has one outcome, and none was made up
    outcomes = [*written, *found.waits, *found.dropped, *found.given_up]
    assert sorted(outcomes) == sorted(step.step for step in steps if not step.writing)

    # budgets
    spilled = [by_number[step] for step in found.spills]
    assert all(step.place == "arena" and not step.writing for step in spilled)
    freed = sum(by_number[s].size_bytes for s in found.dropped if by_number[s].place == "spill")
    assert sum(step.size_bytes for step in spilled) <= figures.spill.free_bytes + freed
    for name in NAMES:
        to_it = sum(by_number[step].size_bytes for step, tier in found.writes if tier == name)
        if to_it:
            tier = figures.tiers[name]
            assert tier.answers
            assert to_it + tier.queued_bytes <= tier.free_bytes

    # promises
    newest = max(by_number, default=None)
    for step in (by_number[number] for number in set(found.dropped) - hopeless(steps)):
        assert figures.drops
        assert not step.promised
        assert not step.durable
        assert step.step != newest
        assert not step.is_tagged
        assert not any(each.follows == step.step < each.step for each in steps)
    assert hopeless(steps) <= set(found.dropped)
    for number in found.given_up:
        assert by_number[number].durable

    # a record after what it goes on from, in a tier that has that
    for at, (number, tier) in enumerate(found.writes):
        step = by_number[number]
        before = by_number.get(step.follows)
        assert tier not in step.durable
        if before and before.step < number:
            has = before.durable | {before.writing}
            assert tier in has or (before.step, tier) in found.writes[:at]
        elif step.follows is not None and before is None:
            assert tier in step.beside

    # the same whatever the order
    assert decide(reversed(steps), figures, route) == found


@given(waiting(), figures_of)
@settings(deadline=None)
def test_only_the_backlog_that_was_promised_too_much_is_given_up(steps, figures) -> None:
    """Of whole states: none that is tagged, and no more than had to be."""
    steps = [dataclasses.replace(step, follows=None) for step in steps]
    found = decide(steps, figures)
    missing = {s.step: s for s in steps if s.durable and s.missing & figures.tiers.keys()}
    lost = [missing[number] for number in found.given_up if number in missing]
    left = [s for s in missing.values() if s not in lost and not s.writing]
    assert not any(step.is_tagged for step in lost)
    size = sum(step.size_bytes for step in left)
    assert size <= figures.backlog_bytes or all(step.is_tagged for step in left)
    if lost:  # not more than had to
        assert size + max(lost, key=lambda each: each.step).size_bytes > figures.backlog_bytes


class Executor:
    """Follows decisions: each tier writes one step at a time, and may be away for a while."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.steps: dict[int, Step] = {}
        self.durable: dict[int, frozenset[str]] = {}
        self.lost: set[int] = set()
        self.favourite = "local"

    def used(self, place: str) -> int:
        return sum(step.size_bytes for step in self.steps.values() if step.place == place)

    def add(self, step: Step) -> None:
        """It goes on from a step that is here, or from one that is settled."""
        beside = self.durable.get(step.follows, frozenset())
        self.steps[step.step] = dataclasses.replace(step, beside=beside)

    def decide(self, answers: dict[str, bool], **more) -> Decision:
        busy = {step.writing: step.size_bytes for step in self.steps.values() if step.writing}
        speeds = [None, 1.0, 5.0]
        tiers = {
            name: Durable(1000, self.draw.choice(speeds), 0.0, busy.get(name, 0), answers[name])
            for name in NAMES
        }
        spill = Memory(40, self.used("spill"))
        assert spill.used_bytes <= spill.budget_bytes
        arena = Memory(30, self.used("arena"))
        figures = Figures(tiers, arena, spill, favourite=self.favourite, **more)
        for number, step in self.steps.items():
            if step.follows is not None and step.follows not in self.steps:
                beside = self.durable.get(step.follows, frozenset())
                self.steps[number] = dataclasses.replace(step, beside=beside)
        return decide(self.steps.values(), figures)

    def follow(self, found: Decision, answers: dict[str, bool]) -> None:
        self.favourite = found.favourite
        for number in (*found.dropped, *found.given_up):
            self.lost |= {number} & set(found.dropped)
            del self.steps[number]
        for number in found.spills:
            self.steps[number] = dataclasses.replace(self.steps[number], place="spill")
        for number, tier in found.writes:
            writing = {step.writing for step in self.steps.values()}
            if tier not in writing and self.steps[number].writing is None:
                self.steps[number] = dataclasses.replace(self.steps[number], writing=tier)
        for step in [each for each in self.steps.values() if each.writing]:
            if answers[step.writing]:
                self.end(step)

    def end(self, step: Step) -> None:
        follows = step.follows
        assert follows is None or step.writing in self.durable.get(follows, ())
        self.durable[step.step] = step.durable | {step.writing}
        step = dataclasses.replace(
            step, durable=self.durable[step.step], place="tier", writing=None
        )
        self.steps[step.step] = step
        if not step.missing:
            del self.steps[step.step]


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=examples(90), deadline=None)
def test_nothing_starves(seed: int, drops: bool) -> None:
    """Steps arrive while tiers come and go. When both answer again, all is written or was given up
    within as many decisions as there are steps and tiers."""
    executor = Executor(seed)
    draw = executor.draw
    last: int | None = None
    for number in range(1, 40):
        is_record = last is not None and draw.random() < 0.5
        promised = draw.choice([frozenset(), frozenset(), REMOTE])
        follows = last if is_record and last not in executor.lost else None
        used = sum(s.size_bytes for s in executor.steps.values() if s.place == "arena")
        answers = {name: draw.random() < 0.6 for name in NAMES}
        if used + 10 <= 30:
            executor.add(
                Step(number, 10, "arena", promised, is_tagged=draw.random() < 0.1, follows=follows)
            )
            last = number
        executor.follow(
            executor.decide(answers, need_bytes=10, drops=drops, backlog_bytes=60), answers
        )
    both = dict.fromkeys(NAMES, True)
    for _ in range(2 * len(executor.steps) + 4):
        executor.follow(executor.decide(both), both)
    assert not executor.steps


def test_a_tagged_step_is_copied_though_others_come_all_the_time() -> None:
    """The remote tier writes one step in each round, and as many arrive that are due there."""
    tagged = Step(1, 10, "tier", REMOTE, LOCAL, is_tagged=True)
    steps = [tagged, *(Step(n, 10, "arena") for n in (2, 3))]
    tiers = {"remote": Durable(1000, 10.0)}
    assert decide(steps, Figures(tiers), "remote").writes[0] == (1, "remote")


def test_the_backlog_is_copied_newest_first_each_base_before_its_records() -> None:
    steps = [
        Step(1, 10, "tier", REMOTE, LOCAL),
        Step(2, 10, "tier", REMOTE, LOCAL),
        Step(3, 10, "tier", REMOTE, LOCAL, follows=2),
        Step(4, 10, "tier", REMOTE, LOCAL, follows=3),
    ]
    found = decide(steps, Figures({"remote": Durable(1000, 10.0)}))
    assert [step for step, _ in found.writes] == [2, 3, 4, 1]


def test_a_backlog_that_is_too_long_loses_its_oldest() -> None:
    steps = [Step(n, 10, "tier", REMOTE, LOCAL, is_tagged=n == 1) for n in range(1, 6)]
    found = decide(steps, Figures({"remote": Durable(1000, answers=False)}, backlog_bytes=30))
    assert found.given_up == (2, 3)
    assert found.waits == (1, 4, 5)


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
    arena, spill = Memory(30, 30), Memory(100, 0)
    found = decide([Step(2, 10), Step(3, 10)], Figures(tiers, arena, spill, need_bytes=10))
    assert found.spills == (2,)
    full = Memory(100, 95)
    found = decide([Step(2, 10), Step(3, 10)], Figures(tiers, arena, full, need_bytes=10))
    assert (found.spills, found.dropped, found.waits) == ((), (), ())


def test_where_nothing_is_to_wait_the_oldest_is_dropped() -> None:
    tiers = {"local": Durable(1000, 1.0, queued_bytes=10)}
    figures = Figures(tiers, Memory(40, 40), need_bytes=10, drops=True)
    steps = [Step(2, 10, is_tagged=True), Step(3, 10), Step(4, 10)]
    assert decide(steps, figures).dropped == (3,)
    assert decide(steps, dataclasses.replace(figures, need_bytes=30)).dropped == ()  # in vain


def test_an_estimate_follows_a_change_within_three_half_lives() -> None:
    for before, after in itertools.permutations((1 * GIGA, 4 * GIGA)):
        speed, now = Throughput(), 0.0

        def write(rate: float, until: float, speed: Throughput = speed, now: float = 0.0) -> float:
            while now < until:
                speed.begin(GIGA // 2, now)
                now += GIGA / 2 / rate
                speed.end(now)
            return now

        now = write(before, 60.0)
        assert speed.bytes_per_s(now) == pytest.approx(before)
        now = write(after, now + 3 * HALF_LIFE_S, now=now)
        assert abs(speed.bytes_per_s(now) - after) <= abs(after - before) * 0.14


def test_a_write_that_hangs_counts_before_it_ends() -> None:
    speed = Throughput()
    assert speed.bytes_per_s(0.0) is None
    speed.begin(GIGA, 0.0)
    assert speed.bytes_per_s(5.0) is None
    speed.end(1.0)
    speed.begin(GIGA, 1.0)
    assert speed.bytes_per_s(1.5) == GIGA
    assert speed.bytes_per_s(11.0) == GIGA / 10
    speed.end(12.0, has_failed=True)
    assert speed.bytes_per_s(12.0) == GIGA
    assert speed.age_s(12.0) == 11.0
