"""Damage to any file of a store: what needs the file is Corrupt, the newest step that verifies is
restored, and whatever is restored is what the run had."""

import contextlib
import errno
import json
import logging
import os
import random
import shutil

import pytest
from logs import build, train
from runs import (
    check_same,
    checkpointer,
    difference,
    end_keeper,
    freeze,
    restore,
    run_logged,
    snapshot,
)

from everstep import Corrupt, Missing, Store
from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
from everstep.tiers.disk import Disk
from examples import examples, slow

STORES = {
    "full": (3, {"strategy": "full"}),
    "log": (7, {"base_every": 4, "window": 1}),
    "log with spread bases": (7, {"base_every": 4, "window": 3}),
    "spread": (9, {"strategy": "spread", "every": 3, "window": 2, "base_every": None}),
    "made whole": (5, {"window": 1}),
}


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 4
    path.write_bytes(data)


def flip_tensor(path):
    """Where a tensor begins, or in the middle of a document."""
    data = path.read_bytes()
    if path.suffix == ".json":
        return flip(path, len(data) // 2)
    header = 8 + int.from_bytes(data[:8], "little")
    found = [e["data_offsets"] for n, e in json.loads(data[8:header]).items() if n[:2] != "__"]
    return flip(path, header + random.choice([start for start, end in found if start < end]))


def make_fifo(path):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "first bit": lambda path: flip(path, 0),
    "a tensor": flip_tensor,
    "last bit": lambda path: flip(path, -1),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(4096)),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": lambda path: path.unlink(),
    "fifo": make_fifo,
    "medium": lambda path: None,  # by the fixture
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """By kind a store without a keeper, and what the run had at each step."""
    found = {}
    for kind, (steps, options) in STORES.items():
        path = tmp_path_factory.mktemp("originals") / "store"
        frozen = run_logged(path, build(1), train, steps, **options)
        end_keeper(path)
        if kind == "made whole":
            materialize(Disk(path), CheckpointName(4, 1))
        found[kind] = path, frozen
    return found


@pytest.fixture
def unreadable(monkeypatch):
    """Paths that the medium cannot read any more."""
    paths, preadv = set(), os.preadv

    def failing(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}") in paths:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    return paths


def needed(store, step):
    """The files that a restore of a step needs, as paths in the store."""
    found = set()
    for manifest in Store(store).chain(step):
        folder = f"checkpoints/{CheckpointName(manifest.step, manifest.epoch)}"
        documents = (f"{folder}/manifest.json", f"{folder}/state.json")
        found |= {path for path in documents if (store / path).exists()}
        found |= {link.path for link in manifest.files}
    return found


EVERY = [(kind, damage) for kind in STORES for damage in DAMAGE]
QUICK = [each for each in EVERY if each[0] == "log" or each[1] in ("a tensor", "gone")]


@pytest.mark.parametrize(
    ("kind", "damage"), [*QUICK, *slow(*(each for each in EVERY if each not in QUICK))]
)
def test_damage_of_any_file(originals, tmp_path, store, unreadable, caplog, kind, damage):
    original, frozen = originals[kind]
    steps = Store(original).steps()
    files = {step: needed(original, step) for step in steps}
    every = sorted(set.union(*files.values()))
    with checkpointer(store, state := build(2)) as restorer:
        for path in random.sample(every, min(examples(30) // 5, len(every))):
            place = tmp_path / "damaged"
            shutil.copytree(original, place)
            DAMAGE[damage](place / path)
            unreadable |= {str(place / path)} if damage == "medium" else set()
            lost = {step for step in steps if path in files[step]}
            if damage == "gone" and path.endswith("state.json"):
                lost = set()  # the log is there
            gone = {step for step in steps if path.startswith(f"checkpoints/{step:08}-")}
            gone = gone if damage == "gone" and path.endswith("manifest.json") else set()
            check(restorer, state, place, frozen, set(steps), lost, gone, path, caplog)
            unreadable.clear()
            shutil.rmtree(place)


def check(restorer, state, place, frozen, steps, lost, gone, path, caplog):
    """Steps are `lost`, of which there is no word of those that are `gone`."""
    for step in lost - gone:
        assert not Store(place).verify(step).ok, path
    assert Store(place).verify().ok == (not lost - gone), path
    whole = steps - lost
    for step in sorted(steps):
        before = freeze(state)
        with contextlib.suppress(Missing if step in gone else Corrupt):
            assert restorer.restore(step, from_store=place) == step
            assert difference(snapshot(state), frozen[step]) is None, f"{path}: {step}"
            whole |= {step}  # of those that are lost: no tensor's bytes were touched
            continue
        assert step in lost, path
        if path.endswith(".json"):
            check_same(freeze(state), before)
    caplog.clear()
    if not whole:
        with pytest.raises(Corrupt, match="none of its checkpoints verifies"):
            restorer.restore(from_store=place)
        return
    with caplog.at_level(logging.WARNING, "everstep"):
        assert restorer.restore(from_store=place) == max(whole), path
    assert difference(snapshot(state), frozen[max(whole)]) is None, path
    assert ("cannot be restored" in caplog.text) == (max(whole) < max(steps - gone)), path
    assert caplog.text.count("cannot be restored") <= 2  # what goes on from damage is not tried


def test_epochs_and_the_stores_own_file(originals, store):
    shutil.copytree(originals["full"][0], store)
    (epoch,) = (store / "epochs").iterdir()
    whole = epoch.read_bytes()
    flip(epoch, 20)
    assert restore(store, build(5)) == 3  # told from the manifests
    for damage in (make_fifo, lambda path: path.unlink()):
        damage(epoch)
        assert "epochs" in Store(store).verify().problems
        assert restore(store, build(5)) == 3
    with checkpointer(store, build(5), strategy="full") as saver:
        saver.save(9).wait("local")
        assert Store(store).manifest(9).epoch == 2  # not that number again
    (store / "epochs" / "0002.json").unlink()
    epoch.write_bytes(whole)
    for damage in (lambda path: flip(path, 20), make_fifo):
        damage(store / "everstep.json")
        with pytest.raises(Corrupt, match=r"everstep\.json"):
            restore(store, build(5))


def test_a_record_of_another_chain_in_its_place(store, other_store):
    """The same steps of another run: every file is whole, but the chain says no."""
    run_logged(store, build(1), train, steps=4)
    run_logged(other_store, build(3), train, steps=4)
    for path in needed(other_store, 3) - needed(other_store, 2):
        (store / path).write_bytes((other_store / path).read_bytes())
    assert not Store(store).verify().ok
    end_keeper(store)
    with checkpointer(store, build(2)) as restorer:
        with pytest.raises(Corrupt):
            restorer.restore(4)
        assert restorer.restore() in (2, 3)  # the one in its place follows its own step 2
