"""States that are stored as differences to those before them: read, deleted, copied, damaged."""

import json
import os
import random
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
from everstep import Conflict, Corrupt, Keep, Store, Tiers
from everstep.cli.main import main
from everstep.format.document import digest_of
from everstep.format.manifest import CheckpointName
from everstep.keeper.writer import DIFFERENCES_MAX
from everstep.store import catalog, retain
from everstep.tiers.disk import Disk
from independent_reader import Damaged, read

STEPS = 13


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1500))
    model[0].to(torch.bfloat16)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-5)}


def train(state):
    torch.manual_seed(len(state["optimizer"].state) + 7)
    for parameter in state["model"].parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype) * 1e-3
    state["optimizer"].step()


def run(store, steps=STEPS, state=None, **options):
    state, seen = state or build(1), {}
    with checkpointer(store, state, strategy="full", **options) as saver:
        first = saver.restore() + 1
        for step in range(first, first + steps):
            train(state)
            handle = saver.save(step)
            handle.wait("local")
            seen[step] = freeze(state)
        if "tiers" in options:
            handle.wait("remote", timeout=60)
    return seen


def bases(store):
    """Of each checkpoint that is there, the step to which it has differences."""
    disk = Disk(store)
    found = {}
    for name in sorted(catalog.committed(disk)):
        behind = catalog.read_manifest(disk, name).behind
        found[name.step] = behind.step if behind else None
    return found


def depths(store):
    found = {}
    for step, base in bases(store).items():
        found[step] = 0 if base is None else found[base] + 1
    return found


def check_restored(store, step, frozen):
    restored = build(2)
    with checkpointer(store, restored) as restorer:
        assert restorer.restore(step) == step
    check_same(freeze(restored), frozen)


@pytest.fixture(autouse=True)
def _encoders(monkeypatch):
    forked_modules.begin_with(monkeypatch, coded.choose, ("planes", "difference", "zstd"))


