"""everstep.clip_grad_norm_ over ranks: torch's bytes, and records of what was there before."""

import contextlib
from collections import Counter
from functools import partial

import pytest
import torch
import zoo
from jobs import RECIPE, check_restored, raw, trains, trains_alone
from torch.distributed.tensor import DTensor
from zoo_model import loss_of

from comparing import check_equal
from everstep import Store, clip_grad_norm_
from everstep.format.tables import is_gradient
from everstep.redo import clipping
from everstep.sharding.layout import local_of
from everstep.store.catalog import read_table
from everstep.tiers.disk import Disk
from examples import slow

STEPS = 6
MAX_NORM = 0.05
torch_clip = torch.nn.utils.clip_grad_norm_
SHARDED = ["fsdp2", *slow("tp", "hsdp", "fsdp_tp")]
SIZES = {**zoo.SIZES, "fsdp2": 2}


@contextlib.contextmanager
def pre_clip():
    """As for logs that record gradients from before clipping."""
    recording = clipping.Recording()
    recording.set(True, pre_clip=True)
    try:
        yield
    finally:
        recording.set(False)


def lists_of(model, least=0):
    """The parameters that torch can clip together: those of one mesh, and those of none."""
    lists = {}
    for parameter in model.parameters():
        if parameter.numel() >= least:
            lists.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(lists.values())


def backward(job, step, micro_batches=1):
    for _ in range(micro_batches):
        inputs, targets = job.batch(step)
        loss = loss_of(job.model(inputs), targets) / micro_batches
        loss.backward()


def bytes_of(tensor):
    memory = local_of(tensor).detach().contiguous()
    return bytes(memory.view(-1).view(torch.uint8).numpy()) if memory.numel() else b""


def seen(tensor):
    """All that can be told of it here."""
    memory = local_of(tensor)
    placed = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None
    forms = tensor.shape, tensor.stride(), memory.shape, memory.stride(), memory.dtype
    return type(tensor), str(placed), forms, bytes_of(tensor)


def clips_as_torch(layout, options):
    """Whether results are torch's; how many gradients were noted."""
    mine, theirs = zoo.build(layout, RECIPE), zoo.build(layout, RECIPE)
    noted = 0
    least = 4 if options.get("norm_type") == float("inf") else 0  # of nothing torch has none
    with pre_clip():
        for step in range(1, 4):
            for job in (mine, theirs):
                backward(job, step, micro_batches=step)
            lists = lists_of(mine.model, least), lists_of(theirs.model, least)
            for own, others in zip(*lists, strict=True):
                before = [seen(parameter.grad) for parameter in own]
                found, expected = clip_grad_norm_(own, **options), torch_clip(others, **options)
                assert seen(found) == seen(expected)
                origins = clipping.origins(own)
                is_known = not any(each.is_partial() for each in getattr(found, "placements", ()))
                assert len(origins) == (len(own) if is_known else 0)
                for parameter, other, was in zip(own, others, before, strict=True):
                    assert seen(parameter.grad) == seen(other.grad)
                    if origin := origins.get(id(parameter)):
                        assert seen(origin.source) == was
                        assert type(origin.coefficient) is torch.Tensor
                        raw = local_of(origin.source)
                        clipping.scale_in_place([raw], origin.coefficient, origin.foreach)
                        assert bytes_of(raw) == bytes_of(other.grad)
                noted += len(origins)
            for job in (mine, theirs):
                job.optimizer.step()
                for parameter in job.model.parameters():
                    parameter.grad = None if step < 2 else parameter.grad.zero_()
    states = mine.full_state(), theirs.full_state()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    return noted


OPTIONS = [
    {"max_norm": MAX_NORM},
    {"max_norm": 0.01, "norm_type": float("inf"), "foreach": False},
    {"max_norm": torch.tensor(0.3), "norm_type": 3.5, "foreach": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp", "hsdp", "fsdp_tp"])
def test_results_are_torchs(gang, layout):
    for options in OPTIONS:
        for noted in gang.run(clips_as_torch, layout, options, size=SIZES[layout]):
            assert noted > 50 or options.get("norm_type") == float("inf")


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
def test_raw_gradients_are_replayed(gang, store, layout):
    size, last = SIZES[layout], STEPS + 2
    by_torch, by_us = (partial(clips, clip=clip) for clip in (torch_clip, clip_grad_norm_))
    _, states = gang.run(trains_alone, layout, last, train=by_torch, size=size)[0]
    options = {"state_of": raw, "train": by_us, "strategy": "log", "base_every": 20}
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
