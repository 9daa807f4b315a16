"""Writes to DTensors: torch counts them on the DTensor, not on its memory, and on a CPU those of
its foreach functions on neither."""

import contextlib
import logging
import threading
from logging.handlers import QueueHandler
from queue import SimpleQueue
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import zoo
from jobs import RECIPE, attached, parts_of, trains, unheard
from zoo_model import loss_of

from comparing import check_equal
from everstep import EverstepError, Store, clip_grad_norm_
from everstep.capture.copier import Copier
from everstep.redo.clipping import Recording
from examples import slow

STEPS, AT = 7, 3
LIMIT = 1e-4


def masks(gradients):
    for gradient in gradients:
        gradient.masked_fill_(gradient.abs() > LIMIT, 0.0)


def cuts(gradients):
    """As torch.nn.utils.clip_grad_value_ does."""
    torch._foreach_clamp_max_(gradients, LIMIT)


def clamps(model):
    """What is there already: no byte changes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-1e9, 1e9)


class Run:
    """Of FSDP2, with what is saved and how it was then."""

    def __init__(self, store, **options):
        self.job, self.states, self.errors = zoo.build("fsdp2", RECIPE), {}, {}
        self.saver = attached(self.job, store, **options)

    def backward(self, step):
        self.job.optimizer.zero_grad()
        inputs, targets = self.job.batch(step)
        loss_of(self.job.model(inputs), targets).backward()

    def save(self, step, between=None):
        """`between`: done before the copy is looked at."""
        self.states[step] = self.job.full_state()
        handle = self.saver.step(step)
        if between:
            between(self.job.model)
        if handle:
            with contextlib.suppress(EverstepError):
                handle.wait("local")
            if handle.error:
                self.errors[step] = str(handle.error)

    def check(self, store):
        """The steps that are there, each restored into a new job."""
        with contextlib.suppress(EverstepError):
            self.saver.close()
        dist.barrier()
        steps = Store(store).steps()
        again = zoo.build("fsdp2", RECIPE)
        with attached(again, store) as saver:
            for step in steps:
                assert saver.restore(step) == step
                check_equal(again.full_state(), self.states[step])
        return steps


def edits_gradients(store, edit, options):
    """After everstep's clipping, from before which gradients are recorded."""
    recording = Recording()
    recording.set(True, pre_clip=True)
    with unheard():
        run = Run(store, **options)
        for step in range(1, STEPS + 1):
            run.backward(step)
            clip_grad_norm_(run.job.model.parameters(), 0.05)
            edit([parameter.grad for parameter in run.job.model.parameters()])
            run.job.optimizer.step()
            run.save(step)
        return run.check(store)


@pytest.mark.parametrize("size", [1, *slow(2)])
@pytest.mark.parametrize("edit", [masks, *slow(cuts)])
@pytest.mark.parametrize(
    "options", [{"strategy": "log"}, {"strategy": "spread", "every": 3, "window": 3}]
)
def test_gradients_written_to_after_clipping(gang, store, size, edit, options):
    steps, *_ = gang.run(edits_gradients, store, edit, options, size=size)
    if options["strategy"] == "spread":
        assert steps == [3, 6]
    elif size == 1 or edit is masks:
        assert steps == list(range(1, STEPS + 1))
        assert Store(store).manifest(STEPS).previous
    else:  # where it changes bytes on one rank alone they come apart, once
        assert steps[-1] == STEPS


def writes_after_updates(store):
    with unheard():
        run = Run(store, strategy="log")
        for step in range(1, STEPS + 1):
            run.backward(step)
            run.job.optimizer.step()
            if step >= AT:
                clamps(run.job.model)
            run.save(step)
        return run.check(store)


@pytest.mark.slow
def test_weights_written_to_after_the_update(gang, store):
    """All ranks notice it at the same step, and lose nothing."""
    steps, *_ = gang.run(writes_after_updates, store, size=2)
    assert steps == list(range(1, STEPS + 1))
    found = [bool(Store(store).manifest(step).previous) for step in steps]
    assert found == [False] + [True] * (AT - 2) + [False] * (STEPS - AT + 1)


def trains_more_later(store):
    handler = QueueHandler(told := SimpleQueue())
    logging.getLogger("everstep").addHandler(handler)
    run = Run(store, strategy="log")
    run.job.model.head.requires_grad_(False)
    for step in range(1, STEPS + 1):
        if step == AT:
            run.job.model.head.requires_grad_(True)
        run.backward(step)
        run.job.optimizer.step()
        run.save(step)
    logging.getLogger("everstep").removeHandler(handler)
    return run.check(store), [told.get().getMessage() for _ in range(told.qsize())]


@pytest.mark.slow
def test_weights_that_are_trained_later(gang, store):
    """Nothing is in other memory then."""
    for steps, told in gang.run(trains_more_later, store, size=2):
        assert steps == list(range(1, STEPS + 1))
        assert not told


def writes_while_copied(store):
    may_copy = threading.Event()
    copy_one = Copier._copy_one

    def copied_late(*args):
        assert may_copy.wait(60)
        return copy_one(*args)

    def clamps_first(model):
        clamps(model)
        may_copy.set()

    with unheard(), patch.object(Copier, "_copy_one", copied_late):
        run = Run(store, strategy="full")
        for step in range(1, STEPS + 1):
            run.backward(step)
            run.job.optimizer.step()
            may_copy.clear()
            run.save(step, between=clamps_first)
        steps = run.check(store)
        return steps, run.errors


@pytest.mark.slow
def test_weights_written_to_while_they_are_copied(gang, store):
    (steps, errors), *_ = gang.run(writes_while_copied, store, size=2)
    assert errors.keys() == {1, 2}  # from then on they are copied at the call
    assert all("changed while the copy was being made" in error for error in errors.values())
    assert steps == list(range(3, STEPS + 1))


def has_teacher(job):
    job.teacher = zoo.build("fsdp2", RECIPE).model.requires_grad_(False)
    return {**parts_of(job), "teacher": job.teacher}


def writes_to_the_teacher(job, step):
    """At one step, through .data: no version counter tells of it. Its weight, whole."""
    if step == AT:
        job.teacher.head.weight.data.mul_(0.5)
    job.train(step)
    return job.teacher.head.weight.full_tensor()


@pytest.mark.slow
def test_a_frozen_weight_written_to(gang, store):
    """Ranks may find it at different steps, and lose these; what is there is right."""
    options = {"state_of": has_teacher, "train": writes_to_the_teacher, "strategy": "log"}
    run, _ = gang.run(trains, "fsdp2", store, STEPS + 1, size=2, **options)
    assert not torch.equal(run.losses[AT - 1], run.losses[AT - 2])
    steps = [step for step in Store(store).steps() if step <= STEPS]
    assert steps[-1] > AT
    for step in steps:
        found, _ = gang.run(
            trains, "fsdp2", store, size=2, after=1, restore={"step": step}, **options
        )
        assert torch.equal(found.losses[0], run.losses[step])
