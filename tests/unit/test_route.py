"""The policy that routes: its invariants on any figures, and what "auto" chooses."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.tiers.route import NAMES, PROBE_S, SWITCH, Durable, choose
from examples import examples

speeds = st.none() | st.sampled_from([0.0, float("nan"), float("inf")]) | st.floats(0.1, 1000)
durables = st.builds(Durable, st.integers(0, 200), speeds, st.floats(0, 100), st.booleans())
tiers_of = st.dictionaries(st.sampled_from(NAMES), durables)
routes = st.sampled_from(["auto", "local", "remote"])


@given(st.integers(0, 250), tiers_of, st.sampled_from(NAMES), routes)
@settings(max_examples=examples(600), deadline=None)
def test_a_tier_that_can_take_it_gets_it(size, tiers, favourite, route) -> None:
    found = choose(size, tiers, favourite, route)
    able = [name for name, tier in tiers.items() if tier.answers and size <= tier.free_bytes]
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
    away = {"local": Durable(1000, 1.0), "remote": Durable(1000, 9.0, answers=False)}
    assert choose(10, away, "local", "remote") == "local"
    full = {"local": Durable(5, 9.0), "remote": Durable(1000, 1.0)}
    assert choose(10, full, "local", "local") == "remote"


def test_what_was_measured_long_ago_is_unknown() -> None:
    assert Durable(1000).is_unknown
    assert Durable(1000, 1.0, PROBE_S).is_unknown
    assert not Durable(1000, 1.0, PROBE_S - 1).is_unknown
