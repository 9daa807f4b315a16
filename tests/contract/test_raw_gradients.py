"""Gradients from before clipping are kept for as long as they make records smaller; and what a
record holds, the optimizer consumed, whichever it is."""

import pytest
import torch
from logs import durable
from runs import check_steps, kinds, run_logged
from torch import nn

import everstep
from everstep import Store
from everstep.capture import raw
from everstep.redo.clipping import raw_gradient


def build(seed):
    """Its gradients have a chunk that the keeper would pack."""
    torch.manual_seed(seed)
    model = nn.Linear(160, 160)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train(bits, state, set_to_none=True):
    """A step with gradients of that many bits, clipped."""
    model = state["model"]
    state["optimizer"].zero_grad(set_to_none)
    with torch.autocast("cpu", torch.bfloat16, enabled=bits == 16):
        loss = model(torch.randn(8, 160)).square().sum()
    loss.backward()
    everstep.clip_grad_norm_(model.parameters(), 0.5)
    kept = raw_gradient(model.weight) is not None
    state["optimizer"].step()
    return kept


def have_raw(store):
    """Of each record, whether its gradients are from before clipping."""
    manifests = (Store(store).manifest(step) for step in Store(store).steps())
    calls = [record.calls for manifest in manifests for record in manifest.records]
    return ["clips" in call for (call,) in calls]


def run(store, steps, train, **options):
    frozen = run_logged(store, build(1), train, steps, durable, **options)
    assert kinds(store) == "b" + "r" * (steps - 1)
    check_steps(store, build(2), frozen)
    return have_raw(store)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_float32_is_recorded_as_it_is_clipped(store, set_to_none):
    kept = []

    def step(state, _):
        kept.append(train(32, state, set_to_none))

    found = run(store, raw.LOOKS + 8, step)
    assert found == [True] * (raw.LOOKS + 1) + [False] * 6
    assert kept[1:] == found


def test_bfloat16_is_kept(store):
    assert all(run(store, raw.LOOKS + 8, lambda state, _: train(16, state)))


@pytest.mark.parametrize("which", ["not updated", "not clipped"])
def test_other_steps_between_them(store, which):
    """Of micro-batches, say, or before the gradients are large."""

    def step(state, number):
        if number % 3:
            train(32, state)
        elif which == "not clipped":
            state["optimizer"].zero_grad()
            state["model"](torch.randn(8, 160)).square().sum().backward()
            state["optimizer"].step()

    frozen = run_logged(store, build(1), step, 3 * raw.LOOKS, durable)
    check_steps(store, build(2), frozen)
    calls = [Store(store).manifest(number).records[0].calls for number in range(2, 3 * raw.LOOKS)]
    found = [any("clips" in call for call in each) for each in calls]
    assert found.count(True) == raw.LOOKS + 1
    assert not any(found[-raw.LOOKS :])


def test_it_is_looked_at_again(store, monkeypatch):
    monkeypatch.setattr(raw, "AGAIN_AFTER", 3)
    first = 1 + raw.LOOKS + 1  # whole state, enough records, and the one at which it is known

    def step(state, number):
        train(32 if number <= 2 * first else 16, state)

    found = run(store, 4 * first, step)
    looks = [True] * (raw.LOOKS + 1) + [False] * 3
    assert found[: len(looks) + raw.LOOKS] == [*looks, *[True] * raw.LOOKS]
    assert all(found[-2 * first + len(looks) :])  # of fewer bits by then
