"""A rank dies, all die, the keeper dies, at picked and at random moments: the next start goes on
from one step on all ranks, with nothing lost that was promised."""

import os
import random
import signal
import time

import deaths
import pytest
from deaths import AT, LAST, come_back, noted, trains

from processes import stopped, until
from stores import end_keeper, keeper_pid

SEEDS = range(int(os.environ.get("EVERSTEP_DEATHS", "12")))


RANKS = 2  # of the gang


@pytest.fixture(scope="module")
def reference(gang):
    return gang.run(deaths.states, LAST + 1)[0]


@pytest.mark.parametrize(
    ("how", "victims", "least", "most"),
    [
        ("before", [1], AT - 1, AT - 1),  # the others have their part of step AT: it does not exist
        ("copying", [0], AT - 1, AT - 1),
        ("untold", [1], AT, AT),  # the keeper finds what is sealed
        ("written", [1], AT, LAST),  # it may have gone on before it was asked
    ],
)
def test_ranks_that_die_at_picked_moments(
    gang, store, tmp_path, reference, how, victims, least, most
):
    outcomes = gang.outcomes(trains, store, tmp_path, LAST, how, victims)
    for outcome in outcomes:
        assert outcome.killed == (outcome.rank in victims), outcome
    assert least <= come_back(gang, store, tmp_path, reference) <= most


@pytest.mark.slow
@pytest.mark.parametrize("victims", [[1], [0, 1]])
def test_ranks_that_die_when_all_is_sealed(gang, store, tmp_path, reference, victims):
    gang.start(trains, store, tmp_path, LAST, "sealed")
    until(lambda: noted(tmp_path, "ready") == [AT, AT], "they are not there")
    with stopped(keeper_pid(store)):
        (tmp_path / "stopped").touch()
        until(lambda: noted(tmp_path, "captured") == [AT, AT], "it is not sealed")
        gang.kill(*victims)
    (tmp_path / "go").touch()
    gang.finish()
    assert come_back(gang, store, tmp_path, reference) >= AT


def test_all_ranks_die_at_once(gang, store, tmp_path, reference):
    gang.start(trains, store, tmp_path, 1000)
    until(lambda: min(noted(tmp_path, "returned")) >= 2, "no step")
    gang.kill()
    gang.finish()
    last = max(noted(tmp_path, "returned"))
    come_back(gang, store, tmp_path, gang.run(deaths.states, last + 2)[0], last + 2)


def test_the_keeper_dies_twice_and_nobody_notices(gang, store, tmp_path, reference):
    gang.start(trains, store, tmp_path, LAST, None, (), 0.3)
    for step in (2, 4):
        until(lambda step=step: min(noted(tmp_path, "returned")) >= step, f"no step {step}")
        end_keeper(store)
    outcomes = gang.finish()
    assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, outcomes
    assert noted(tmp_path, "local") == [LAST, LAST]
    assert come_back(gang, store, tmp_path, reference) == LAST


@pytest.mark.slow
def test_the_keeper_and_a_rank_die(gang, store, tmp_path, reference):
    gang.start(trains, store, tmp_path, LAST, None, (), 0.2)
    until(lambda: min(noted(tmp_path, "returned")) >= 3, "no step")
    end_keeper(store)
    gang.kill(0)
    gang.finish()
    come_back(gang, store, tmp_path, reference, is_memory_lost=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_deaths_at_random_moments(gang, store, tmp_path, seed):
    """Again and again in one store; EVERSTEP_DEATHS says how many such runs."""
    rng = random.Random(f"deaths {seed}")
    print(f"seed {seed}")  # shown where it fails
    done = 0
    for life in range(4):
        folder = tmp_path / str(life)
        folder.mkdir()
        gang.start(trains, store, folder, 10**6, None, (), rng.choice([0.0, 0.02]))
        until(lambda folder=folder: min(noted(folder, "returned")) > 0, "no step")
        wanted = rng.choice(["rank", "rank", "all", "keeper and rank", "keeper, all", "stopped"])
        kills = rng.choice([0, 0, 1, 2])
        for _ in range(kills):
            _pause(rng)
            end_keeper(store)
        _pause(rng)
        if wanted == "stopped" and (keeper := keeper_pid(store)):
            os.kill(keeper, signal.SIGSTOP)
            _pause(rng)
        if "keeper" in wanted:
            end_keeper(store)
        if "rank" in wanted:
            gang.kill(rng.randrange(2))
        else:
            gang.kill()
        if wanted == "stopped" and keeper:
            os.kill(keeper, signal.SIGCONT)
        gang.finish()
        last = max(*noted(folder, "returned"), done) + 1
        expected = gang.run(deaths.states, last)[0]
        lost = "keeper" in wanted or kills > 0  # the next one may not have had all arenas yet
        come_back(gang, store, folder, expected, last, is_memory_lost=lost)
        done = last


def _pause(rng):
    """A random moment, of about the length of a step."""
    time.sleep(rng.random() * 0.1)
