"""States whose tensors are encoded: read back from disk and memory, by two readers."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from runs import check_same, checkpointer, end_keeper, freeze
from torch import nn

import coded
import forked
import forked_modules
import stores
from everstep import Conflict, Store, Tiers
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.format.packs import Spec
from everstep.store import catalog
from everstep.store.copy import Copier
from everstep.tiers.disk import Disk
from examples import slow
from independent_reader import Damaged, read

STEPS = 6
ENCODERS = {
    "planes": ("planes",),
    "zstd": ("zstd",),
    "all": ("planes", "raw", "zstd", "zeros"),
}


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(2000, 300), nn.Linear(300, 300), nn.Linear(300, 1500))
    model[0].requires_grad_(False)
    model.register_buffer("ids", torch.arange(40_000) // 7)
    model[1].to(torch.bfloat16)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def train(state):
    torch.manual_seed(len(state["optimizer"].state))
    for parameter in state["model"][1:].parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype) * 1e-3
    state["optimizer"].step()


def run(store, **options):
    """Train; what the state was at each step."""
    state, seen = build(1), {}
    with checkpointer(store, state, strategy="full", **options) as saver:
        for step in range(1, STEPS + 1):
            train(state)
            saver.save(step).wait("local")
            seen[step] = freeze(state)
    return seen


def codecs_of(store, step):
    path = next(Path(store).glob(f"checkpoints/{step:08}-*/manifest.json"))
    (part,) = json.loads(path.read_bytes())["parts"]
    return {row[1] for row in part.get("encoded", ())}


@pytest.fixture(params=["all", *slow("planes", "zstd")])
def encoders(request, monkeypatch):
    found = ENCODERS[request.param]
    forked_modules.begin_with(monkeypatch, coded.choose, found)
    return found


def test_every_reader_gets_what_was_saved(store, encoders):
    seen = run(store)
    assert codecs_of(store, STEPS) == {"planes" if e == "zeros" else e for e in encoders} - {"raw"}
    assert Store(store).verify().ok
    for step, frozen in seen.items():
        restored = build(2)
        with checkpointer(store, restored) as restorer:
            assert restorer.restore(step) == step
        check_same(freeze(restored), frozen)
        _, tensors = read(store, step)
        for name, tensor in Store(store).read(step).items():
            assert tensors[name][2] == bytes(tensor.reshape(-1).view(torch.uint8).numpy()), name


def test_the_commands_tell_what_is_stored(store, encoders, capsys):
    run(store)
    main(["show", str(store), "--json"])
    shown = json.loads(capsys.readouterr().out)
    tensors = {row["name"]: row for row in shown["tensors"]}
    frozen = tensors.pop("model.0.weight")
    assert (frozen["stored"], frozen["referenced"]) == (0, frozen["size"])
    tensors = {name: row for name, row in tensors.items() if not row["referenced"]}
    own = [pack["size"] for pack in shown["packs"] if f"{STEPS:08}-" in pack["path"]]
    small = 2 * 4096
    stored = sum(row["stored"] for row in tensors.values())
    assert sum(own) - small <= stored <= sum(own) == shown["added"] < shown["size"]
    assert {codec for row in tensors.values() for codec in row["codecs"]} == codecs_of(store, STEPS)
    for row in tensors.values():
        assert (row["stored"] < row["size"]) == bool(row["codecs"])
    main(["ls", str(store), "--json"])
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    are_alone = [row["added"] == row["size"] for row in rows]
    assert (are_alone[0], are_alone[-1]) == (True, False)
    main(["show", str(store)])
    out = capsys.readouterr().out
    assert all(word in out for word in ("CODEC", "referenced", "STORED"))
    main(["ls", str(store)])
    assert "ADDED" in capsys.readouterr().out


def test_raw_means_raw(store, encoders):
    run(store, tiers=Tiers(codecs="raw"))
    assert all(codecs_of(store, step) == set() for step in range(1, STEPS + 1))


def trains_and_dies(store):
    state = build(1)
    with checkpointer(store, state, strategy="full") as saver:
        for step in range(1, STEPS + 1):
            train(state)
            saver.save(step).wait("local")
        os.kill(os.getpid(), signal.SIGKILL)


def test_memory_has_it_raw(store, encoders, monkeypatch):
    assert forked.run(trains_and_dies, store).returncode == -signal.SIGKILL
    assert codecs_of(store, STEPS)
    expected = build(1)
    for _ in range(STEPS):
        train(expected)
    with monkeypatch.context() as patch:
        patch.setattr("everstep.restore.choose._Lazy.read_into", None)  # no file is opened
        restored = build(2)
        with checkpointer(store, restored) as restorer:
            assert restorer.restore() == STEPS
    check_same(freeze(restored), freeze(expected))
    end_keeper(store)
    check_same(freeze(_restored(store)), freeze(expected))


def _restored(store):
    state = build(3)
    with checkpointer(store, state) as restorer:
        assert restorer.restore() == STEPS
    return state


@pytest.mark.parametrize("where", ["chunk", "content"])
def test_damage_is_found(store, encoders, where):
    """Of a file, and where what is decoded is not what was encoded."""
    seen = run(store)
    disk = Disk(store)
    manifest = catalog.read_manifest(disk, catalog.lineage(disk)[-1])
    pack = store / manifest.parts[0].packs[0].path
    if where == "chunk":
        data = bytearray(pack.read_bytes())
        data[4096] ^= 1
        pack.write_bytes(data)
    else:
        path = next(store.glob(f"checkpoints/{STEPS:08}-*/manifest.json"))

        def change(value):
            for row in value["parts"][0]["encoded"]:
                row[2] = "0" * 32

        stores.rewrite(path, change)
    with pytest.raises(Damaged):
        read(store, STEPS)
    restored = build(2)
    with checkpointer(store, restored) as restorer:
        assert restorer.restore() == STEPS - 1
    check_same(freeze(restored), seen[STEPS - 1])


def test_a_step_that_another_keeper_has_encoded_is_the_same(tmp_path, monkeypatch):
    """A keeper dies after its commit; the next one, which encodes otherwise, is handed it again."""
    specs = (Spec("ids", "int32", (40_000,)), Spec("weights", "float32", (40_000,)))
    monkeypatch.setattr(stores, "content", lambda spec, step: bytes(spec.size - 1) + bytes([step]))
    coded.choose(("planes", "zstd"), patch=monkeypatch.setattr)
    disk = Disk(tmp_path)
    first = stores.Trainer(disk, specs=specs)
    first.claim()
    first.save(1)
    (part,) = catalog.read_manifest(disk, catalog.committed(disk)[0]).parts
    assert {each.codec for each in part.encoded} == {"planes", "zstd"}
    for encoders in (("raw",), ("zstd",), ("planes",)):
        coded.choose(encoders, patch=monkeypatch.setattr)
        again = stores.Trainer(disk, specs=specs, epoch=1)
        assert again.save(1).name == CheckpointName(1, 1)
        other = stores.Trainer(disk, specs=specs, epoch=1)
        with pytest.raises(Conflict, match="other content"):
            other.commit(other.seal(1, salt=1))
    assert len(stores.packs_of(tmp_path)) == 1


def test_a_step_that_another_tier_has_encoded_is_the_same(tmp_path, monkeypatch):
    """It was routed there, the answer got lost, and the store took it as it is."""
    specs = (Spec("ids", "int32", (40_000,)), Spec("weights", "float32", (40_000,)))
    monkeypatch.setattr(stores, "content", lambda spec, step: bytes(spec.size - 1) + bytes([step]))
    local, remote = Disk(tmp_path / "local"), Disk(tmp_path / "remote")
    stores.Trainer(local, specs=specs).claim()
    shutil.copytree(local.root, remote.root)
    coded.choose(("planes", "zstd"), patch=monkeypatch.setattr)
    stores.Trainer(remote, specs=specs, epoch=1).save(1)
    coded.choose(("raw",), patch=monkeypatch.setattr)
    stores.Trainer(local, specs=specs, epoch=1).save(1)
    assert not Copier(local, remote).copy(CheckpointName(1, 1)).checkpoints
    shutil.rmtree(local.root / "checkpoints")
    stores.Trainer(local, specs=specs, epoch=1).save(1, salt=1)
    with pytest.raises(Conflict):
        Copier(local, remote).copy(CheckpointName(1, 1))
