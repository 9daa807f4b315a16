"""Records of clipped gradients: as they were clipped, or from before."""

import pytest
import torch
from runs import check_steps, run_logged
from torch import nn

import everstep
from everstep import Store
from everstep.redo.clipping import Recording

STEPS = 6


@pytest.fixture
def pre_clip():
    """As for a log that records gradients from before clipping."""
    recording = Recording()
    recording.set(True, pre_clip=True)
    yield
    recording.set(False)


def build(seed):
    torch.manual_seed(seed)
    model = nn.Linear(160, 160)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train(state, set_to_none=True):
    """A step with gradients of bfloat16's bits, clipped."""
    model = state["model"]
    state["optimizer"].zero_grad(set_to_none)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 160)).square().sum()
    loss.backward()
    everstep.clip_grad_norm_(model.parameters(), 0.5)
    state["optimizer"].step()


def records(store):
    """The steps that are records, and of each whether its gradients are from before clipping."""
    manifests = {step: Store(store).manifest(step) for step in Store(store).steps()}
    found = {step: manifest.records for step, manifest in manifests.items() if manifest.records}
    return {
        step: any("clips" in call for record in each for call in record.calls)
        for step, each in found.items()
    }


def test_they_take_fewer_bytes(stores):
    sizes = []
    recording = Recording()
    for is_raw in (False, True):
        recording.set(is_raw, pre_clip=is_raw)
        frozen = run_logged(stores(is_raw), build(1), lambda state, _: train(state), 2)
        check_steps(stores(is_raw), build(2), frozen)
        sizes.append(Store(stores(is_raw)).manifest(2).size)
    recording.set(False)
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.parametrize("which", ["not updated", "not clipped"])
def test_other_steps_between_them(store, pre_clip, which):
    """Of micro-batches, say, or before the gradients are large."""

    def step(state, number):
        if number % 2:
            train(state)
        elif which == "not clipped":
            state["optimizer"].zero_grad()
            state["model"](torch.randn(8, 160)).square().sum().backward()
            state["optimizer"].step()

    frozen = run_logged(store, build(1), step, STEPS)
    check_steps(store, build(2), frozen)
    assert [records(store)[number] for number in range(2, STEPS + 1)] == [
        bool(number % 2) for number in range(2, STEPS + 1)
    ]
