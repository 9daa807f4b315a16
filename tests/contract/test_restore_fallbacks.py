"""What a restore does where something is damaged that it can do without, or deleted meanwhile."""

import json

import pytest
from keepers import until
from logs import build, train
from runs import checkpointer, run_logged, snapshot

from everstep import Checkpointer, Corrupt, Keep, Missing, Store
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.restore import load
from everstep.restore.materialize import materialize
from everstep.store import catalog, retain
from everstep.tiers.disk import Disk
from stores import packs_of


def damage(store, link, is_wanted):
    """A byte of the first tensor with such a name."""
    path = store / link.path
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    places = {
        name: said["data_offsets"][0]
        for name, said in header.items()
        if name != "__metadata__" and said["data_offsets"][0] < said["data_offsets"][1]
    }
    data[start + next(place for name, place in places.items() if is_wanted(name))] ^= 1
    path.write_bytes(data)


def is_of_state(name):
    return name.startswith(("model.0.", "model.2."))  # no buffer, which each record has


def is_gradient(name):
    return name.startswith("@0.model")


def damage_state(store, step):
    manifest = catalog.read_state(Disk(store), CheckpointName(step, 1))
    damage(store, manifest.all_parts[0].packs[0], is_of_state)


def damage_record(store, step):
    (record,) = Store(store).manifest(step).records
    damage(store, record.parts[0].packs[0], is_gradient)


def verified(store, capsys):
    """What `everstep verify` says."""
    assert main(["verify", str(store), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    return found["problems"].keys(), found["cut_off"]


def test_both_are_damaged(store, capsys):
    frozen = run_logged(store, build(1), train, 9)
    materialize(Disk(store), CheckpointName(6, 1))
    damage_state(store, 6)
    problems, cut_off = verified(store, capsys)
    assert problems == {"00000006-0001"}
    assert cut_off == [f"{step:08}-0001" for step in (7, 8, 9)]
    damage_record(store, 4)
    problems, cut_off = verified(store, capsys)
    assert problems == {"00000004-0001", "00000006-0001"}
    assert cut_off == [f"{step:08}-0001" for step in (5, 7, 8, 9)]
    fresh = build(2)
    with checkpointer(store, fresh) as saver:
        with pytest.raises(Corrupt, match="restoring step 8"):
            saver.restore(8)
        assert saver.restore() == 3
        assert snapshot(fresh) == frozen[3]


@pytest.fixture
def beside(store, tmp_path, monkeypatch):
    """A trainer that saves a step, and keeps that one alone, whenever another begins to read one;
    as long as there are steps left. Its snapshots by step."""
    state, frozen = build(1), {}
    saver = Checkpointer(store, state, keep=Keep(last=1), strategy="full")
    left = [3]

    def save():
        step = len(frozen) + 1
        train(state)
        frozen[step] = snapshot(state)
        saver.step(step).wait()
        until(lambda: len(packs_of(store)) == 1, "retention")

    save()
    read = load.Loader.load

    def loaded(*args, **options):
        if left[0]:
            left[0] -= 1
            save()
        return read(*args, **options)

    monkeypatch.setattr(load.Loader, "load", loaded)
    yield frozen
    saver.close()


def test_the_newest_of_a_run_that_goes_on(store, tmp_path, beside):
    fresh = build(2)
    with Checkpointer(tmp_path / "own", fresh) as saver:
        step = saver.restore(from_store=store)
        assert step > 1
        assert snapshot(fresh) == beside[step]


def test_a_step_that_is_deleted_while_it_is_read(store, tmp_path, beside):
    saver = Checkpointer(tmp_path / "own", build(2))
    with saver, pytest.raises(Missing, match="no checkpoint of step 1"):
        saver.restore(1, from_store=store)


def test_a_step_that_is_made_whole_while_its_log_is_read(store, tmp_path, monkeypatch):
    """And what was before it is deleted."""
    frozen = run_logged(store, build(1), train, 6)
    read, due = load.Loader.load, [1]

    def loaded(*args, **options):
        if due:
            due.pop()
            materialize(Disk(store), CheckpointName(6, 1))
            retain.apply(Disk(store), Keep(last=1))
        return read(*args, **options)

    monkeypatch.setattr(load.Loader, "load", loaded)
    fresh = build(2)
    with Checkpointer(tmp_path / "own", fresh) as saver:
        assert saver.restore(6, from_store=store) == 6
    assert Store(store).steps() == [6]
    assert snapshot(fresh) == frozen[6]
