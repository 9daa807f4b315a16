"""Which window is chosen, from what was measured: arithmetic, checked by a second way to do it."""

import random

import pytest

from everstep.capture.window import RECORDS_MAX, Figures, Piece, schedule, steps_of_base


def figures(copy_steps, state, rest=0):
    """A run of steps of one second, whose state takes so many of them to copy."""
    return Figures(rest, state / copy_steps, 1.0)


def equal_pieces(count, size, share):
    return [Piece(f"p{index:03}", size, round(size * share)) for index in range(count)]


def simulate(pieces, groups, p):
    """Seconds for which updates wait: each step's bytes against one step's time."""
    gradients, late, left = 0, 0.0, p.rest + sum(piece.size for piece in pieces)
    for group in groups:
        size = sum(piece.size for piece in group)
        late += max(0.0, (size + gradients) / p.bytes_per_s - p.overlap_s)
        gradients += sum(piece.gradient for piece in group)
        left -= size
    return late + max(0.0, left / p.bytes_per_s - p.overlap_s)


@pytest.mark.parametrize("copy_steps", [0.1, 0.5, 1.0])
def test_what_fits_into_one_step_is_full(copy_steps):
    pieces = equal_pieces(64, 1000, 1 / 7)
    assert schedule(pieces, figures(copy_steps, 64_000), 64) == []


def test_nothing_measured_is_full():
    assert schedule(equal_pieces(8, 1000, 0.1), Figures(0, 0.0, 1.0), 16) == []
    assert schedule(equal_pieces(8, 1000, 0.1), Figures(0, 1e3, 0.0), 16) == []
    assert schedule([], Figures(0, 1e3, 1.0), 16) == []


@pytest.mark.parametrize("copy_steps", [2, 4, 7])
def test_it_waits_less_than_gockpt_in_the_bytes_of_mixed_precision(copy_steps):
    """2 of 14 bytes of a parameter are its gradient: N(N-1)/14 by GoCkpt's equal shares."""
    pieces = equal_pieces(140, 14_000, 1 / 7)
    run = figures(copy_steps, 140 * 14_000)
    chosen = schedule(pieces, run, 16)
    assert chosen
    stall_s = simulate(pieces, chosen, run)
    assert stall_s < copy_steps * (copy_steps - 1) / 14
    assert stall_s < copy_steps - 1


def test_a_little_more_than_a_step_is_waited_for():
    pieces = equal_pieces(64, 1000, 1 / 7)
    assert len(schedule(pieces, figures(1.09, 64_000), 64)) == 0
    assert len(schedule(pieces, figures(1.2, 64_000), 64)) == 1


def test_gradients_that_cost_more_than_they_save_make_it_full():
    pieces = equal_pieces(64, 1000, 4.0)  # gradients four times as large as the state
    assert len(schedule(pieces, figures(4, 64_000), 64)) <= 1
    assert schedule(equal_pieces(64, 1000, 1 / 7), figures(4, 64_000), 64, call_s=20.0) == []


def test_it_is_never_slower_than_full_whatever_the_pieces():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        share = rng.choice([0.05, 1 / 7, 1 / 3, 1.0, 3.0])
        pieces = [
            Piece(f"p{index}", size, round(size * share))
            for index in range(rng.randrange(1, 30))
            if (size := int(10 ** rng.uniform(0, 6)))
        ]
        rest = rng.choice([0, 10, 10**5])
        state = rest + sum(piece.size for piece in pieces)
        copy_steps, call_s = rng.choice([0.5, 1.5, 3.0, 7.0, 40.0]), rng.choice([0.0, 0.01])
        p = figures(copy_steps, state, rest)
        every = rng.choice([1, 2, 5, 16, 100])
        chosen = schedule(pieces, p, every, call_s)
        assert len(chosen) < every
        assert simulate(pieces, chosen, p) + len(chosen) * call_s <= simulate(pieces, (), p) + 1e-9
        names = [piece.name for group in chosen for piece in group]
        assert len(set(names)) == len(names)
        recorded = sum(
            piece.gradient * (len(chosen) - index)
            for index, group in enumerate(chosen)
            for piece in group
        )
        last = sum(piece.gradient for piece in pieces if piece.name in names)
        assert recorded - last <= RECORDS_MAX * state


@pytest.mark.parametrize(("copy_steps", "steps"), [(0.5, 1), (1, 1), (2, 3), (4, 5), (30, 10)])
def test_a_base_of_a_log_is_spread_however_large_its_records_are(copy_steps, steps):
    """They are there anyway."""
    pieces = equal_pieces(640, 100, 4.0)
    assert steps_of_base(pieces, figures(copy_steps, 64_000), 10) == steps
