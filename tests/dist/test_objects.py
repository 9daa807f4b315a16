"""What is no shard: objects of all ranks and of each, generators, parts of a restore, tags."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zoo

import everstep
from everstep import Checkpointer, Mismatch, Store
from examples import slow

RECIPE = zoo.Recipe()


class Position:
    """A sampler: where it is, and in which order."""

    def __init__(self, seed):
        self.at, self.order = 0, torch.randperm(8, generator=torch.Generator().manual_seed(seed))

    def state_dict(self):
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state):
        self.at, self.order = state["at"], state["order"]

    def values(self):
        return self.at, self.order.tolist()


def objects():
    rank = dist.get_rank()
    sampler, note = Position(rank), {"epoch": 3, "seen": [1, 2]}
    sampler.at = 10 * rank
    return {"sampler": sampler, "note": note, "own": {"rank": rank}}


def drawn():
    return torch.rand(3).tolist(), np.random.rand(2).tolist(), random.random()


def saves(store, by_rank):
    """What the objects are, and what is drawn after the save."""
    torch.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    random.seed(dist.get_rank())
    state = objects()
    with Checkpointer(
        store, state, strategy="full", ranks=everstep.Ranks(by_rank=by_rank)
    ) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
    return state["sampler"].values(), drawn()


def loads(store, by_rank):
    state = objects()
    state["sampler"] = Position(99)
    state["note"]["epoch"] = 0
    state["own"]["rank"] = None
    with Checkpointer(
        store, state, strategy="full", ranks=everstep.Ranks(by_rank=by_rank)
    ) as checkpointer:
        try:
            checkpointer.restore()
        except Mismatch as error:
            return str(error)
    return state["sampler"].values(), drawn(), state["note"], state["own"]


def test_as_many_ranks_get_what_each_had(gang, store):
    rule = {"sampler": "exact"}
    saved = gang.run(saves, store, rule, size=4)
    for rank, found in enumerate(gang.run(loads, store, rule, size=4)):
        assert found[:2] == saved[rank]
        assert found[2:] == ({"epoch": 3, "seen": [1, 2]}, {"rank": rank})
    assert "own" in Store(store).manifest().ranks[0]  # it differed, though nobody had said so


def test_tensors_that_differ_unsaid_are_no_checkpoint(gang, store):
    for outcome in gang.outcomes(saves, store, None, size=2):
        assert "saving 'sampler" in outcome.text
        assert "by_rank=" in outcome.text
    assert Store(store).steps() == []


def saves_tensor(store):
    state = {"order": torch.tensor([1, 2, 3 + dist.get_rank()])}
    with Checkpointer(store, state, strategy="full") as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()


def test_a_tensor_alone_that_differs_is_seen(gang, store):
    for outcome in gang.outcomes(saves_tensor, store, size=2):
        assert "saving 'order'" in outcome.text


def first_of_all(values, index, count):
    return {"at": sum(value["at"] for value in values), "order": values[index]["order"]}


def test_other_ranks_go_by_a_rule(gang, store):
    saved = gang.run(saves, store, {"sampler": "exact"}, size=4)
    for said in gang.run(loads, store, {"sampler": "exact"}, size=2):
        assert "'sampler' was saved by 4 ranks" in said
        assert "'own' was saved by 4 ranks" in said
    again = {"own": "replicate", "sampler": "replicate"}
    found = gang.run(loads, store, again, size=2)
    assert [rank[0] for rank in found] == [rank[0] for rank in saved[:2]]
    assert [rank[3]["rank"] for rank in found] == [0, 1]
    generators = [rank[1] for rank in found]
    assert generators[0] != generators[1]  # derived anew, and not the same on all
    assert not any(drawn in [rank[1] for rank in saved] for drawn in generators)
    assert [rank[1] for rank in gang.run(loads, store, again, size=2)] == generators
    made = gang.run(loads, store, {"own": "replicate", "sampler": first_of_all}, size=2)
    assert [rank[0] for rank in made] == [(60, rank[0][1]) for rank in saved[:2]]


def trains_with_a_generator(store, last):
    """Its dropout's generator is a part of the state: what it draws after `last`."""
    torch.manual_seed(0)
    model, generator = torch.nn.Linear(2, 2), torch.Generator().manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "generator": generator}
    with Checkpointer(store, state, strategy="full") as checkpointer:
        for step in range(checkpointer.restore() + 1, last + 1):
            model(torch.rand(3, 2, generator=generator)).sum().backward()
            optimizer.step()
            checkpointer.step(step)
    return torch.rand(3, generator=generator).tolist()


