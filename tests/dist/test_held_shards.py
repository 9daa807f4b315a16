"""Gradients of DTensors in a log: which are held where they lie, and that their bytes are right."""

from collections import Counter

import pytest
import torch
import zoo
from test_clipped_shards import backward
from zoo_model import loss_of

from comparing import check_equal
from everstep import Checkpointer
from everstep.redo import owners
from everstep.sharding.layout import local_of

STEPS = 8
RECIPE = zoo.Recipe()
SIZES = {**zoo.SIZES, "fsdp2": 2}


def let_go(job, step):
    """As torch does it."""
    job.optimizer.zero_grad()


def zero(job, step):
    """The same memory in each step."""
    for parameter in job.model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def now_and_then(job, step):
    """Several steps' gradients in one memory, and then in another."""
    (let_go if step % 3 else zero)(job, step)


def write_late(job, step):
    """What the record may still be copied from is written to, then let go of."""
    if step == 6:
        for parameter in job.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)
    job.optimizer.zero_grad()


def nobody(job):
    return None


def somebody(job):
    """Has the buffers that gradients are parts of."""
    return [local_of(parameter.grad)._base for parameter in job.model.parameters()]


def trains(layout, store, clear, hold, last=STEPS):
    """From what is restored up to a step: where it began, the state there and at the end, and for
    each step how many gradients were copied at the call of the optimizer, and how many not."""
    job = zoo.build(layout, RECIPE)
    state = {"model": job.model, "optimizer": job.optimizer}
    counts = []
    with Checkpointer(store, state, strategy="log") as checkpointer:
        first = checkpointer.restore()
        begun = job.full_state()
        for step in range(first + 1, last + 1):
            clear(job, step)
            backward(job, step, micro_batches=1 + step % 2)
            held = hold(job)
            job.optimizer.step()
            del held
            recorder = checkpointer._captures.strategy._recorder
            counts.append(
                Counter(held.is_copied for call in recorder._calls for held in call.gradients)
            )
            checkpointer.step(step)
        checkpointer.wait()
        failures = checkpointer.metrics.failures
    return first, begun, job.full_state(), counts, failures


def check(gang, store, layout, clear, hold=nobody):
    """The counts of a run whose last step is restored to the bits of the run."""
    outcomes = gang.run(trains, layout, store, clear, hold, size=SIZES[layout])
    for other in (layout, "dense"):
        first, found, *_ = gang.run(trains, other, store, clear, hold, 0, size=SIZES[other])[0]
        assert first == STEPS
        check_equal(found, outcomes[0][2])
    return [(counts, failures) for _, _, _, counts, failures in outcomes]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", "fsdp_tp", "tp"])
def test_gradients_are_held_where_they_lie(gang, store, layout):
    for counts, failures in check(gang, store, layout, let_go):
        assert [each[False] for each in counts] == [0] * 4 + [25] * (STEPS - 4)
        assert failures == 0


@pytest.mark.slow
def test_gradients_in_the_same_memory_are_copied(gang, store):
    for counts, failures in check(gang, store, "fsdp2", zero):
        assert not any(each[False] for each in counts)
        assert failures == 0


@pytest.mark.slow
def test_gradients_that_are_sometimes_in_the_same_memory(gang, store):
    for counts, _ in check(gang, store, "fsdp2", now_and_then):
        assert counts[5][False] == 0  # step 6, after which it is another memory


@pytest.mark.slow
def test_gradients_whose_buffer_somebody_has_are_copied(gang, store):
    for counts, failures in check(gang, store, "fsdp2", let_go, somebody):
        assert not any(each[False] for each in counts)
        assert failures == 0


@pytest.mark.slow
def test_gradients_that_somebody_writes_to_afterwards(gang, store):
    check(gang, store, "fsdp2", write_late)


def owners_of_buffers():
    """What `unshared` says of FSDP2's buffers when it is asked with all gradients, with some of
    them, while somebody has a view, and while somebody has the buffer."""
    job = zoo.build("fsdp2", RECIPE)
    inputs, targets = job.batch(1)
    loss_of(job.model(inputs), targets).backward()
    parts = [local_of(parameter.grad) for parameter in job.model.parameters()]
    storages = {part.untyped_storage()._cdata for part in parts}
    said = [owners.unshared(parts) == storages]
    said.append(parts[0].untyped_storage()._cdata in owners.unshared(parts[1:]))
    view = parts[0][:1]
    said.append(parts[0].untyped_storage()._cdata in owners.unshared(parts))
    said.append(owners.unshared([*parts, view]) == storages)
    del view
    base = parts[0]._base
    said.append(parts[0].untyped_storage()._cdata in owners.unshared(parts))
    del base
    alias = parts[0].detach()
    said.append(owners.unshared([*parts, alias]) == storages)
    raw = torch.empty(0).set_(parts[0].untyped_storage(), 0, (1,), (1,))
    said.append(parts[0].untyped_storage()._cdata in owners.unshared(parts))
    del alias, raw
    said.append(owners.unshared(parts) == storages)
    return said


def test_who_has_the_buffers_of_fsdp2(gang):
    expected = [True, False, False, True, False, True, False, True]
    assert gang.run(owners_of_buffers, size=2) == [expected, expected]
