"""everstep.clip_grad_norm_ over ranks: torch's bytes, and records of what was there before."""

from collections import Counter
from functools import partial

import pytest
import torch
import zoo
from jobs import check_restored, raw, trains, trains_alone
from zoo_model import loss_of

from comparing import check_equal
from everstep import Store, clip_grad_norm_
from everstep.format.tables import is_gradient
from everstep.store.catalog import read_table
from everstep.tiers.disk import Disk
from examples import slow

STEPS = 6
MAX_NORM = 0.05
torch_clip = torch.nn.utils.clip_grad_norm_
SHARDED = ["fsdp2", *slow("tp", "hsdp", "fsdp_tp")]
SIZES = {**zoo.SIZES, "fsdp2": 2}


def lists_of(model):
    """The parameters that torch can clip together: those of one mesh, and those of none."""
    lists = {}
    for parameter in model.parameters():
        lists.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(lists.values())


def backward(job, step, micro_batches=1):
    for _ in range(micro_batches):
        inputs, targets = job.batch(step)
        loss = loss_of(job.model(inputs), targets) / micro_batches
        loss.backward()


def clips(job, step, clip):
    """Train a step, of one or two backwards, with clipped gradients."""
    job.optimizer.zero_grad()
    backward(job, step, micro_batches=1 + step % 2)
    for parameters in lists_of(job.model):
        clip(parameters, MAX_NORM)
    job.optimizer.step()


def gradients_of(store, step):
    """By kind ("": as consumed, "!": from before clipping) the gradients of a record."""
    counts = Counter()
    record = Store(store).manifest(step).records[0]
    table = read_table(Disk(store), record.part)
    for name in table.tensors:
        if is_gradient(name):
            counts[name.partition(".")[0].lstrip("@0123456789")] += 1
    coefficients = [row["coefficient"] for call in record.calls for row in call.get("clips", ())]
    assert sorted(coefficients) == sorted(name for name in table.tensors if "!clip." in name)
    return counts, len(coefficients)


@pytest.mark.parametrize("layout", SHARDED)
@pytest.mark.slow
def test_raw_gradients_are_replayed(gang, store, layout):
    size, last = SIZES[layout], STEPS + 2
    by_torch, by_us = (partial(clips, clip=clip) for clip in (torch_clip, clip_grad_norm_))
    kept = STEPS, last
    _, states = gang.run(trains_alone, layout, last, train=by_torch, size=size, kept=kept)[0]
    options = {"state_of": raw, "train": by_us, "strategy": "log", "base_every": 20, "kept": kept}
    run, *_ = gang.run(trains, layout, store, STEPS, size=size, **options)
    check_equal(run.states[STEPS], states[STEPS])
    lists = {"fsdp2": 1, "hsdp": 1, "tp": 2, "fsdp_tp": 2}[layout]
    for step in range(2, STEPS + 1):
        counts, coefficients = gradients_of(store, step)
        if layout != "tp":
            assert counts == {"!": 25}
            assert coefficients == lists
        else:  # its norms are plain: each of them is one rank's
            assert counts == {"!": 18, "": 7}
    assert Store(store).verify().ok
    others = {"fsdp2": ["dense"], "tp": ["fsdp2"]}.get(layout, ["dense", "tp", "fsdp2"])
    for other in (layout, *others):
        check_restored(gang, other, store, {STEPS: states[STEPS]}, size=SIZES[other])
    run, *_ = gang.run(trains, layout, store, last, size=size, **options)
    check_equal(run.states[last], states[last])
