"""OffloadedOptimizer beside FSDP2: each rank's process updates what its rank has."""

import functools
import os
import signal

import pytest
import torch
import torch.distributed as dist
import zoo
from jobs import attached, check_restored, trains, trains_alone
from torch import nn

from comparing import check_equal
from everstep import OffloadedOptimizer, Unsupported
from examples import slow
from processes import until

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


@pytest.mark.parametrize("strategy", ["full", "log"])
@pytest.mark.slow
def test_what_it_saves_is_restored_on_any_number_of_ranks(gang, store, strategy):
    run = gang.run(trains, "fsdp2", store, LAST, RECIPE, size=2, strategy=strategy, waits=True)[0]
    states = {step: run.states[step] for step in (2, LAST)}
    assert not run.errors
    for size in (2, *([4] if strategy == "full" else [])):
        check_restored(gang, "fsdp2", store, states, size=size, recipe=RECIPE)
    options = {"strategy": strategy, "restore": {"first": "model"}}
    after = gang.run(trains, "fsdp2", store, 5, RECIPE, size=2, **options)[0]
    assert after.first == LAST
    alone = gang.run(trains_alone, "fsdp2", 5, RECIPE, size=2)[0]
    assert after.losses == alone[0][LAST:]
    check_equal(after.states[5], alone[1][5])


@pytest.mark.slow
def test_a_replica_follows_shards(gang, store):
    options = {"strategy": "log", "replica": True, "waits": True}
    run = gang.run(trains, "fsdp2", store, 4, RECIPE, size=2, **options)[0]
    assert not run.errors
    states = {step: run.states[step] for step in (2, 4)}
    check_restored(gang, "fsdp2", store, states, size=2, recipe=RECIPE)


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


def goes_on(store, folder, last):
    """From what is restored; says when a step is durable, and what came back by itself."""
    job = zoo.build("fsdp2", RECIPE)
    with attached(job, store, strategy="full") as saver:
        first, begun = saver.restore(), job.full_state()
        for step in range(first + 1, last + 1):
            job.train(step)
            saver.step(step).wait("local")
            (folder / f"{dist.get_rank()}").write_text(str(step))
    return first, job.optimizer.has_adopted, begun


@pytest.mark.slow
def test_after_the_deaths_of_all_ranks_each_goes_on_in_its_memory(gang, store, tmp_path):
    gang.start(goes_on, store, tmp_path, 10**6)
    until(lambda: len(list(tmp_path.glob("?"))) == gang.size, "no step")
    for rank in range(gang.size):  # who sees another die leaves in peace, and its memory goes
        os.kill(gang.pid(rank), signal.SIGSTOP)
    gang.kill()
    gang.finish()
    found = gang.run(goes_on, store, tmp_path, 0)
    assert [has_adopted for _, has_adopted, _ in found] == [True] * gang.size
    first, _, state = found[0]
    check_equal(state, gang.run(trains_alone, "fsdp2", first, RECIPE)[0][1][first])
