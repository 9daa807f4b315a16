"""Copies that are rounded from their float32 masters take no bytes, and come back to the bit."""

import json
import os
import shutil
import signal

import pytest
import torch
from runs import check_same, checkpointer, end_keeper, freeze
from torch import nn

import coded
import forked
import forked_modules
import stores
from everstep import Corrupt, Store
from everstep.cli.main import main
from examples import slow
from independent_reader import read

COPIES = ("model.0.weight", "model.1.weight", "half")
SMALL = "model.1.bias"


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(1000, 700), nn.Linear(700, 4000)).bfloat16()
    masters = nn.ParameterList(p.detach().float() for p in model.parameters())
    half = masters[0].detach().half()
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    return {"model": model, "masters": masters, "half": half, "optimizer": optimizer}


def train(state):
    torch.manual_seed(len(state["optimizer"].state))
    for master in state["masters"]:
        master.grad = torch.randn(master.shape) * 1e-3
    state["optimizer"].step()
    with torch.no_grad():
        for master, copy in zip(state["masters"], state["model"].parameters(), strict=True):
            copy.copy_(master)
        state["half"].copy_(state["masters"][0])


def run(store, steps=3, change=lambda state, step: None):
    state, seen = build(1), {}
    with checkpointer(store, state, strategy="full") as saver:
        for step in range(1, steps + 1):
            train(state)
            change(state, step)
            saver.save(step).wait("local")
            seen[step] = freeze(state)
    return seen


def shown(store, step, capsys):
    capsys.readouterr()
    main(["show", str(store), str(step), "--json"])
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}


@pytest.fixture(autouse=True, params=["planes", *slow("raw")])
def encoders(request, monkeypatch):
    """`param`: how masters are encoded."""
    forked_modules.begin_with(monkeypatch, coded.choose, (request.param, "rounded"))


def test_every_reader_gets_what_was_saved(store, capsys):
    seen = run(store)
    rows = shown(store, 3, capsys)
    for name in COPIES:
        (codec,) = rows[name]["codecs"]
        assert (rows[name]["stored"], codec.split(":")[0]) == (0, "rounded"), name
    assert rows[SMALL]["stored"] == rows[SMALL]["size"]
    assert Store(store).verify().ok
    for step, frozen in seen.items():
        restored = build(2)
        with checkpointer(store, restored) as restorer:
            assert restorer.restore(step) == step
        check_same(freeze(restored), frozen)
        _, tensors = read(store, step)
        for name, tensor in Store(store).read(step).items():
            assert tensors[name][2] == bytes(tensor.reshape(-1).view(torch.uint8).numpy()), name


def test_a_copy_is_read_without_its_master(store):
    seen = run(store)
    restored, before = build(2), freeze(build(2))
    with checkpointer(store, restored) as restorer:
        assert restorer.restore(only=["model"]) == 3
    found = freeze(restored)
    check_same(found["model"], seen[3]["model"])
    check_same(found["masters"], before["masters"])


def test_what_is_no_rounding_is_stored(store, capsys):
    """One element of the second chunk; and numbers that are none, of any payload."""

    def change(state, step):
        with torch.no_grad():
            weight = state["model"][1].weight
            if step == 2:
                weight[-1, -1] += 1
            if step == 3:
                state["masters"][0].view(torch.int32)[0, :3] = torch.tensor([0x7F800001, -1, -9])
                state["model"][0].weight.view(torch.int16)[0, :3] = torch.tensor([0x7FC0, -1, -3])
                state["half"].view(torch.int16)[0, :3] = torch.tensor([0x7E00, -1, -3])

    seen = run(store, 3, change)
    rows = shown(store, 2, capsys)
    assert 0 < rows["model.1.weight"]["stored"] <= rows["model.1.weight"]["size"] - (4 << 20)
    assert rows["model.0.weight"]["stored"] == 0
    assert all(shown(store, 3, capsys)[name]["stored"] for name in COPIES[::2])
    for step, frozen in seen.items():
        restored = build(2)
        with checkpointer(store, restored) as restorer:
            assert restorer.restore(step) == step
        check_same(freeze(restored), frozen)


def trains_and_dies(store):
    state = build(1)
    with checkpointer(store, state, strategy="full") as saver:
        for step in (1, 2):
            train(state)
            saver.save(step).wait("local")
        os.kill(os.getpid(), signal.SIGKILL)


def test_memory_has_it_raw(store, monkeypatch):
    assert forked.run(trains_and_dies, store).returncode == -signal.SIGKILL
    expected = build(1)
    for _ in range(2):
        train(expected)
    with monkeypatch.context() as patch:
        patch.setattr("everstep.restore.choose._Lazy.read_into", None)  # no file is opened
        restored = build(2)
        with checkpointer(store, restored) as restorer:
            assert restorer.restore() == 2
    check_same(freeze(restored), freeze(expected))
    end_keeper(store)


@pytest.mark.parametrize("name", ["nobody", "optimizer.masters.1.exp_avg", "model.1.weight"])
def test_a_master_that_is_none_is_damage(store, name):
    """Not there, of another box, rounded itself."""
    run(store, 1)
    path = next(store.glob("checkpoints/*/manifest.json"))

    def change(value):
        for row in value["parts"][0]["encoded"]:
            if row[1].startswith("rounded:"):
                row[1] = f"rounded:{name}"

    stores.rewrite(path, change)
    with pytest.raises(Corrupt, match="rounded from"):
        Store(store).read(1, names=["model.0.weight"])


def test_a_copy_of_the_store_has_it(store, tmp_path):
    seen = run(store, 2)
    assert main(["cp", str(store), "2", str(tmp_path / "there")]) == 0
    shutil.rmtree(store)
    restored = build(2)
    with checkpointer(tmp_path / "there", restored) as restorer:
        assert restorer.restore() == 2
    check_same(freeze(restored), seen[2])
