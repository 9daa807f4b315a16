"""A flipped bit or a truncation in any file, an unknown version: found, and an older one taken."""

import errno
import json
import logging
import os
import shutil

import pytest
import torch
from runs import check_same, checkpointer, end_keeper, freeze, restore, supervised
from torch import nn

from everstep import Corrupt, EverstepError, Mismatch, Store, Unsupported
from everstep.format.document import seal


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "n": seed}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store with three steps, what they hold, and no keeper: (path, {step: frozen})."""
    path = tmp_path_factory.mktemp("original") / "store"
    state, frozen = build(1), {}
    with checkpointer(path, state, strategy="full") as saver:
        for step in (1, 2, 3):
            supervised(state)
            state["n"] = step
            saver.step(step)
            frozen[step] = freeze(state)
    end_keeper(path)
    return path, frozen


@pytest.fixture
def copied(original, store):
    shutil.copytree(original[0], store)
    return store


def files_of(store, step):
    """The files that only this step needs."""
    manifest = Store(store).manifest(step)
    packs = [store / pack.path for part in manifest.parts for pack in part.packs]
    return [store / "checkpoints" / f"{step:08d}-0001" / "manifest.json", *packs]


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 4
    path.write_bytes(data)


def used_places(path):
    """Positions to damage: ends and middle; in packs, where tensors begin."""
    data = path.read_bytes()
    if path.suffix == ".json":
        return [0, len(data) // 2, len(data) - 1]
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    starts = [8 + int.from_bytes(data[:8], "little") + entry["data_offsets"][0]
              for name, entry in header.items() if not name.startswith("__")]  # fmt: skip
    return [min(starts), max(starts)]


def check_falls_back(store, frozen, caplog, expected, is_pack):
    state = build(5)
    with checkpointer(store, state) as restorer:
        before = freeze(state)
        with pytest.raises(Corrupt):
            restorer.restore(3)
        if not is_pack:
            check_same(freeze(state), before)
        with caplog.at_level(logging.WARNING, "everstep"):
            assert restorer.restore() == expected
        check_same(freeze(state), frozen[expected])
        assert "00000003-0001 cannot be restored" in caplog.text


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete", "zeros", "fifo"])
def test_a_damaged_file_of_the_newest(copied, original, caplog, index, damage):
    path = files_of(copied, 3)[index]
    if damage == "flip":
        places = used_places(path)
        whole = path.read_bytes()
        for place in places[:-1]:
            flip(path, place)
            with pytest.raises(Corrupt):
                restore(copied, build(5), 3)
            path.write_bytes(whole)
        flip(path, places[-1])
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1] if index == 0 else path.read_bytes()[:5000])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "zeros":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    if damage == "delete" and index == 0:  # then there is no such checkpoint
        assert restore(copied, build(5)) == 2
    else:
        check_falls_back(copied, original[1], caplog, 2, is_pack=index == 1)


@pytest.mark.parametrize("index", [0, 1])
def test_a_file_of_the_newest_that_the_medium_cannot_read(
    copied, original, caplog, monkeypatch, index
):
    path, preadv = files_of(copied, 3)[index], os.preadv

    def failing(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}") == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    check_falls_back(copied, original[1], caplog, 2, is_pack=index == 1)
    assert "The medium cannot read it any more" in caplog.text


def test_all_are_damaged(copied):
    for step in (1, 2, 3):
        path = files_of(copied, step)[1]
        flip(path, used_places(path)[0])
    with pytest.raises(Corrupt, match="none of its checkpoints verifies"):
        restore(copied, build(5))


@pytest.mark.parametrize("damage", ["flip", "delete", "fifo"])
def test_the_table_that_all_share(copied, damage):
    (path,) = (copied / "data" / "tables").iterdir()
    if damage == "flip":
        flip(path, 100)
    else:
        path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    state = build(5)
    before = freeze(state)
    with pytest.raises(Corrupt):
        restore(copied, state)
    check_same(freeze(state), before)
    assert len(Store(copied).verify().problems) == 3


def test_epochs_and_the_stores_own_file(copied):
    (epoch,) = (copied / "epochs").iterdir()
    whole = epoch.read_bytes()
    flip(epoch, 20)
    assert restore(copied, build(5)) == 3  # told from the manifests
    epoch.unlink()
    os.mkfifo(epoch)
    assert "epochs" in Store(copied).verify().problems
    assert restore(copied, build(5)) == 3
    epoch.unlink()
    assert "epochs" in Store(copied).verify().problems
    assert restore(copied, build(5)) == 3
    with checkpointer(copied, build(5), strategy="full") as saver:
        saver.save(9).wait("local")
        assert Store(copied).manifest(9).epoch == 2  # not that number again
    (copied / "epochs" / "0002.json").unlink()
    epoch.write_bytes(whole)
    flip(copied / "everstep.json", 20)
    with pytest.raises(Corrupt, match=r"everstep\.json"):
        restore(copied, build(5))
    (copied / "everstep.json").unlink()
    os.mkfifo(copied / "everstep.json")
    with pytest.raises(Corrupt, match=r"everstep\.json: it is no regular file"):
        restore(copied, build(5))


@pytest.mark.parametrize("file", ["everstep.json", "checkpoints/00000003-0001/manifest.json"])
def test_an_unknown_version_of_the_format(copied, file):
    path = copied / file
    value = json.loads(path.read_bytes())
    del value["digest"]
    path.write_bytes(seal({**value, "format": 99}))
    with pytest.raises(Unsupported, match="format version 99"):
        restore(copied, build(5))


def test_a_checkpoint_that_says_what_is_not_true(copied):
    """Sealed and false: who can write the store can do this; it must not crash, nor be believed."""
    path = files_of(copied, 3)[0]
    value = json.loads(path.read_bytes())
    del value["digest"]
    for change in (
        {"objects": {**value["objects"], "n": {"$": "evil", "v": 1}}},
        {"objects": {}},
        {"hyperparameters": {}},
        {"parts": []},
        {"step": 4},
        {"parts": [{**value["parts"][0], "packs": []}]},
        {
            "hyperparameters": {
                "optimizer": [{"lr": {"$": "tensor", "v": "no.such", "device": "cpu"}}]
            }
        },
        {"objects": {**value["objects"], "optimizer": {"state": 3, "other": 4}}},
    ):
        path.write_bytes(seal({**value, **change}))
        with pytest.raises(EverstepError) as caught:
            restore(copied, build(5), 3)
        assert isinstance(caught.value, (Corrupt, Mismatch)), change
