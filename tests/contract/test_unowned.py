"""What no optimizer owns is in a record once it has changed since the base, and not before."""

import subprocess
import sys
import time

import pytest
import torch
from logs import check_run
from runs import check_steps, checkpointer, kinds, logged, snapshot
from torch import nn

from everstep import Store
from everstep.capture import unowned
from everstep.store.catalog import read_table
from everstep.tiers.disk import Disk
from examples import slow

FROZEN = "model.encoder.weight"


class Adapted(nn.Module):
    """A frozen encoder, and adapters that are trained."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(200, 200)
        self.down = nn.Linear(200, 4, bias=False)
        self.up = nn.Linear(4, 200, bias=False)
        self.encoder.requires_grad_(False)

    def forward(self, rows):
        return self.encoder(rows) + self.up(self.down(rows))


def build(seed):
    torch.manual_seed(seed)
    model = Adapted()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=0.01)}


def train(state, step=0):
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 200)).square().mean().backward()
    state["optimizer"].step()


def tensors_of(store, step):
    """The names that the record of a step has, or the base."""
    disk, manifest = Disk(store), Store(store).manifest(step)
    found = set()
    for part in (*manifest.parts, *(part for record in manifest.records for part in record.parts)):
        found |= read_table(disk, part).tensors.keys()
    return found


def bytes_of(store):
    return [path.stat().st_size for path in sorted((store / "data").glob("*.safetensors"))]


@pytest.mark.parametrize("strategy", ["auto", "log"])
def test_an_adapted_model_gets_a_log_by_default(store, strategy):
    options = {"steps": 10, "strategy": strategy, "base_every": None}
    check_run(store, build, train, "brrrrrrrrr", **options)
    assert FROZEN in tensors_of(store, 1)
    assert FROZEN not in tensors_of(store, 10)
    whole = max(bytes_of(store))
    assert min(bytes_of(store)) < whole / 5


def test_a_record_is_smaller_than_adapters_and_moments(store):
    """And the frozen encoder is in one base of 40 steps."""
    state, handles = build(1), []
    with checkpointer(store, state) as saver:
        for step in range(1, 41):
            train(state)
            handles.append(saver.step(step))
    model, optimizer = state["model"], state["optimizer"]
    trained = [each for each in model.parameters() if each.requires_grad]
    moments = [each for kept in optimizer.state.values() for each in kept.values()]
    assert kinds(store) == "b" + 39 * "r"
    sizes = [handle.bytes for handle in handles]
    assert max(sizes[1:]) < 1.3 * sum(each.nbytes for each in trained + moments)
    frozen = sum(each.nbytes for each in model.encoder.parameters())
    assert sum(bytes_of(store)) < 1.3 * frozen + sum(sizes[1:])


@pytest.mark.parametrize("way", ["data", "swap", *slow("numpy", "in place")])
def test_a_frozen_weight_that_is_written_to(store, monkeypatch, way):
    """However it is written to, it is there at the latest when all bytes have been looked at."""
    monkeypatch.setattr(unowned, "_BLOCKS_MAX", 4)
    monkeypatch.setattr(unowned, "_BLOCK_BYTES", 4096)
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 31):
            train(state)
            weight = state["model"].encoder.weight
            if step == 5 and way == "data":
                weight.data[100, 100] = 7.0
            elif step == 5 and way == "numpy":
                weight.detach().numpy()[100, 100] = 7.0
            elif step == 5 and way == "in place":
                with torch.no_grad():
                    weight[100, 100] = 7.0
            elif step == 5:
                weight.data = weight.data.clone().fill_(7.0)
            saver.step(step)
            frozen[step] = snapshot(state)
            time.sleep(0.02)  # for the thread that looks
    assert kinds(store)[-1] == "r"
    first = 5 if way in ("in place", "swap") else 20
    check_steps(store, build(2), frozen, [30, 29, 25, 21, first, 4, 1])


def test_a_target_network_that_is_rewritten_now_and_then(store):
    def make(seed):
        state = build(seed)
        return {**state, "target": nn.Linear(4, 200, bias=False).requires_grad_(False)}

    def train_and_copy(state, step):
        train(state)
        if step % 10 == 0:
            state["target"].load_state_dict(state["model"].up.state_dict())

    check_run(store, make, train_and_copy, "b" + 24 * "r", steps=25)
    assert "target.weight" not in tensors_of(store, 9)
    assert "target.weight" in tensors_of(store, 10)
    assert "target.weight" in tensors_of(store, 25)


def test_an_average_of_the_weights_is_in_every_record(store):
    def make(seed):
        state = build(seed)
        ema = torch.optim.swa_utils.AveragedModel(
            state["model"].up, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        return {**state, "ema": ema}

    def average(state, step):
        train(state)
        state["ema"].update_parameters(state["model"].up)

    check_run(store, make, average, "brrrrrrr")
    assert "ema.module.weight" in tensors_of(store, 5)


ENDING = """
import atexit, sys, torch, everstep
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
state = {"model": model, "optimizer": torch.optim.SGD(model[0].parameters(), lr=0.1)}
saved = everstep.Checkpointer(sys.argv[1], state, strategy=everstep.Log(base_every=4))

def train(steps):
    for step in steps:
        state["optimizer"].zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
        state["optimizer"].step()
        saved.step(step)

train(range(1, 4))
atexit.register(train, range(4, 10))
"""


@pytest.mark.slow
def test_saves_while_the_program_ends(store):
    done = subprocess.run([sys.executable, "-c", ENDING, store], capture_output=True, text=True)
    assert Store(store).latest() == 9, done.stderr
