"""Checkpoints of a run whose optimizer is offloaded: whole states, logs, replicas."""

import os
import signal

import pytest
import torch
from runs import check_same, check_steps, checkpointer, end_keeper, logged, snapshot
from torch import nn
from wholes import come, whole_steps

import forked
from everstep import OffloadedOptimizer, Store, Unsupported
from everstep.format.manifest import CheckpointName
from everstep.restore import load
from everstep.restore.materialize import materialize
from everstep.store import catalog
from everstep.tiers.disk import Disk
from examples import slow
from processes import until

pytestmark = pytest.mark.timeout(300)  # replicas give way to whatever else this machine does


def build(seed, dtype=torch.bfloat16, width=24, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, width), nn.Linear(width, 12)).to(dtype)
    optimizer = OffloadedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state):
    state["optimizer"].zero_grad()
    inputs = torch.randn(8, 12).to(state["model"][0].weight.dtype)
    (3 * state["model"](inputs) - 1).square().mean().backward()
    state["optimizer"].step()
    state["scheduler"].step()


def run(store, dtype, steps=7, **options):
    state, frozen = build(1, dtype), {}
    with checkpointer(store, state, **options) as saver:
        for step in range(1, steps + 1):
            train(state)
            saver.step(step).wait("local")
            frozen[step] = snapshot(state)
    return state, frozen


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("full", torch.bfloat16),
        *slow(("full", torch.float32), ("log", torch.float32), ("log", torch.bfloat16)),
    ],
)
def test_every_step_is_restored_as_it_was(store, strategy, dtype):
    _, frozen = run(store, dtype, strategy=strategy)
    said = catalog.read_table(Disk(store), Store(store).manifest(1).parts[0]).optimizers[
        "optimizer"
    ]
    assert said["state"].keys() == said["groups"].keys()  # as of any of torch's
    assert len(check_steps(store, build(2, dtype), frozen)) == 7
    fresh = build(3, dtype)
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore(4) == 4
    for _ in range(5, 8):
        train(fresh)
    check_same(snapshot(fresh), frozen[7])
    if strategy == "log":
        assert sum(not each.previous for each in map(Store(store).manifest, range(1, 8))) <= 2
        assert materialize(Disk(store), CheckpointName(6, 1)).exact
        assert whole_steps(store) == [6]
        assert len(check_steps(store, build(4, dtype), frozen)) == 7


@pytest.mark.parametrize("strategy", ["log", *slow("full")])
def test_updates_in_backward_wait_for_copies(store, strategy):
    """No step waits for the one before to be written."""
    state, frozen = build(1, torch.float32, width=60_000, overlap=True), {}
    with checkpointer(store, state, strategy=strategy, memory_bytes=1 << 30) as saver:
        for step in range(1, 6):
            train(state)
            saver.step(step)
            frozen[step] = snapshot(state)
        state["optimizer"].zero_grad()
        (3 * state["model"](torch.randn(8, 12)) - 1).square().mean().backward()
        with pytest.raises(Unsupported, match=r"Save after step\(\)"):
            saver.save(6)
        state["optimizer"].step()
        saver.step(7)
        frozen[7] = snapshot(state)
    assert len(check_steps(store, build(2, torch.float32, width=60_000), frozen)) == 6
    state["optimizer"].close()


class Waiting(nn.Sequential):
    """Backward waits in its midst until the last layer's update is made."""

    def __init__(self):
        super().__init__(*(nn.Linear(1500, 1500, bias=False) for _ in range(2)))
        self.wait = lambda: None

    def forward(self, rows):
        hidden = self[0](rows)
        hidden.register_hook(lambda gradient: self.wait())
        return self[1](hidden)


def waiting(seed):
    """A state whose updates are made in backward for sure."""
    torch.manual_seed(seed)
    model = Waiting()
    optimizer = OffloadedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01, overlap=True)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.slow
def test_records_are_made_of_updates_in_backward(store, caplog):
    state, frozen = waiting(1), {}
    model, optimizer = state["model"], state["optimizer"]

    def wait():
        now = optimizer.state[model[1].weight]["exp_avg"]
        until(lambda: not torch.equal(now, before), "no update")

    with logged(store, state) as saver:
        for step in range(1, 7):
            optimizer.zero_grad()
            if step > 1:
                before = optimizer.state[model[1].weight]["exp_avg"].clone()
                model.wait = wait
            model(torch.randn(4, 1500)).square().mean().backward()
            optimizer.step()
            saver.step(step)
            frozen[step] = snapshot(state)
    assert not caplog.records
    assert all(Store(store).manifest(step).previous for step in range(3, 7))
    assert len(check_steps(store, waiting(2), frozen)) == 6
    optimizer.close()


