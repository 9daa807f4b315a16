"""Compressed gradients that are changed before the update: clipped, scaled, summed, written to."""

import pytest
import torch
from hooked import (
    SHARE,
    backward,
    build,
    each_kind,
    gradient_bytes,
    one_rank,
    said,
    sent,
    two_kinds,
)
from runs import check_steps, kinds, run_logged
from torch import nn

import everstep
from everstep import Store
from examples import slow


@pytest.fixture(autouse=True)
def _group(tmp_path):
    with one_rank(tmp_path):
        yield


def rewrite(change):
    """A training step with a change of the gradients before the update."""

    def step(state, number):
        state["optimizer"].zero_grad()
        backward(state)
        change(state, [p for p in state["model"].parameters() if p.grad is not None])
        state["optimizer"].step()

    return step


def unscale(state, parameters):
    """As GradScaler.unscale_: no version counter tells of it."""
    gradients = [parameter.grad for parameter in parameters]
    inverse = torch.full((), 0.5)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1), inverse)


def by_data(state, parameters):
    for parameter in parameters:
        parameter.grad.data.mul_(0.5)


def by_numpy(state, parameters):
    for parameter in parameters:
        array = parameter.grad.numpy()
        array *= 0.5


def one_of_them(state, parameters):
    parameters[1].grad.add_(parameters[1].detach(), alpha=0.1)


def another_tensor(state, parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad * 0.5


ZEROS = {"model.conv.bias", "model.first.bias"}
"""Their gradients are zeros in float16, as a normalization comes next, and stay so."""

CHANGES = {
    "clip by torch": lambda state, parameters: nn.utils.clip_grad_norm_(parameters, 0.001),
    "unscale": unscale,
    "data": by_data,
    "numpy": by_numpy,
    "one": one_of_them,
    "another": another_tensor,
}


@two_kinds
@pytest.mark.parametrize("is_view", [False, *slow(True)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_was_changed_is_recorded_dense(store, kind, change, is_view):
    state = build(kind, gradient_as_bucket_view=is_view)
    changing, plain = rewrite(CHANGES[change]), rewrite(lambda state, parameters: None)

    def step(state, number):
        (changing if number % 2 else plain)(state, number)

    frozen = run_logged(store, state, step, steps=8)
    assert kinds(store) == "brrrrrrr"
    changed = sent(store, 7)
    whole = sent(store, 8)
    assert whole
    if change == "one":
        assert set(whole) - set(changed) <= {"model.conv.weight"}
    else:
        assert set(changed) <= ZEROS
    check_steps(store, build(kind, 2, gradient_as_bucket_view=is_view), frozen)


@each_kind
@pytest.mark.parametrize("is_view", [False, True])
def test_clipping_by_everstep_keeps_the_compressed_form(store, kind, is_view):
    def step(state, number):
        state["optimizer"].zero_grad()
        backward(state)
        norm = everstep.clip_grad_norm_(state["model"].parameters(), 0.001, foreach=is_view)
        assert norm > 0.001
        state["optimizer"].step()

    state = build(kind, gradient_as_bucket_view=is_view)
    frozen = run_logged(store, state, step, steps=8)
    call = Store(store).manifest(8).records[0].calls[0]
    assert call["compressed"]
    assert call["clips"]
    dense = sum(p.nbytes for p in state["model"].parameters() if p.requires_grad)
    assert gradient_bytes(store, 8) <= SHARE[kind] * dense
    check_steps(store, build(kind, 2, gradient_as_bucket_view=is_view), frozen)


@each_kind
def test_unscaled_before_clipping(store, kind):
    def change(state, parameters):
        unscale(state, parameters)
        everstep.clip_grad_norm_(parameters, 0.001)

    frozen = run_logged(store, build(kind), rewrite(change), steps=7)
    assert kinds(store) == "brrrrrr"
    assert set(sent(store, 7)) <= ZEROS
    check_steps(store, build(kind, 2), frozen)


@two_kinds
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("order", ["no_sync first", "no_sync last", "both"])
def test_accumulation(store, kind, order, is_view):
    def step(state, number):
        state["optimizer"].zero_grad()
        for micro in range(2):
            if (order == "no_sync first") == (micro == 0) and order != "both":
                with state["model"].no_sync():
                    backward(state)
            else:
                backward(state)
        state["optimizer"].step()

    frozen = run_logged(store, build(kind, gradient_as_bucket_view=is_view), step, steps=8)
    assert kinds(store) == "brrrrrrr"
    assert bool(said(store, 8)) == (order != "no_sync last")
    check_steps(store, build(kind, 2, gradient_as_bucket_view=is_view), frozen)
