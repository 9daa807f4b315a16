"""The policy: its invariants on any figures, and what "auto" chooses."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.tiers.route import NAMES, PROBE_S, SWITCH, Durable, choose, next_copy, next_spill
from examples import examples

speeds = st.none() | st.sampled_from([0.0, float("nan"), float("inf")]) | st.floats(0.1, 1000)
durables = st.builds(Durable, st.integers(0, 200), speeds, st.floats(0, 100))
tiers_of = st.dictionaries(st.sampled_from(NAMES), durables)
routes = st.sampled_from(["auto", "local", "remote"])


@given(st.integers(0, 250), tiers_of, st.sampled_from(NAMES), routes)
@settings(max_examples=examples(600))
def test_a_tier_that_can_take_it_gets_it(size, tiers, favourite, route) -> None:
    found = choose(size, tiers, favourite, route)
    able = [name for name, tier in tiers.items() if size <= tier.free_bytes]
    assert (found in able) if able else (found is None)
    if route in able:
        assert found == route


@pytest.mark.parametrize(("remote", "first"), [(4.0, "remote"), (0.5, "local"), (None, "local")])
def test_auto_takes_the_tier_that_has_it_first(remote: float | None, first: str) -> None:
    tiers = {"local": Durable(1000, 1.0), "remote": Durable(1000, remote)}
    assert choose(10, tiers, "local") == first


def test_auto_does_not_flap() -> None:
    """The figures vary by less than the hysteresis."""
    draw = random.Random(1)
    favourite = "local"
    for _ in range(200):
        tiers = {name: Durable(1000, draw.uniform(SWITCH, 1.0)) for name in NAMES}
        favourite = choose(10, tiers, favourite)
        assert favourite == "local"


def test_another_tier_is_taken_where_the_named_one_is_away_or_full() -> None:
    away = {"local": Durable(1000, 1.0)}
    assert choose(10, away, "local", "remote") == "local"
    full = {"local": Durable(5, 9.0), "remote": Durable(1000, 1.0)}
    assert choose(10, full, "local", "local") == "remote"


def test_what_was_measured_long_ago_is_unknown() -> None:
    assert Durable(1000).is_unknown
    assert Durable(1000, 1.0, PROBE_S).is_unknown
    assert not Durable(1000, 1.0, PROBE_S - 1).is_unknown


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 9)), st.integers(0, 40), st.booleans())
def test_what_is_spilled_has_room_and_waits_longest(waiting, room, is_writing) -> None:
    budget = room
    while (moved := next_spill(waiting, room, is_writing=is_writing)) is not None:
        older = [number for number in waiting if number < moved]
        spared = older[:0] if is_writing else [min(waiting)]
        assert moved not in spared
        assert all(waiting[number] > room for number in older if number not in spared)
        room -= waiting.pop(moved)
    assert 0 <= room <= budget
    left = sorted(waiting)[0 if is_writing else 1 :]
    assert all(waiting[number] > room for number in left)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 5),
)
@settings(max_examples=examples(300))
def test_a_slow_tier_gets_the_newest_and_all_that_is_tagged(turns, backlog_max) -> None:
    """In each turn some steps come, tagged ones or not, and one is copied."""
    waiting, tagged, copied, dropped = set(), set(), [], set()
    had_newest, number = False, 0
    for count, is_tagged in [*turns, *[(0, False)] * 400]:
        new = {(number + each, 1) for each in range(count)}
        number += count
        waiting |= new
        tagged |= new if is_tagged else set()
        if not waiting:
            continue
        name, given_up = next_copy(waiting, tagged, backlog_max, had_newest=had_newest)
        assert name in waiting
        assert name in tagged or name == max(waiting)
        assert not {*given_up} & {*tagged, max(waiting)}
        had_newest = name == max(waiting)
        waiting -= {name, *given_up}
        assert len(waiting - tagged) <= backlog_max
        copied.append(name)
        dropped |= {*given_up}
    assert not waiting
    assert tagged <= {*copied}
    assert len(copied) + len(dropped) == number


@pytest.mark.parametrize("are_all_tagged", [False, True])
def test_a_tagged_step_waits_for_one_other_at_most(are_all_tagged) -> None:
    """However fast new ones come."""
    waiting, tagged, copied, had_newest = {(1, 1)}, {(1, 1)}, [], False
    for step in (2, 3):
        waiting.add((step, 1))
        tagged |= waiting if are_all_tagged else set()
        name, _ = next_copy(waiting, tagged, 3, had_newest=had_newest)
        had_newest = name == max(waiting)
        waiting.remove(name)
        copied.append(name)
    assert copied == [(2, 1), (1, 1)]
