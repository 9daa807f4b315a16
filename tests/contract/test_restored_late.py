"""restore(first="model"): weights at once, and the optimizer's state before the first update."""

import threading

import pytest
import torch
from runs import build_plain, check_same, checkpointer, end_keeper, snapshot, supervised
from torch import nn

from everstep import Corrupt, Mismatch, OffloadedOptimizer, Store
from everstep.restore import load
from examples import slow


def build(seed, kind=torch.optim.AdamW):
    """Of a size of which moments have chunks of their own."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 200_000)
    optimizer = kind(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer}


def offloaded(parameters, **options):
    return OffloadedOptimizer(torch.optim.AdamW, parameters, **options)


def overlapped(parameters, **options):
    return offloaded(parameters, overlap=True, **options)


def run(store, kind=torch.optim.AdamW, steps=3, strategy="full"):
    """Each step's snapshot, and one of a step that is not saved."""
    state, frozen = build(1, kind), {}
    with checkpointer(store, state, strategy=strategy) as saver:
        for step in range(1, steps + 2):
            supervised(state)
            if step <= steps:
                saver.save(step).wait()
            frozen[step] = snapshot(state)
    return frozen


@pytest.fixture
def held(monkeypatch):
    """What is read of an optimizer's moments waits for it."""
    event, read = threading.Event(), load._Task._read_from

    def wait_and_read(task, span, source):
        if any(".exp_avg" in target.name for target in span.targets):
            assert event.wait(60)
        read(task, span, source)

    monkeypatch.setattr(load._Task, "_read_from", wait_and_read)
    yield event
    event.set()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, *slow(offloaded, overlapped)])
def test_weights_come_before_moments(store, held, kind):
    frozen = run(store, kind)
    end_keeper(store)
    fresh = build(2, kind)
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore(first="model") == 3
        model, optimizer = fresh["model"], fresh["optimizer"]
        check_same(snapshot({"model": model}), snapshot_of(frozen[3], "model"))
        assert not restorer._state._late.done()
        inputs = torch.randn(8, 6)
        threading.Timer(0.2, held.set).start()  # within backward, or the update
        model(inputs).square().mean().backward()
        optimizer.step()
        assert held.is_set()
        check_same(snapshot(fresh), frozen[4])


def snapshot_of(frozen, part):
    """Of one part."""
    return {**frozen, "state": {part: frozen["state"][part]}}


def test_a_save_waits_for_them(store, held):
    frozen = run(store)
    end_keeper(store)
    fresh = build(2)
    with checkpointer(store, fresh) as restorer:
        restorer.restore(first=["model"])
        threading.Timer(0.2, held.set).start()
        restorer.save(4).wait()
    other = build(3)
    with checkpointer(store, other) as restorer:
        restorer.restore(4)
    check_same(snapshot(other)["state"], frozen[3]["state"])


def test_moments_that_are_damaged_are_told_at_the_update(store):
    frozen = run(store)
    end_keeper(store)
    (part,) = Store(store).manifest(3).parts
    name = "optimizer.model.weight.exp_avg"
    content = Store(store).read(3, names=[name])[name].numpy().tobytes()
    path = store / part.packs[0].path
    data = bytearray(path.read_bytes())
    data[data.index(content[:4096])] ^= 1
    path.write_bytes(data)
    fresh = build(2)
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore(first="model") == 3
        for _ in range(2):
            with pytest.raises(Corrupt, match=r"half filled.*Restore without first="):
                supervised(fresh)
        assert restorer.restore() == 2
        check_same(snapshot(fresh), frozen[2])
        supervised(fresh)
        check_same(snapshot(fresh), frozen[3])


def test_of_a_log_all_is_there(store):
    frozen = run(store, strategy="log")
    fresh = build(2)
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore(first="model") == 3
        check_same(snapshot(fresh), frozen[3])


def test_names_that_are_no_parts(store):
    run(store, steps=1)
    with checkpointer(store, build_plain(1)) as restorer:
        with pytest.raises(Mismatch, match="no such part"):
            restorer.restore(first="modle")
        with pytest.raises(ValueError, match="first must be names"):
            restorer.restore(first=[])
