"""Gradients of DTensors in a log: their bytes are right, whoever writes to them afterwards. FSDP2's
are parts of one buffer."""

import pytest
import zoo
from test_clipped_shards import backward

from comparing import check_equal
from everstep import Checkpointer

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


def trains(layout, store, clear, last=STEPS):
    """From what is restored up to a step: where it began, the state there and at the end, and how
    many saves failed."""
    job = zoo.build(layout, RECIPE)
    state = {"model": job.model, "optimizer": job.optimizer}
    with Checkpointer(store, state, strategy="log") as checkpointer:
        first = checkpointer.restore()
        begun = job.full_state()
        for step in range(first + 1, last + 1):
            clear(job, step)
            backward(job, step, micro_batches=1 + step % 2)
            job.optimizer.step()
            checkpointer.step(step)
        checkpointer.wait()
        failures = checkpointer.metrics.failures
    return first, begun, job.full_state(), failures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "clear"),
    [
        *((layout, let_go) for layout in ("fsdp2", "hsdp", "fsdp_tp", "tp")),
        *(("fsdp2", clear) for clear in (zero, now_and_then, write_late)),
    ],
)
def test_records_hold_what_was_consumed(gang, store, layout, clear):
    outcomes = gang.run(trains, layout, store, clear, size=SIZES[layout])
    for other in (layout, "dense"):
        first, found, *_ = gang.run(trains, other, store, clear, 0, size=SIZES[other])[0]
        assert first == STEPS
        check_equal(found, outcomes[0][2])
    assert [failures for *_, failures in outcomes] == [0] * len(outcomes)