def test_every_reader_gets_what_was_saved(store, capsys):
    seen = run(store)
    found = depths(store)
    assert max(found.values()) == DIFFERENCES_MAX
    assert list(found.values()).count(DIFFERENCES_MAX) < list(found.values()).count(0)
    assert Store(store).verify().ok
    for step, frozen in seen.items():
        check_restored(store, step, frozen)
        _, tensors = read(store, step)
        for name, tensor in Store(store).read(step).items():
            assert tensors[name][2] == bytes(tensor.reshape(-1).view(torch.uint8).numpy()), name
    sizes = [Store(store).manifest(step).size for step in (1, 4)]
    assert sizes[1] < 0.8 * sizes[0]
    main(["show", str(store), "4", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["base"]["step"] == 3
    assert "difference" in {codec for row in shown["tensors"] for codec in row["codecs"]}
    for name, tensor in Store(store).read(4).items():
        content = digest_of(tensor.reshape(-1).view(torch.uint8).numpy().data)
        assert [row["digest"] for row in shown["tensors"] if row["name"] == name] == [content]
    main(["show", str(store), "4"])
    assert "step 3, to which it has differences" in capsys.readouterr().out


def test_what_differences_are_to_stays(store):
    seen = run(store, keep=Keep(last=1, every=6))
    there = bases(store)
    assert set(there) == {6, 12, 13}
    assert there[6] is there[12] is None  # they stay, and nothing else for them
    assert all(base in there for base in there.values() if base is not None)
    for step in there:
        check_restored(store, step, seen[step])
    base = there[STEPS]
    with pytest.raises(Conflict, match="goes on from there"):
        retain.delete(Disk(store), [CheckpointName(base, 1)])
    retain.sweep(Disk(store))
    assert Store(store).verify().ok


def test_one_that_is_damaged_costs_those_after_it(store, capsys):
    seen = run(store, 6)
    disk = Disk(store)
    pack = store / catalog.read_manifest(disk, CheckpointName(4, 1)).parts[0].packs[0].path
    data = bytearray(pack.read_bytes())
    data[5000:6000] = bytes(1000)
    pack.write_bytes(data)
    with pytest.raises(Damaged):
        read(store, 6)
    with pytest.raises(Corrupt):
        Store(store).read(6)
    assert main(["verify", str(store)]) == 1
    assert "cannot be restored" in capsys.readouterr().out
    assert main(["verify", str(store), "6"]) == 1
    restored = build(2)
    with checkpointer(store, restored) as restorer:
        assert restorer.restore() == 3
    check_same(freeze(restored), seen[3])


def test_one_that_is_gone(store):
    seen = run(store, 6)
    shutil.rmtree(next(store.glob("checkpoints/00000004-*")))
    for step in (5, 6):
        with pytest.raises(Corrupt, match="goes on from it"):
            Store(store).read(step)
    assert not Store(store).verify().ok
    restored = build(2)
    with checkpointer(store, restored) as restorer:
        assert restorer.restore() == 3
    check_same(freeze(restored), seen[3])


def test_a_copy_brings_what_they_are_to(store, tmp_path):
    seen = run(store, 6)
    there = tmp_path / "there"
    assert main(["cp", str(store), "6", str(there)]) == 0
    shutil.move(store, tmp_path / "away")
    assert set(depths(there)) >= {5, 6}
    check_restored(there, 6, seen[6])


def test_a_repair_brings_it_back(store, tmp_path):
    seen = run(store, 6)
    shutil.copytree(store, tmp_path / "there")
    shutil.rmtree(next(store.glob("checkpoints/00000005-*")))
    assert main(["verify", str(store), "--repair", "--from", str(tmp_path / "there")]) == 0
    check_restored(store, 6, seen[6])


def test_a_tier_that_lacks_the_base(store, tmp_path):
    """Each third step goes there, and can be read there alone."""
    seen = run(store, 9, tiers=Tiers(remote=str(tmp_path / "remote"), remote_every=3))
    assert [step for step, base in bases(store).items() if base is not None] == [4, 5, 7, 8]
    assert set(bases(tmp_path / "remote").values()) == {None}
    shutil.move(store, tmp_path / "away")
    check_restored(tmp_path / "remote", 9, seen[9])


def trains_and_dies(store):
    run(store, 5)
    state = build(3)
    with checkpointer(store, state, strategy="full") as saver:
        saver.restore()
        for step in range(6, 10):
            train(state)
            saver.save(step).wait("local")
        os.kill(os.getpid(), signal.SIGKILL)


def test_memory_has_it_raw_and_a_new_run_begins_with_a_whole_one(store, monkeypatch):
    assert forked.run(trains_and_dies, store).returncode == -signal.SIGKILL
    assert bases(store)[6] is None
    assert bases(store)[9] == 8
    with monkeypatch.context() as patch:
        patch.setattr("everstep.restore.choose._Lazy.read_into", None)  # no file is opened
        restored = build(2)
        with checkpointer(store, restored) as restorer:
            assert restorer.restore() == 9
    end_keeper(store)
    check_restored(store, 9, freeze(restored))


def test_random_deletions(store):
    """Everything that is offered comes back."""
    seen, choice, disk = run(store, 20), random.Random(3), Disk(store)
    for _ in range(12):
        there = sorted(catalog.committed(disk))
        try:
            retain.delete(disk, [choice.choice(there)])
        except Conflict:
            continue
    retain.sweep(disk)
    assert Store(store).verify().ok
    for name in catalog.committed(disk)[::3]:
        check_restored(store, name.step, seen[name.step])
    used = {path.name for path in (store / "data").iterdir() if path.is_file()}
    assert used == {
        Path(link.path).name
        for name in catalog.committed(disk)
        for part in catalog.read_manifest(disk, name).parts
        for link in part.packs
    }


def test_a_manifest_that_names_another_base(store):
    run(store, 5)

    def change(value):
        value["parts"][0]["base"]["step"] = 1

    stores.rewrite(next(store.glob("checkpoints/00000005-*/manifest.json")), change)
    with pytest.raises(Corrupt):
        Store(store).read(5)
