"""Strategy auto: after the first updates it takes what writes least, by sizes alone."""

import pytest
import torch
from logs import build, check_run, train
from runs import check_steps, checkpointer, kinds, run_logged

from everstep import Store
from everstep.capture import choice
from everstep.redo import clipping


def reason_of(store):
    return Store(store).manifest().capture["auto"]["reason"]


def test_it_goes_over_to_a_log_and_every_step_is_exact(store):
    """AdamW has three times the bytes of its gradients, at each step."""
    check_run(store, build, train, strategy="auto", base_every=None, steps=20)
    assert kinds(store)[:10] == "brrrrrrrrr"
    assert reason_of(store).startswith("log: kB a step: ")


@pytest.mark.parametrize(
    ("kind", "every", "saved"),
    [(torch.optim.SGD, 1, "bbbbbb"), (torch.optim.AdamW, 3, "bb"), (torch.optim.Adam, 1, "brrrrr")],
)
def test_by_sizes(store, kind, every, saved):
    frozen = run_logged(store, build(1, kind), train, 6, strategy="auto", every=every)
    assert kinds(store) == saved
    check_steps(store, build(2, kind), frozen)
    if kind is torch.optim.SGD:
        assert reason_of(store).startswith("full: ")


def test_before_the_first_update_nothing_is_chosen(store):
    state = build(1)
    with checkpointer(store, state) as saver:
        for step in range(3):
            saver.save(step)
        assert not clipping.is_recording()  # which would cost memory for nothing
        for step in range(3, 9):
            train(state)
            saver.step(step)
        assert clipping.is_recording()
    assert kinds(store) == "bbbbrrrrr"[: len(kinds(store))]


def test_a_run_that_starts_again_chooses_again(store):
    for first in (1, 5, 9):
        state = build(first)
        with checkpointer(store, state) as saver:
            assert saver.restore() == first - 1
            for step in range(first, first + 4):
                train(state)
                saver.step(step)
    assert kinds(store) == "brrr" * 3


def test_what_it_writes_less_of():
    assert choice.weigh(16_000_000, 2_000_000, every=1) == (
        True,
        "log: MB a step: 2.5 in records and bases, or 16.0 in whole states",
    )
    assert not choice.weigh(16_000_000, 2_000_000, every=4)[0]
