"""The simulator of tiers, and what it says of the policy: the aims of `route="auto"`."""

import itertools
from pathlib import Path

import pytest

from benchmarks.tiers import simulate
from benchmarks.tiers.simulate import (
    HALF_LIFE_S,
    STATE_BYTES,
    STEP_S,
    Throughput,
    compare,
    constant,
)

STEPS = 620
GIGA = 10**9


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, simulate.Outcome]]:
    return compare(STEPS)


def test_all_steps_are_durable(found) -> None:
    for outcomes in found.values():
        for outcome in outcomes.values():
            assert len(outcome.durable_s) == STEPS


@pytest.mark.parametrize("trace", ["fast remote", "slow remote"])
def test_auto_is_as_good_as_the_better_choice(found, trace: str) -> None:
    outcomes = found[trace]
    best_s = min(outcomes[route].mean_s for route in ("local", "remote"))
    assert outcomes["auto"].mean_s <= 1.05 * best_s
    assert outcomes["auto"].stall_s == 0.0


def test_auto_is_ahead_of_both_where_speeds_change(found) -> None:
    outcomes = found["changing remote"]
    for route in ("local", "remote"):
        assert outcomes["auto"].mean_s < outcomes[route].mean_s
    assert outcomes["auto"].stall_s < 0.01 * outcomes["auto"].seconds


def test_a_spill_saves_the_stall_of_as_many_states() -> None:
    """A disk that takes 0.8 states in each step falls behind by one state in five steps: so long a
    second memory of ten lets training go on."""
    speed = constant(0.8 * STATE_BYTES / STEP_S)
    found = simulate.stalls(speed, 200, (0, 10))
    first = {size: outcome.stalls[0][0] for size, outcome in found.items()}
    assert first[10] - first[0] == pytest.approx(50, abs=8)
    saved_s = found[0].stall_s - found[10].stall_s
    assert saved_s == pytest.approx(10 / 0.8, rel=0.15)


def test_it_draws(tmp_path: Path) -> None:
    simulate.draw(tmp_path / "spill.png", steps=60)
    assert (tmp_path / "spill.png").stat().st_size > 10_000


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
    speed.end(12.0)
    assert speed.bytes_per_s(12.0) < GIGA
    assert speed.age_s(13.0) == 1.0
