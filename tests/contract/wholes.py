"""Logs of which steps are made whole, by hand or by a replica."""

import atexit
import contextlib
import functools
import shutil
import tempfile
from pathlib import Path

import torch
from keepers import until
from runs import end_keeper, logged, snapshot
from torch import nn

from everstep.store import catalog, names
from everstep.tiers.disk import Disk


def build(seed, kind=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12))
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[1].weight, model[1].bias, model[2].bias]},
    ]
    groups[1]["weight_decay"] = 0.0
    optimizer = kind(groups, **{"lr": 0.01, **options})
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state, clip=None):
    state["optimizer"].zero_grad()
    (3 * state["model"](torch.randn(8, 12)) - 1).square().mean().backward()
    if clip:
        clip(state["model"].parameters(), 0.5)
    state["optimizer"].step()
    state["scheduler"].step()


def workers_of(keeper):
    """The processes that a keeper has begun."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for task in Path(f"/proc/{keeper}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def begun(saver):
    """The keeper, and the worker that it has begun by now."""
    keeper = saver._client.keeper_pid
    (worker,) = until(lambda: workers_of(keeper), "a worker")
    return keeper, worker


def come(saver, step):
    """The replica has come to this step; it gives way to whatever else this machine does."""
    until(lambda: (saver.metrics.replica_step or 0) >= step, f"the replica at {step}", 200.0)


def whole_steps(store):
    disk = Disk(store)
    return [
        name.step
        for name in catalog.committed(disk)
        if disk.size(names.state_path(name)) is not None
    ]


def advance(saver, state, steps, frozen=None):
    """Train, and save durably; each step's snapshot."""
    frozen = {} if frozen is None else frozen
    for step in steps:
        train(state)
        saver.step(step).wait("local")
        frozen[step] = snapshot(state)
    return frozen


def tensors_of(state):
    """As Store.read names them."""
    found = {f"model.{key}": value.clone() for key, value in state["model"].state_dict().items()}
    for key, parameter in state["model"].named_parameters():
        for kind, value in state["optimizer"].state[parameter].items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer.model.{key}.{kind}"] = value.clone()
    return found


def same(found, expected):
    """What Store.read returns is what tensors_of() did."""
    assert expected
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


@functools.cache
def _original():
    """A folder with a store of eight steps, which is filled once; each step's snapshot."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    frozen = _fill(Path(folder.name, "store"), 8)
    end_keeper(Path(folder.name, "store"))
    return folder.name, frozen


def fill(store):
    """A base at step 1, and seven records after it; each step's snapshot."""
    folder, frozen = _original()
    shutil.copytree(Path(folder, "store"), store)
    return frozen


def _fill(store, steps):
    state = build(1)
    with logged(store, state, base_every=1000) as saver:
        return advance(saver, state, range(1, steps + 1))
