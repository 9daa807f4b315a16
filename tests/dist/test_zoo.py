"""The zoo trains: every layout like one process, the same bits each time, and on from a copy."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch.distributed.tensor import DTensor

STEPS = 3
ONE = "dense"
LAYOUTS = [layout for layout in zoo.LAYOUTS if layout != ONE]
RECIPES = {
    "untied": zoo.Recipe(),
    "tied": zoo.Recipe(tied=True, norm=nn.LayerNorm, seed=1),
    "sgd": zoo.Recipe(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), seed=2),
    "long": zoo.Recipe(layers=5, optimizer=partial(zoo.adamw, foreach=False)),
}


def trains(layout, recipe):
    """Losses and final state; and the losses after step 1 of a job that is filled with a copy."""
    job = zoo.build(layout, recipe)
    losses = [job.train(1)]
    copied = local_state(job)
    losses += [job.train(step) for step in range(2, STEPS + 1)]
    other = zoo.build(layout, recipe)
    fill(other, copied)
    again = losses[:1] + [other.train(step) for step in range(2, STEPS + 1)]
    return losses, again, job.full_state()


def local_state(job):
    tensors = [*job.model.parameters(), *job.model.buffers()]
    return [tensor.detach().clone() for tensor in tensors], copy.deepcopy(inner(job).state_dict())


def fill(job, copied):
    tensors, state = copied
    with torch.no_grad():
        for tensor, value in zip(
            [*job.model.parameters(), *job.model.buffers()], tensors, strict=True
        ):
            tensor.copy_(value)
    inner(job).load_state_dict(state)


def inner(job):
    return getattr(job.optimizer, "optim", job.optimizer)


def recipe_for(layout, name):
    recipe = RECIPES[name]
    if layout == "fsdp1_flat":
        recipe = replace(recipe, grouped=False)
    return recipe


def check(gang, layout, name, size):
    recipe = recipe_for(layout, name)
    wanted, _, expected = gang.run(trains, ONE, recipe, size=1)[0]
    found = gang.run(trains, layout, recipe, size=size)
    once_more = gang.run(trains, layout, recipe, size=size)
    losses, _, state = found[0]
    assert all(rank[:2] == (losses, losses) for rank in found + once_more)
    assert losses == pytest.approx(wanted, abs=2e-6)
    assert losses[-1] < losses[0]
    assert sorted(state) == sorted(expected)
    for key, tensor in state.items():
        assert torch.equal(tensor, once_more[0][2][key]), key
        difference = (tensor - expected[key]).abs().max().item()
        assert difference <= 2e-6, key


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_like_one_process(gang, layout):
    check(gang, layout, "untied", zoo.SIZES[layout])


def shards():
    """Of FSDP and TP: what kinds of placements there are, and the sizes of dimension 0."""
    job = zoo.build("fsdp_tp")
    tensors = [tensor for tensor in job.model.parameters() if isinstance(tensor, DTensor)]
    kinds = {type(placement).__name__ for tensor in tensors for placement in tensor.placements}
    job = zoo.build("fsdp2")
    sizes = {name: tensor.to_local().shape[0] for name, tensor in job.model.named_parameters()}
    return kinds, sizes, dist.get_rank()


@pytest.mark.slow
def test_shards_are_uneven_empty_and_strided(gang):
    found = gang.run(shards)
    assert found[0][0] == {"Shard", "Replicate", "_StridedShard"}
    assert [rank[1]["embedding.weight"] for rank in found] == [13, 13, 13, 12]
    assert [rank[1]["blocks.0.up.weight"] for rank in found] == [12, 12, 12, 9]
    assert [rank[1]["blocks.1.scale"] for rank in found] == [1, 0, 0, 0]
