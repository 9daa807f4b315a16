"""Any layout saved, any other loaded: the same state, and training that goes on as if it had always
been so."""

import pytest
import torch
import zoo

from everstep import Checkpointer, Store

STEPS = 2
RECIPE = zoo.Recipe()
LAYOUTS = ["dense", "ddp", "fsdp2", "tp", "hsdp", "fsdp_tp"]


def state_of(job):
    return {"model": job.model, "optimizer": job.optimizer}


def trains_and_saves(layout, store):
    """The full state after STEPS steps, and the losses of the steps after them."""
    job = zoo.build(layout, RECIPE)
    with Checkpointer(store, state_of(job), strategy="full") as checkpointer:
        for step in range(1, STEPS + 1):
            job.train(step)
            checkpointer.step(step)
        checkpointer.wait()
        state = job.full_state()
    return state, [job.train(step) for step in range(STEPS + 1, STEPS + 3)]


def goes_on(layout, store):
    """The step that is restored, what is there then, and the losses of the steps after it."""
    job = zoo.build(layout, RECIPE)
    with Checkpointer(store, state_of(job), strategy="full") as checkpointer:
        step = checkpointer.restore()
        state = job.full_state()
        losses = [job.train(step) for step in range(STEPS + 1, STEPS + 3)]
    return step, state, losses


def equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "saved",
    [
        *LAYOUTS[:-2],
        *(pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS[-2:-1]),
        LAYOUTS[-1],
    ],
)
def test_what_one_layout_saved_goes_on_in_all_others(gang, store, saved):
    (state, losses), *_ = gang.run(trains_and_saves, saved, store, size=zoo.SIZES[saved])
    assert Store(store).verify().ok
    stored = Store(store).read()
    for name, tensor in state.items():  # "blocks.0.q.weight" or "blocks.0.q.weight:exp_avg"
        parameter, _, key = name.partition(":")
        at = f"optimizer.model.{parameter}.{key}" if key else f"model.{parameter}"
        assert torch.equal(stored[at], tensor), name
    for loaded in LAYOUTS:
        (step, found, after), *_ = gang.run(goes_on, loaded, store, size=zoo.SIZES[loaded])
        assert step == STEPS
        equal(found, state)
        if loaded == saved:
            assert after == losses
        assert after == pytest.approx(losses, abs=2e-6)
