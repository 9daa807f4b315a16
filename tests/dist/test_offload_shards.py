"""OffloadedOptimizer beside FSDP2: each rank's process updates what its rank has."""

import functools

import pytest
import torch
import zoo
from jobs import check_restored, trains, trains_alone
from torch import nn

from comparing import check_equal
from everstep import OffloadedOptimizer, Unsupported
from examples import slow

PLAIN = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-4)
OFFLOADED = functools.partial(OffloadedOptimizer, torch.optim.AdamW, lr=0.01, eps=1e-4)
RECIPE = zoo.Recipe(optimizer=OFFLOADED)
LAST = 3


@pytest.mark.parametrize("layout", ["fsdp2", *slow("hsdp")])
def test_shards_have_the_bits_of_the_plain_optimizer(gang, layout):
    size = 2 if layout == "fsdp2" else 4
    plain = gang.run(trains_alone, layout, LAST, zoo.Recipe(optimizer=PLAIN), size=size)[0]
    found = gang.run(trains_alone, layout, LAST, RECIPE, size=size)[0]
    assert found[0] == plain[0]
    for step, state in plain[1].items():
        check_equal(found[1][step], state)


@pytest.mark.parametrize("strategy", ["full", *slow("log")])
def test_what_it_saves_is_restored_on_any_number_of_ranks(gang, store, strategy):
    run = gang.run(trains, "fsdp2", store, LAST, RECIPE, size=2, strategy=strategy, waits=True)[0]
    states = {step: run.states[step] for step in (2, LAST)}
    assert not run.errors
    for size in (2, *([4] if strategy == "full" else [])):
        check_restored(gang, "fsdp2", store, states, size=size, recipe=RECIPE)
    after = gang.run(trains, "fsdp2", store, 5, RECIPE, size=2, strategy=strategy)[0]
    assert after.first == LAST
    alone = gang.run(trains_alone, "fsdp2", 5, RECIPE, size=2)[0]
    assert after.losses == alone[0][LAST:]
    check_equal(after.states[5], alone[1][5])


def refuses():
    sharded = zoo.build("fsdp2", zoo.Recipe()).model
    said = []
    for kind, parameters in (
        (torch.optim.AdamW, nn.Linear(3, 3).parameters()),
        (torch.optim.Adafactor, sharded.parameters()),
    ):
        with pytest.raises(Unsupported) as caught:
            OffloadedOptimizer(kind, parameters, lr=0.1)
        said.append(str(caught.value))
    return said


def test_replicas_and_what_needs_whole_tensors_are_refused(gang):
    replicas, whole = gang.run(refuses, size=2)[0]
    assert "FSDP2" in replicas
    assert "Adafactor may need all of it" in whole
