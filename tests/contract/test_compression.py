"""Gradients that a communication hook compresses: records hold the compressed form, replay makes of
it what the optimizer consumed, and the hook goes on as if nothing had been. One rank, in-process;
several ranks in tests/dist, random programs in test_machine.py."""

import pytest
import torch
from hooked import (
    KINDS,
    SHARE,
    backward,
    build,
    each_kind,
    gradient_bytes,
    one_rank,
    said,
    sent,
    train,
    two_kinds,
)
from runs import check_steps, kinds, run_logged
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep import Store
from examples import slow


@pytest.fixture(autouse=True)
def _group(tmp_path):
    with one_rank(tmp_path):
        yield


@each_kind
@pytest.mark.parametrize("is_view", [True, *slow(False)])
@pytest.mark.parametrize("buckets_mb", [0.01, *slow(25)])
def test_every_step_comes_back_from_compressed_records(store, kind, is_view, buckets_mb):
    wrapped = {"gradient_as_bucket_view": is_view, "bucket_cap_mb": buckets_mb}
    state = build(kind, **wrapped)
    frozen = run_logged(store, state, train, steps=9)
    assert kinds(store) == "brrrrrrrr"
    dense = sum(p.nbytes for p in state["model"].parameters() if p.requires_grad)
    for step in range(5, 10):
        assert said(store, step)
        assert gradient_bytes(store, step) <= SHARE[kind] * dense
    check_steps(store, build(kind, 2, **wrapped), frozen)


@two_kinds
def test_parameters_of_all_shapes(store, kind):
    """Scalars, none at all, and one with strides that no memory has without gaps."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.empty = nn.Parameter(torch.ones(0, 3))
            self.gaps = nn.Parameter(torch.randn(20, 80)[:, ::2])
            self.wide = nn.Parameter(torch.randn(40, 30, dtype=torch.bfloat16))
            self.long = nn.Parameter(torch.randn(40, 20).t())

        def forward(self):
            product = (self.gaps * self.long) @ self.wide.float()
            return product.square().mean() * self.scale + self.empty.sum()

    def build_odd(seed):
        torch.manual_seed(seed)
        model = Odd()
        wrapped = DistributedDataParallel(model)
        hook = everstep.compress(wrapped, kind, **KINDS[kind])
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
        return {"model": wrapped, "optimizer": optimizer, "compression": hook}

    def step(state, number):
        state["optimizer"].zero_grad()
        (state["model"]() * torch.randn(())).backward()
        state["optimizer"].step()

    frozen = run_logged(store, build_odd(1), step, steps=7)
    assert said(store, 7)
    check_steps(store, build_odd(2), frozen)


@pytest.mark.parametrize("kind", ["topk", *slow("fp16")])
def test_a_static_graph(store, kind):
    frozen = run_logged(store, build(kind, static_graph=True), train, steps=8)
    assert kinds(store) == "brrrrrrr"
    assert said(store, 8)
    check_steps(store, build(kind, 2, static_graph=True), frozen)


@pytest.mark.parametrize("kind", ["fp16", *slow("topk")])
def test_two_models_in_turn(store, kind):
    """As a GAN: each optimizer's call has its own model's forms."""

    def both(seed):
        first, second = build(kind, seed), build("topk", seed + 10)
        return {"first": first, "second": second}

    def step(state, number):
        train(state["first"])
        train(state["second"])
        if number % 2:
            train(state["second"])

    frozen = run_logged(store, both(1), step, steps=7)
    assert kinds(store) == "brrrrrr"
    assert all(call["compressed"] for call in Store(store).manifest(7).records[0].calls)
    assert len(Store(store).manifest(7).records[0].calls) == 3
    check_steps(store, both(2), frozen)


@pytest.mark.parametrize(("kind", "set_to_none"), [("fp16", False), ("topk", True)])
def test_parameters_that_are_not_used(store, kind, set_to_none):
    """What the hook made of them is not what the optimizer gets: their gradient, if any, stays."""

    def step(state, number):
        state["optimizer"].zero_grad(set_to_none=set_to_none)
        backward(state, number)
        state["optimizer"].step()

    frozen = run_logged(store, build(kind, find_unused_parameters=True), step, steps=10)
    assert kinds(store) == "b" + 9 * "r"
    names = sent(store, 9)
    assert "model.sometimes.weight" in names
    assert "model.second.weight" in names
    names = sent(store, 10)
    assert "model.second.weight" in names
    if set_to_none or kind not in ("fp16", "bf16"):  # else zeros were sent, and zeros are there
        assert "model.sometimes.weight" not in names
    check_steps(store, build(kind, 2, find_unused_parameters=True), frozen)


# ---- changed before the update ------------------------------------------------------------------


def rewrite(change):
    """A training step with a change of the gradients before the update."""

    def step(state, number):
        state["optimizer"].zero_grad()
        backward(state)
        change(state, [p for p in state["model"].parameters() if p.grad is not None])
        state["optimizer"].step()

    return step


def by_numpy(state, parameters):
    for parameter in parameters:
        array = parameter.grad.numpy()
        array *= 0.5


def one_of_them(state, parameters):
    parameters[1].grad.add_(parameters[1].detach(), alpha=0.1)


ZEROS = {"model.conv.bias", "model.first.bias"}
"""Their gradients are zeros in float16, as a normalization comes next, and stay so."""

CHANGES = {"numpy": by_numpy, "one": one_of_them}
"""Others: test_machine.py."""


@pytest.mark.parametrize(("kind", "is_view"), [("topk", False), *slow(("fp16", True))])
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


@pytest.mark.parametrize(("kind", "is_view"), [("fp16", False), ("topk", True)])
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
