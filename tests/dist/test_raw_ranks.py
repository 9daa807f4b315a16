"""Several ranks keep gradients from before clipping where records get smaller by them: all or
none of them."""

import pytest
import zoo
from zoo_model import loss_of

from comparing import check_equal
from everstep import Checkpointer, Store, clip_grad_norm_
from everstep.capture import raw
from everstep.capture.rank_agreement import RAW_FROM

BASE_EVERY = raw.LOOKS + 4
KNOWN = 1 + BASE_EVERY  # the second base
STEPS = KNOWN + RAW_FROM + 4


def trains(layout, store, last):
    """From what is restored up to a step: where it began, and the full state at each step since."""
    job = zoo.build(layout, zoo.Recipe())
    state = {"model": job.model, "optimizer": job.optimizer}
    settings = {"strategy": "log", "base_every": BASE_EVERY, "under_pressure": "wait"}
    with Checkpointer(store, state, **settings) as checkpointer:
        first = checkpointer.restore(None if last else RAW_FROM)
        states = {first: job.full_state()}
        for step in range(first + 1, last + 1):
            job.optimizer.zero_grad()
            inputs, targets = job.batch(step)
            loss_of(job.model(inputs), targets).backward()
            clip_grad_norm_(job.model.parameters(), 0.05)
            job.optimizer.step()
            checkpointer.step(step).wait("local")
            states[step] = job.full_state()
    return first, states


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_all_ranks_stop_at_the_same_step(gang, store, layout):
    _, states = gang.run(trains, layout, store, STEPS, size=2)[0]
    manifests = {step: Store(store).manifest(step) for step in Store(store).steps()}
    assert list(manifests) == list(range(1, STEPS + 1))
    assert [step for step, found in manifests.items() if not found.records] == [1, KNOWN]
    clipped = [step for step, found in manifests.items() if any(map(_has_raw, found.records))]
    assert clipped == [*range(2, KNOWN), *range(KNOWN + 1, KNOWN + RAW_FROM)]
    for last in (0, STEPS):  # of raw ones, of clipped ones
        for other in (layout, "dense"):
            first, found = gang.run(trains, other, store, last, size=zoo.SIZES[other])[0]
            assert first == (last or RAW_FROM)
            check_equal(found[first], states[first])


def _has_raw(record):
    return any("clips" in call for call in record.calls)
