"""Any layout saved, any other loaded: the same state, and training that goes on as if it had always
been so."""

import pytest
import zoo
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from comparing import check_equal, check_stored
from everstep import Checkpointer
from examples import slow

STEPS = 2
RECIPE = zoo.Recipe()
LAYOUTS = ["dense", "ddp", "fsdp2", "tp", "hsdp", "fsdp_tp"]


class App:
    """Model and optimizer as torch.distributed.checkpoint wants them."""

    def __init__(self, job):
        self.job = job

    def state_dict(self):
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.job.model,
            self.job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def state_of(job):
    return {"model": job.model, "optimizer": job.optimizer}


def app_of(job):
    return {"app": App(job)}


def trains_and_saves(layout, store, state_of=state_of):
    """The full state after STEPS steps, and the losses of the steps after them."""
    job = zoo.build(layout, RECIPE)
    with Checkpointer(store, state_of(job), strategy="full") as checkpointer:
        for step in range(1, STEPS + 1):
            job.train(step)
            checkpointer.step(step)
        checkpointer.wait()
        state = job.full_state()
    return state, [job.train(step) for step in range(STEPS + 1, STEPS + 3)]


def goes_on(layout, store, state_of=state_of):
    """The step that is restored, what is there then, and the losses of the steps after it."""
    job = zoo.build(layout, RECIPE)
    with Checkpointer(store, state_of(job), strategy="full") as checkpointer:
        step = checkpointer.restore()
        state = job.full_state()
        losses = [job.train(step) for step in range(STEPS + 1, STEPS + 3)]
    return step, state, losses


@pytest.mark.parametrize("saved", ["fsdp_tp", *slow("ddp", "dense", "fsdp2", "tp", "hsdp")])
def test_what_one_layout_saved_goes_on_in_all_others(gang, store, saved):
    (state, losses), *_ = gang.run(trains_and_saves, saved, store, size=zoo.SIZES[saved])
    check_stored(store, state)
    for loaded in LAYOUTS:
        (step, found, after), *_ = gang.run(goes_on, loaded, store, size=zoo.SIZES[loaded])
        assert step == STEPS
        check_equal(found, state)
        if loaded == saved:
            assert after == losses
        assert after == pytest.approx(losses, abs=2e-6)


@pytest.mark.parametrize(
    "saved",
    ["fsdp_tp", *slow("fsdp2", "tp", "hsdp")],
)
def test_a_state_dict_of_dtensors_goes_on_in_others(gang, store, saved):
    """As programs have it that come from torch.distributed.checkpoint: one object for all."""
    (state, losses), *_ = gang.run(trains_and_saves, saved, store, app_of, size=zoo.SIZES[saved])
    for loaded in (saved, "dense", "hsdp"):
        (step, found, after), *_ = gang.run(goes_on, loaded, store, app_of, size=zoo.SIZES[loaded])
        assert step == STEPS
        check_equal(found, state)
        assert after == (losses if loaded == saved else pytest.approx(losses, abs=2e-6))