def test_one_processs_generator_is_derived_anew_on_two(gang, store):
    alone = gang.run(trains_with_a_generator, store, 2, size=1)
    both = gang.run(trains_with_a_generator, store, 2, size=2)
    assert both[0] != both[1]
    assert alone[0] not in both
    assert gang.run(trains_with_a_generator, store, 2, size=2) == both
    assert gang.run(trains_with_a_generator, store, 2, size=1) == alone


def statistics_of(store, last):
    """Of a BatchNorm under DDP, as they were when it began, and at the end."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    state = {"model": wrapped, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def found():
        return {name: buffer.tolist() for name, buffer in model[1].named_buffers()}

    with Checkpointer(store, state, strategy="log") as checkpointer:
        first = checkpointer.restore()
        begun = found()
        for step in range(first + 1, last + 1):
            state["optimizer"].zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            wrapped(torch.randn(5, 4, generator=generator)).square().mean().backward()
            state["optimizer"].step()
            checkpointer.step(step)
    return begun, found()


def test_buffers_that_differ_are_those_of_the_first_rank(gang, store):
    """And not each from another rank: DDP broadcasts the first one's before the next step."""
    (_, first), (_, second) = gang.run(statistics_of, store, 4, size=2)
    assert first["running_mean"] != second["running_mean"]
    assert first["running_var"] != second["running_var"]
    for begun, _ in gang.run(statistics_of, store, 4, size=2):
        assert begun == first


def shares(store, count, at):
    """Two ranks that have one sampler between them."""
    sampler = Position(at)
    state, mine = {"sampler": sampler}, ("exact", at, count)
    with Checkpointer(
        store, state, strategy="full", ranks=everstep.Ranks(by_rank={"sampler": mine})
    ) as checkpointer:
        if not checkpointer.restore():
            sampler.at = 100 + at
            checkpointer.step(1)
            checkpointer.wait()
    return sampler.values()


def by_data_rank(store, tensor_parallel):
    size = dist.get_world_size() // tensor_parallel
    return shares(store, size, dist.get_rank() // tensor_parallel)


def test_data_parallel_ranks_share(gang, store):
    saved = gang.run(by_data_rank, store, 2, size=4)
    assert saved[0] == saved[1] != saved[2]
    assert gang.run(by_data_rank, store, 1, size=2) == [saved[0], saved[2]]


def saves_model(store, strategy):
    job = zoo.build("fsdp2", RECIPE)
    state = {"model": job.model, "optimizer": job.optimizer}
    with Checkpointer(store, state, strategy=strategy) as checkpointer:
        for step in range(1, 4):
            job.train(step)
            checkpointer.step(step)
        job.train(4)
        checkpointer.save(4, tag="best", metrics={"loss": 1.5})
        checkpointer.wait()
    return job.full_state()


def loads_weights(store, step):
    job = zoo.build("tp", RECIPE)
    state = {"model": job.model, "optimizer": job.optimizer}
    before = len(job.optimizer.state)
    with Checkpointer(store, state) as checkpointer:
        assert checkpointer.restore(step, only="model") == 4
    assert len(job.optimizer.state) == before
    return job.full_state()


@pytest.mark.parametrize("strategy", ["log", *slow("full")])
def test_a_part_and_a_tag(gang, store, strategy):
    state = gang.run(saves_model, store, strategy, size=2)[0]
    assert Store(store).manifest("best").metrics == {"loss": 1.5}
    found = gang.run(loads_weights, store, "best", size=2)[0]
    weights = {name: tensor for name, tensor in state.items() if ":" not in name}
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
