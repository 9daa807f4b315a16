"""Optimizers of other libraries on the default strategy: whole states, exact, and told."""

import pytest
import torch
from torch import nn

import everstep
from harness import check_resumes, random_seed

STEPS = 14


def prodigy(parameters):
    return pytest.importorskip("prodigyopt").Prodigy(parameters)


def adafactor(parameters):
    return pytest.importorskip("transformers").Adafactor(parameters)


def schedule_free(parameters):
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(parameters, lr=0.01)
    optimizer.train()
    return optimizer


KINDS = [prodigy, adafactor, schedule_free]


def state_with(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    return {"model": model, "optimizer": make(model.parameters())}


def trains_with(make, store, trace):
    state = state_with(make)
    checkpointer = everstep.Checkpointer(store, state) if store else None
    start = checkpointer.restore() if checkpointer else 0
    trace.resumed(start)
    for step in range(start + 1, STEPS + 1):
        loss = state["model"](torch.randn(4, 8)).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        trace.note("loss", step, loss)
        if checkpointer:
            checkpointer.step(step)
    if checkpointer:
        checkpointer.close()
    optimizer = state["optimizer"]
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    kept = [sorted(each.items()) for each in optimizer.state.values()]  # dicts have no order
    trace.end(model=state["model"], groups=groups, kept=kept)


def trains_prodigy(store, trace):
    trains_with(prodigy, store, trace)


def trains_adafactor(store, trace):
    trains_with(adafactor, store, trace)


def trains_schedule_free(store, trace):
    trains_with(schedule_free, store, trace)


@pytest.mark.parametrize(
    ("make", "trains"),
    zip(KINDS, [trains_prodigy, trains_adafactor, trains_schedule_free], strict=True),
)
def test_a_killed_run_resumes(tmp_path, make, trains):
    kind = type(state_with(make)["optimizer"]).__name__
    check_resumes(trains, tmp_path, steps=STEPS, epoch=7, seed=random_seed())
    manifest = everstep.Store(tmp_path / "store").manifest(STEPS)
    assert f"{kind}, whose updates" in manifest.capture["auto"]["reason"]


@pytest.mark.parametrize("make", KINDS)
def test_an_explicit_log_is_refused_at_once(tmp_path, make):
    state = state_with(make)
    with pytest.raises(everstep.Unsupported, match=type(state["optimizer"]).__name__):
        everstep.Checkpointer(tmp_path, state, strategy=everstep.Log())