def test_what_overlap_could_not_have_is_restored(store):
    """Though updates that nobody wants any more are still made then."""
    state, expected = (
        build(1, torch.float32, width=60_000, overlap=each) for each in (True, False)
    )
    with checkpointer(store, state, strategy="full") as saver:
        torch.manual_seed(3)
        train(state)
        saver.save(1).wait()
        loss = (3 * state["model"](torch.randn(8, 12)) - 1).square().mean()
        state["optimizer"].zero_grad()
        loss.backward(retain_graph=True)
        with pytest.raises(Unsupported, match="several backward"):
            loss.backward()
        assert saver.restore() == 1
        train(state)
    torch.manual_seed(3)
    for _ in range(2):
        train(expected)
    check_same(snapshot(state), snapshot(expected))


def trains_and_dies(store):
    state = build(1)
    saver = logged(store, state, replica=True, base_every=1000)
    for step in range(saver.restore() + 1, 100):
        train(state)
        saver.step(step).wait("local")
        if step % 6 == 0:
            break
    come(saver, step)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_replica(store, monkeypatch):
    for _ in range(2):
        assert forked.run(trains_and_dies, store).returncode == -signal.SIGKILL
    expected = build(1)
    for _ in range(12):
        train(expected)
    frozen, restored = snapshot(expected), build(2)
    with monkeypatch.context() as patch, checkpointer(store, restored) as restorer:
        patch.setattr("everstep.restore.choose._Lazy.read_into", None)
        assert restorer.restore() == 12
    check_same(snapshot(restored), frozen)
    end_keeper(store)


KEYS = ("exp_avg", "exp_avg_sq", "master")
WIDE = 50_000  # what is small is read together with what is beside it


def dies(store, states, strategy, more):
    """After step 5, of which it has a checkpoint, and some that are not saved."""
    state = build(1, states=states, width=WIDE)
    options = {"replica": True, "base_every": 1000} if strategy == "log" else {}
    saver = checkpointer(store, state, strategy=strategy, **options)
    for step in range(1, 6):
        train(state)
        saver.step(step).wait("local")
    if strategy == "log":
        come(saver, 5)
    for _ in range(more):
        train(state)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("strategy", "is_on_disk", "more"),
    [("full", False, 0), *slow(("full", True, 0), ("full", False, 1), ("log", False, 0))],
)
def test_after_the_trainers_death_weights_alone_are_read(
    store, tmp_path, monkeypatch, strategy, is_on_disk, more
):
    """The optimizer's state is where the last update left it; but where that was never saved."""
    states = tmp_path if is_on_disk else None
    assert forked.run(dies, store, states, strategy, more).returncode == -signal.SIGKILL
    expected, read = build(1, width=WIDE), set()
    for _ in range(5):
        train(expected)
    frozen = snapshot(expected)
    train(expected)
    restored = build(2, states=states, width=WIDE)
    read_from = load._Task._read_from

    def spy(task, span, source):
        read.update(target.name for target in span.targets)
        read_from(task, span, source)

    with checkpointer(store, restored) as restorer:
        monkeypatch.setattr(load._Task, "_read_from", spy)
        assert restorer.restore() == 5
        check_same(snapshot(restored), frozen)
        of_optimizer = {f"optimizer.model.{n}.weight.{key}" for n in (0, 1) for key in KEYS} & read
        assert bool(of_optimizer) == bool(more), of_optimizer
        assert "model.0.weight" in read
        train(restored)
        check_same(snapshot(restored), snapshot(expected))
        restorer.save(6).wait("local")


@pytest.mark.slow
def test_memory_of_another_optimizer_is_left_alone(store):
    assert forked.run(dies, store, None, "full", 0).returncode == -signal.SIGKILL
    model = build(2, width=WIDE)["model"]
    optimizer = OffloadedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    with checkpointer(store, {"model": model, "optimizer": optimizer}) as restorer:
        assert restorer.restore(only=["model"]) == 5
    expected = build(1, width=WIDE)
    for _ in range(5):
        train(expected)
    check_same(snapshot({"model": model}), snapshot({"model": expected["model"]}))
