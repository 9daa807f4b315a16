"""Who deletes in a bucket, where nothing is locked, looks first who writes, and waits."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
from keepers import until

import cli_store
import everstep
from everstep import Conflict, Store
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, names, presence, retain
from everstep.store.copy import Copier
from everstep.store.presence import Presence
from everstep.tiers.bucket import Bucket
from everstep.tiers.disk import Disk
from forked import Forked
from stores import end_keeper


def trains(url, die=0):
    """Saves ten steps; at the end waits to be told to go on, or dies at the step `die`."""
    state = {"step": torch.zeros(3)}
    with everstep.Checkpointer(url, state) as checkpointer:
        for step in range(1, 11):
            state["step"] += 1
            checkpointer.save(step).wait()
            if step == die:
                os.kill(os.getpid(), signal.SIGKILL)
        print("waiting", flush=True)
        sys.stdin.readline()


@pytest.fixture
def url(bucket):
    yield bucket
    end_keeper(bucket)


@pytest.fixture
def store(bucket, tmp_path):
    """A bucket with 10 to 12 of epoch 1, and 13 and 14 of epoch 2."""
    source, target = cli_store.make_logged(tmp_path / "source"), Bucket(bucket)
    Copier(source, target).copy(CheckpointName(12, 1))
    Copier(source, target).copy(CheckpointName(14, 2))
    return target


@pytest.fixture
def store_of_its_own(tmp_path):
    yield tmp_path / "local"
    end_keeper(tmp_path / "local")


def old(monkeypatch, tier, *paths):
    """Let these be two hours old."""
    age_s = tier.age_s
    monkeypatch.setattr(
        Bucket, "age_s", lambda self, path: 7200.0 if path in paths else age_s(path)
    )


def test_nothing_is_deleted_while_somebody_writes(store, capsys, monkeypatch):
    monkeypatch.setattr(presence, "LEAVE_S", 0.5)
    writer = Presence(store)
    writer.show(True)
    until(lambda: presence.living(store), "it is shown")
    for command in (["rm", store.root, "14-2"], ["gc", store.root]):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert "Conflict" in said
        assert f"{os.getpid()}" in said
        assert "somebody writes to it" in said
    assert Store(store.root).steps() == [10, 11, 12, 13, 14]
    writer.end()
    assert not presence.living(store)
    assert main(["rm", store.root, "14-2"]) == 0
    assert main(["gc", store.root]) == 0


def test_a_writer_that_leaves_is_waited_for(store, monkeypatch):
    writer = Presence(store)
    writer.show(True)
    until(lambda: presence.living(store), "it is shown")
    leaves = threading.Timer(0.3, writer.end)
    leaves.start()
    assert retain.delete(store, [CheckpointName(14, 2)])
    leaves.join()


def test_a_writer_that_died_counts_for_some_minutes(store, monkeypatch, capsys):
    path = f"{names.WRITERS}/0123456789abcdef"
    store.replace(path, b"{}")
    monkeypatch.setattr(presence, "LEAVE_S", 0.5)
    with pytest.raises(Conflict, match="for 5 min"):
        Store(store.root).gc()
    old(monkeypatch, store, path)
    files, _ = Store(store.root).gc()
    assert files == 1
    assert store.size(path) is None


def test_a_clock_that_is_wrong_does_not_matter(store, monkeypatch):
    store.replace(f"{names.WRITERS}/0123456789abcdef", b"{}")
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 86400)
    assert presence.living(Bucket(store.root))


def test_a_trainer_is_a_writer_until_it_closes(url, monkeypatch, capsys):
    with Forked(trains, url) as process:
        assert process.stdout.readline() == "waiting\n"
        until(lambda: presence.living(Bucket(url)), "it is shown")
        monkeypatch.setattr(presence, "LEAVE_S", 0.5)
        assert main(["rm", url, "3"]) == 1
        assert "somebody writes" in capsys.readouterr().err
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.wait() == 0
    monkeypatch.setattr(presence, "LEAVE_S", 30.0)
    assert main(["rm", url, "3"]) == 0


def test_a_trainer_that_was_killed_is_no_writer_when_its_keeper_is_done(url, monkeypatch):
    with Forked(trains, url, 7) as process:
        assert process.wait() == -signal.SIGKILL
    monkeypatch.setattr(presence, "LEAVE_S", 30.0)
    assert main(["rm", url, "3"]) == 0


def test_who_copies_to_a_bucket_is_a_writer_there(store_of_its_own, bucket, monkeypatch):
    tiers = everstep.Tiers(remote=bucket)
    with everstep.Checkpointer(store_of_its_own, {"x": torch.ones(3)}, tiers=tiers) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step).wait("remote", timeout=60)
        until(lambda: presence.living(Bucket(bucket)), "it is shown")
        monkeypatch.setattr(presence, "LEAVE_S", 0.5)
        with pytest.raises(Conflict, match="somebody writes"):
            Store(bucket).delete(1)
    monkeypatch.setattr(presence, "LEAVE_S", 30.0)
    assert Store(bucket).delete(1)


def test_what_no_manifest_reaches_goes_when_it_is_old(store, monkeypatch):
    lost = [f"{names.DATA}/00000011-0001-{token}-0.safetensors" for token in ("aa", "bb")]
    live = f"{names.DATA}/00000015-0002-cc-0.safetensors"
    table = names.table_path("0" * 32)
    for path in (*lost, live, table):
        store.replace(path, b"data")
    assert retain.sweep(store) == (0, 0)
    old(monkeypatch, store, lost[0], live, table)
    assert retain.sweep(store) == (2, 8)
    assert store.size(lost[0]) is store.size(table) is None
    assert store.size(lost[1]) == store.size(live) == 4
    assert Store(store.root).verify().ok


def test_what_was_committed_since_it_looked_stays(store, monkeypatch, tmp_path):
    """A step whose data was copied long ago is committed while gc looks around."""
    source = Disk(tmp_path / "source")
    step = CheckpointName(13, 1)
    (pack,) = catalog.read_manifest(source, step).all_parts[0].packs
    store.replace(pack.path, source.read(pack.path))
    old(monkeypatch, store, pack.path)
    looked, held = retain._paths, []

    def meanwhile(tier, directory):
        if not held:
            held.append(Copier(source, store).copy(step))
        return looked(tier, directory)

    monkeypatch.setattr(retain, "_paths", meanwhile)
    retain.sweep(store)
    assert held[0].checkpoints == [step]
    assert store.size(pack.path) == pack.size
    assert Store(store.root).verify().ok


def test_steps_are_listed_by_one_request(store, monkeypatch):
    def fails(self, path):
        raise AssertionError(path)

    monkeypatch.setattr(Bucket, "size", fails)
    assert [name.step for name in catalog.committed(store)] == [10, 11, 12, 13, 14]
