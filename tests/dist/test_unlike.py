"""Ranks that are not alike, and tensors of which there is nothing to write."""

import contextlib
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from choices import chosen
from everstep import Checkpointer, Store, Unavailable, Unsupported
from everstep.sharding import world
from everstep.sharding.world import World
from examples import slow


def says(store, state, settings):
    """What making a Checkpointer says on this rank."""
    try:
        with Checkpointer(store, state[dist.get_rank()], **chosen(**settings[dist.get_rank()])):
            return "made"
    except (ValueError, Unsupported) as error:
        return str(error)


@pytest.mark.parametrize(
    ("state", "settings", "said"),
    [
        ([{"a": 1, "b": 2}, {"b": 2}], [{}, {}], "['a'] only on rank 0, nothing only on rank 1"),
        ([{"a": {"x": 1}}, {"a": {"y": 1}}], [{}, {}], "made"),
        ([{"a": 1}] * 2, [{"every": 1}, {"every": 2}], "every is 1 on rank 0, 2 on rank 1"),
    ],
)
def test_what_could_not_be_restored_is_an_error_at_once(gang, store, state, settings, said):
    for found in gang.run(says, store, state, settings, size=2):
        assert said in found


def waits_for_another(store):
    """Rank 1 makes its Checkpointer only when rank 0 has said for whom it waits."""
    group = dist.distributed_c10d._get_default_store()
    said = []

    class Told(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())
            group.set("told", "yes")

    world.TELL_S = 0.01
    try:
        with contextlib.ExitStack() as stack:
            if dist.get_rank():
                group.wait(["told"])
            else:
                logging.getLogger("everstep").addHandler(handler := Told(logging.WARNING))
                stack.callback(logging.getLogger("everstep").removeHandler, handler)
            Checkpointer(store, {"x": 1}).close()
    finally:
        world.TELL_S = 10.0
    return said


def test_who_is_waited_for_is_told(gang, store):
    said = gang.run(waits_for_another, store, size=2)[0]
    assert "rank 0 waits for ranks [1]" in said[0]
    assert "alone=True" in said[0]


def records_on_one_rank(store):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if dist.get_rank() else None
    state = {"model": model, "optimizer": optimizer}
    return says(store, [state] * 2, [{"strategy": "log"}] * 2)


def test_what_one_rank_refuses_all_do(gang, store):
    for found in gang.run(records_on_one_rank, store, size=2):
        assert "the state has none" in found


def has_parts(store, strategy, rate):
    """A model and its optimizer, but not on the first rank and the last, where they are None."""
    state = {"note": None, "model": None, "optimizer": None}
    is_in = dist.get_rank() in (1, 2) or dist.get_world_size() == 1
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if is_in:
        state |= {"model": model, "optimizer": optimizer}
    with Checkpointer(store, state, strategy=strategy) as checkpointer:
        if checkpointer.restore() == 0 and is_in:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        checkpointer.step(1)
        checkpointer.wait()
    momentum = [row["momentum_buffer"] for row in optimizer.state.values()]
    values = [*model.parameters(), *momentum] if is_in else []
    return [value.detach().clone() for value in values], optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("strategy", ["auto", *slow("full")])
@pytest.mark.parametrize("size", [1, 4])
def test_what_a_rank_does_not_have_is_none(gang, store, strategy, size):
    saved = gang.run(has_parts, store, strategy, 0.1, size=size)
    found = gang.run(has_parts, store, strategy, 0.5, size=size)
    for (before, _), (after, rate) in zip(saved, found, strict=True):
        assert len(before) == len(after)
        assert all(map(torch.equal, before, after))
        assert not after or rate == 0.1
    assert len(found[-2 if size > 1 else 0][0]) == 4


class Empties(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.rows = nn.Parameter(torch.zeros(0, 4))
        self.columns = nn.Parameter(torch.zeros(4, 0))

    def forward(self, x):
        return self.layer(x)


def goes_on(layout, store, last):
    """From what is restored; the layer's weight at the end."""
    torch.manual_seed(0)
    model = Empties()
    if layout == "fsdp2":
        fsdp.fully_shard(model)
    wrapped = model
    if layout == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": wrapped, "optimizer": optimizer}
    with Checkpointer(store, state, strategy="log") as checkpointer:
        first = checkpointer.restore()
        for step in range(first + 1, last + 1):
            optimizer.zero_grad()
            wrapped(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            checkpointer.step(step)
        checkpointer.wait()
    weight = model.layer.weight.detach()
    return first, (weight.full_tensor() if isinstance(weight, DTensor) else weight).clone()


def test_parameters_without_elements(gang, store):
    for last, (saved, loaded) in enumerate([("fsdp2", "ddp"), ("ddp", "fsdp2")], 1):
        (_, before), *_ = gang.run(goes_on, saved, store, 2 * last, size=2)
        for size in (2, 4):
            for first, after in gang.run(goes_on, loaded, store, 0, size=size):
                assert first == 2 * last
                assert torch.equal(before, after)
    assert Store(store).verify().ok


def breaks_on_one_rank(_store):
    """What a function of the user's raises, while others wait for this rank."""

    def work():
        if dist.get_rank() == 1:
            raise KeyError("what it had")

    try:
        World.current().together("matching", work)
    except (KeyError, Unavailable) as error:
        return repr(error)


def test_what_one_rank_raises_nobody_waits_for(gang, store):
    mine, theirs = reversed(gang.run(breaks_on_one_rank, store, size=2))
    assert mine == "KeyError('what it had')"
    assert "Unavailable" in theirs
    assert "rank 1: matching: KeyError" in theirs
