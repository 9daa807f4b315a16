"""States whose tensors are encoded: by themselves, as differences to the state before, as rounded
copies of their masters. Read back from disk and memory by two readers, deleted, copied, damaged."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from runs import check_restored, check_same, checkpointer, end_keeper, freeze, restore
from torch import nn

import coded
import forked
import forked_modules
import stores
from everstep import Conflict, Corrupt, Keep, Store, Tiers
from everstep.cli.main import main
from everstep.format.document import digest_of
from everstep.format.manifest import CheckpointName
from everstep.format.packs import Spec
from everstep.keeper.writer import DIFFERENCES_MAX
from everstep.store import catalog, commit, retain
from everstep.store.copy import Copier
from everstep.tiers.disk import Disk
from examples import slow
from independent_reader import Damaged, read

STEPS = 12
ALL = ("planes", "raw", "zstd", "zeros", "difference", "rounded")
COPIES = ("model.0.weight", "model.1.weight", "half")
FROZEN, SMALL = "frozen.weight", "model.1.bias"


def build(seed, width=500):
    """Weights in bfloat16 and one in float16, with their masters; what is frozen, and numbers."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(300, 300), nn.Linear(300, width)).bfloat16()
    masters = nn.ParameterList(p.detach().float() for p in model.parameters())
    frozen = nn.Embedding(500, 300).requires_grad_(False)
    frozen.register_buffer("ids", torch.arange(40_000) // 7)
    return {
        "model": model,
        "masters": masters,
        "half": masters[0].detach().half(),
        "frozen": frozen,
        "optimizer": torch.optim.AdamW(masters, lr=1e-5),
    }


def train(state):
    torch.manual_seed(len(state["optimizer"].state) + 7)
    for master in state["masters"]:
        master.grad = torch.randn(master.shape) * 1e-3
    state["optimizer"].step()
    with torch.no_grad():
        for master, copy in zip(state["masters"], state["model"].parameters(), strict=True):
            copy.copy_(master)
        state["half"].copy_(state["masters"][0])


def run(store, steps=STEPS, change=lambda state, step: None, width=500, level="local", **options):
    """Go on from what is there, so many steps; what the state was after each."""
    state, seen = build(1, width), {}
    with checkpointer(store, state, strategy="full", **options) as saver:
        first = saver.restore() + 1
        for step in range(first, first + steps):
            train(state)
            change(state, step)
            saver.save(step).wait("local")
            seen[step] = freeze(state)
        saver.wait(level, timeout=60)
    return seen


@pytest.fixture
def encoded_by(monkeypatch):
    """Keepers that start from now on encode by these."""
    return lambda *encoders: forked_modules.begin_with(monkeypatch, coded.choose, encoders)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store that nobody writes to any more, and what the state was at each of its steps."""
    path = tmp_path_factory.mktemp("encoded") / "store"
    with pytest.MonkeyPatch.context() as patch:
        forked_modules.begin_with(patch, coded.choose, ALL)
        seen = run(path)
        end_keeper(path)
    return path, seen


@pytest.fixture
def seen(original, store):
    """`store` is a copy of it."""
    shutil.copytree(original[0], store)
    return original[1]


def manifest_path(store, step):
    return next(Path(store).glob(f"checkpoints/{step:08}-*/manifest.json"))


def codecs_of(store, step):
    (part,) = json.loads(manifest_path(store, step).read_bytes())["parts"]
    return {row[1].partition(":")[0] for row in part.get("encoded", ())}


def bases(store):
    """Of each checkpoint that is there, the step to which it has differences."""
    disk = Disk(store)
    manifests = [catalog.read_manifest(disk, name) for name in sorted(catalog.committed(disk))]
    return {each.step: each.behind.step if each.behind else None for each in manifests}


def depths(store):
    found = {}
    for step, base in bases(store).items():
        found[step] = 0 if base is None else found[base] + 1
    return found


def whole(store):
    """The newest step that has no differences."""
    return max(step for step, depth in depths(store).items() if depth == 0)


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy()


# ---- what is read, and by whom -----------------------------------------------------------------


def check_readers(store, step):
    """A second reader has what everstep has."""
    _, tensors = read(store, step)
    for name, tensor in Store(store).read(step).items():
        assert tensors[name][2] == bytes(bytes_of(tensor)), name


def shown(store, step, capsys):
    capsys.readouterr()
    main(["show", str(store), str(step), "--json"])
    return json.loads(capsys.readouterr().out)


def test_every_reader_gets_what_was_saved(store, seen, capsys):
    found = depths(store)
    assert max(found.values()) == DIFFERENCES_MAX
    assert list(found.values()).count(DIFFERENCES_MAX) < list(found.values()).count(0)
    assert Store(store).verify().ok
    for step, frozen in seen.items():
        check_restored(store, build(2), frozen, step)
        check_readers(store, step)
        own = {"difference"} if found[step] else {"planes"}
        assert codecs_of(store, step) >= own | {"rounded"}
    assert "zstd" in codecs_of(store, 1)
    said = shown(store, 7, capsys)
    assert said["base"]["step"] == 6
    rows = {row["name"]: row for row in said["tensors"]}
    assert rows["masters.1"]["stored"] < 0.6 * rows["masters.1"]["size"]
    for name, tensor in Store(store).read(7).items():
        assert rows[name]["digest"] == digest_of(bytes_of(tensor).data)
    main(["show", str(store), "7"])
    assert "step 6, to which it has differences" in capsys.readouterr().out


@pytest.mark.parametrize("encoder", slow("planes", "zstd", "rounded"))
def test_every_reader_gets_what_one_encoder_has_made(store, encoded_by, encoder):
    encoded_by(encoder)
    for step, frozen in run(store, 3).items():
        check_restored(store, build(2), frozen, step)
        check_readers(store, step)
        assert codecs_of(store, step) == {encoder}


def test_the_commands_tell_what_is_stored(store, seen, capsys):
    found = shown(store, STEPS, capsys)
    tensors = {row["name"]: row for row in found["tensors"]}
    for name in COPIES:
        assert tensors[name]["codecs"][0].startswith("rounded:")
        assert tensors[name]["stored"] == 0
    assert tensors[SMALL]["stored"] == tensors[SMALL]["size"]
    assert tensors[FROZEN]["stored"] == 0
    assert tensors[FROZEN]["referenced"] == tensors[FROZEN]["size"]
    tensors = {name: row for name, row in tensors.items() if not row["referenced"]}
    own = [pack["size"] for pack in found["packs"] if f"{STEPS:08}-" in pack["path"]]
    small = 2 * 4096
    stored = sum(row["stored"] for row in tensors.values())
    assert sum(own) - small <= stored <= sum(own) == found["added"] < found["size"]
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


def test_raw_means_raw(store, encoded_by):
    encoded_by(*ALL)
    run(store, 3, tiers=Tiers(codecs="raw"))
    assert [codecs_of(store, step) for step in (1, 2, 3)] == [set()] * 3


def test_a_copy_is_read_without_its_master(store, seen):
    restored, before = build(2), freeze(build(2))
    assert restore(store, restored, only=["model"]) == STEPS
    found = freeze(restored)
    check_same(found["model"], seen[STEPS]["model"])
    check_same(found["masters"], before["masters"])


def test_what_is_no_rounding_is_stored(store, encoded_by, capsys):
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

    encoded_by("planes", "rounded")
    width = 8000
    seen = run(store, 3, change, width)
    rows = [{row["name"]: row for row in shown(store, step, capsys)["tensors"]} for step in (2, 3)]
    weight = rows[0]["model.1.weight"]
    assert 0 < weight["stored"] <= weight["size"] - (4 << 20)
    assert rows[0]["model.0.weight"]["stored"] == 0
    assert all(rows[1][name]["stored"] for name in COPIES[::2])
    for step, frozen in seen.items():
        check_restored(store, build(2, width), frozen, step)


def trains_and_dies(store):
    run(store, 5)
    state = build(3)
    with checkpointer(store, state, strategy="full") as saver:
        saver.restore()
        for step in range(6, 9):
            train(state)
            saver.save(step).wait("local")
        os.kill(os.getpid(), signal.SIGKILL)


def test_memory_has_it_raw_and_a_new_run_begins_with_a_whole_one(store, encoded_by, monkeypatch):
    encoded_by(*ALL)
    assert forked.run(trains_and_dies, store).returncode == -signal.SIGKILL
    assert bases(store)[6] is None
    assert bases(store)[8] == 7
    expected = build(1)
    for _ in range(8):
        train(expected)
    with monkeypatch.context() as patch:
        patch.setattr("everstep.restore.choose._Lazy.read_into", None)  # no file is opened
        assert check_restored(store, build(2), freeze(expected)) == 8
    end_keeper(store)
    assert check_restored(store, build(2), freeze(expected)) == 8


# ---- deleted, copied, damaged ------------------------------------------------------------------


def flip(store, step):
    """A byte of what is stored."""
    pack = store / Store(store).manifest(step).parts[0].packs[0].path
    data = bytearray(pack.read_bytes())
    data[5000] ^= 1
    pack.write_bytes(data)


def lie(store, step):
    """What is decoded is not what was encoded."""

    def change(value):
        for row in value["parts"][0]["encoded"]:
            row[2] = "0" * 32

    stores.rewrite(manifest_path(store, step), change)


def remove(store, step):
    shutil.rmtree(manifest_path(store, step).parent)


@pytest.mark.parametrize("damage", [flip, lie, remove])
def test_damage_costs_what_goes_on_from_there(store, seen, capsys, damage):
    step = whole(store) + 1
    damage(store, step)
    why = "goes on from it" if damage is remove else None
    for each in range(step + 1, STEPS + 1):
        with pytest.raises((Damaged, KeyError)):
            read(store, each)
        with pytest.raises(Corrupt, match=why):
            Store(store).read(each)
    if damage is not lie:  # the bytes are as they were written
        assert main(["verify", str(store)]) == main(["verify", str(store), str(STEPS)]) == 1
        assert "cannot be restored" in capsys.readouterr().out or damage is remove
    assert check_restored(store, build(2), seen[step - 1]) == step - 1


def test_a_manifest_that_names_another_base(store, seen):
    def change(value):
        value["parts"][0]["base"]["step"] = 1

    stores.rewrite(manifest_path(store, STEPS), change)
    with pytest.raises(Corrupt):
        Store(store).read(STEPS)


@pytest.mark.parametrize("name", ["nobody", "optimizer.masters.1.exp_avg", "model.1.weight"])
def test_a_master_that_is_none_is_damage(store, seen, name):
    """Not there, of another box, rounded itself."""

    def change(value):
        for row in value["parts"][0]["encoded"]:
            if row[1].startswith("rounded:"):
                row[1] = f"rounded:{name}"

    stores.rewrite(manifest_path(store, 1), change)
    with pytest.raises(Corrupt, match="rounded from"):
        Store(store).read(1, names=["model.0.weight"])


def test_a_copy_brings_what_they_are_to(store, seen, tmp_path):
    there = tmp_path / "there"
    assert main(["cp", str(store), str(STEPS), str(there)]) == 0
    shutil.rmtree(store)
    assert set(depths(there)) >= {STEPS - 1, STEPS}
    check_restored(there, build(2), seen[STEPS], STEPS)


def test_a_repair_brings_it_back(store, seen, original):
    remove(store, STEPS - 1)
    assert main(["verify", str(store), "--repair", "--from", str(original[0])]) == 0
    check_restored(store, build(2), seen[STEPS], STEPS)


def test_what_differences_are_to_stays(store, encoded_by):
    encoded_by(*ALL)
    seen = run(store, 13, keep=Keep(last=1, every=6))
    there = bases(store)
    assert set(there) == {6, 12, 13}
    assert there[6] is there[12] is None  # they stay, and nothing else for them
    assert all(base in there for base in there.values() if base is not None)
    for step in there:
        check_restored(store, build(2), seen[step], step)
    with pytest.raises(Conflict, match="goes on from there"):
        retain.delete(Disk(store), [CheckpointName(there[13], 1)])
    retain.sweep(Disk(store))
    assert Store(store).verify().ok


def test_a_tier_that_lacks_the_base(store, tmp_path, encoded_by):
    """Each third step goes there, and can be read there alone."""
    encoded_by(*ALL)
    tiers = Tiers(remote=str(tmp_path / "remote"), remote_every=3)
    seen = run(store, 9, level="remote", tiers=tiers)
    assert [step for step, base in bases(store).items() if base is not None] == [7, 8]
    assert set(bases(tmp_path / "remote").values()) == {None}
    shutil.move(store, tmp_path / "away")
    check_restored(tmp_path / "remote", build(2), seen[9], 9)


def test_random_deletions(store, seen):
    """Everything that is offered comes back."""
    choice, disk = random.Random(3), Disk(store)
    for _ in range(12):
        there = sorted(catalog.committed(disk))
        try:
            retain.delete(disk, [choice.choice(there)])
        except Conflict:
            continue
    commit.claim_epoch(disk, CheckpointName(STEPS, 1))  # what the run has left is nobody's
    retain.sweep(disk)
    assert Store(store).verify().ok
    for name in catalog.committed(disk)[::2]:
        check_restored(store, build(2), seen[name.step], name.step)
    assert {f"data/{path.name}" for path in (store / "data").glob("*.safetensors")} == {
        link.path
        for name in catalog.committed(disk)
        for part in catalog.read_manifest(disk, name).parts
        for link in part.packs
    }


# ---- encoded by others -------------------------------------------------------------------------


@pytest.fixture
def little(monkeypatch):
    """Two tensors, nearly all of whose bytes are zeros."""
    monkeypatch.setattr(stores, "content", lambda spec, step: bytes(spec.size - 1) + bytes([step]))
    return Spec("ids", "int32", (40_000,)), Spec("weights", "float32", (40_000,))


def test_a_step_that_another_keeper_has_encoded_is_the_same(tmp_path, monkeypatch, little):
    """A keeper dies after its commit; the next one, which encodes otherwise, is handed it again."""
    coded.choose(("planes", "zstd"), patch=monkeypatch.setattr)
    disk = Disk(tmp_path)
    first = stores.Trainer(disk, specs=little)
    first.claim()
    first.save(1)
    (part,) = catalog.read_manifest(disk, catalog.committed(disk)[0]).parts
    assert {each.codec for each in part.encoded} == {"planes", "zstd"}
    for encoders in (("raw",), ("zstd",), ("planes",)):
        coded.choose(encoders, patch=monkeypatch.setattr)
        again = stores.Trainer(disk, specs=little, epoch=1)
        assert again.save(1).name == CheckpointName(1, 1)
        other = stores.Trainer(disk, specs=little, epoch=1)
        with pytest.raises(Conflict, match="other content"):
            other.commit(other.seal(1, salt=1))
    assert len(stores.packs_of(tmp_path)) == 1


def test_a_step_that_another_tier_has_encoded_is_the_same(tmp_path, monkeypatch, little):
    """It was routed there, the answer got lost, and the store took it as it is."""
    local, remote = Disk(tmp_path / "local"), Disk(tmp_path / "remote")
    stores.Trainer(local, specs=little).claim()
    shutil.copytree(local.root, remote.root)
    coded.choose(("planes", "zstd"), patch=monkeypatch.setattr)
    stores.Trainer(remote, specs=little, epoch=1).save(1)
    coded.choose(("raw",), patch=monkeypatch.setattr)
    stores.Trainer(local, specs=little, epoch=1).save(1)
    assert not Copier(local, remote).copy(CheckpointName(1, 1)).checkpoints
    shutil.rmtree(local.root / "checkpoints")
    stores.Trainer(local, specs=little, epoch=1).save(1, salt=1)
    with pytest.raises(Conflict):
        Copier(local, remote).copy(CheckpointName(1, 1))
