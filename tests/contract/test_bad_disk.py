"""A full disk, a read-only one, one that is not there: training goes on, and nothing is silent."""

import os
import shutil
import signal
import subprocess

import pytest
import torch
from runs import check_restored, check_same, checkpointer, end_keeper, freeze, supervised
from torch import nn

import forked
from everstep import Checkpointer, Store, Unavailable


def mount(path, *options):
    """A small file system in memory; skips the test where mounting is not allowed."""
    path.mkdir()
    found = shutil.which("mount")
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "everstep-test", str(path)]
    if os.getuid() != 0 or not found or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")


def unmount(path):
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small"
    mount(path, "size=4m")
    yield path
    end_keeper(path / "store")
    unmount(path)


def build(seed):
    torch.manual_seed(seed)
    model = nn.Linear(6, 12_000)  # some 0.3 MB, 1 MB with its moments
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def fill(path):
    """Fill up the file system; the file that does it."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return filler


def test_full_disk(small, caplog):
    store, state = small / "store", build(1)
    with checkpointer(store, state) as saver:
        supervised(state)
        saver.step(1).wait("local")
        filler = fill(small)
        for step in (2, 3, 4):  # training goes on
            supervised(state)
            handle = saver.step(step)
            with pytest.raises(Unavailable, match="No space left"):
                handle.wait("local")
        assert saver.metrics.failures == 3
        assert saver.metrics.commits == 1
        assert "was not saved" in caplog.text
        assert Store(store).steps() == [1]
        filler.unlink()
        supervised(state)
        saver.step(5).wait("local")
        frozen = freeze(state)
    assert Store(store).steps() == [1, 5]
    assert Store(store).verify().ok
    assert check_restored(store, build(2), frozen) == 5


def saves_two_in_memory_and_dies(store):
    state = build(1)
    saver = checkpointer(store, state)
    for step in (1, 2, 3):
        supervised(state)
        try:
            saver.step(step).wait("local")
        except Unavailable:
            assert step > 1
        if step == 1:
            fill(store.parent)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_what_no_disk_took_is_restored_from_the_keepers_memory(small, caplog):
    store = small / "store"
    died = forked.run(saves_two_in_memory_and_dies, store)
    assert died.returncode == -signal.SIGKILL
    torch.manual_seed(0)
    expected = build(1)
    for _ in range(3):
        supervised(expected)
    assert Store(store).steps() == [1]
    fresh = build(2)
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore() == 3
        check_same(freeze(fresh), freeze(expected))
        assert "came from memory" in caplog.text
        (small / "filler").unlink()
        supervised(fresh)
        restorer.step(4).wait("local")
    assert Store(store).steps() == [1, 4]


@pytest.mark.parametrize("before", [0, 1])
def test_a_disk_that_was_full_from_the_first_save_on(small, before):
    """Then no epoch can be claimed, to which a checkpoint would belong, until there is room."""
    store, state = small / "store", build(1)
    if before:
        with checkpointer(store, state) as saver:
            supervised(state)
            saver.step(1).wait("local")
    with checkpointer(store, state) as saver:
        assert saver.restore() == before
        filler = fill(small)
        supervised(state)
        with pytest.raises(Unavailable, match="No space left"):
            saver.step(before + 1).wait("local")
        filler.unlink()
        supervised(state)
        saver.step(before + 2).wait("local")
        frozen = freeze(state)
    assert Store(store).steps() == [*[1][:before], before + 2]
    assert Store(store).verify().ok
    assert check_restored(store, build(2), frozen) == before + 2


def test_a_path_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="file/store"):
        Checkpointer(tmp_path / "file" / "store", {"x": 1})


def test_a_read_only_file_system(tmp_path):
    path = tmp_path / "readonly"
    mount(path, "size=4m")
    try:
        state = build(1)
        with pytest.raises(Unavailable), checkpointer(path / "store", state) as saver:  # noqa: PT012
            saver.step(1).wait("local")
            subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
            supervised(state)
            handle = saver.step(2)
            with pytest.raises(Unavailable, match="Read-only"):
                handle.wait("local")
        end_keeper(path / "store")
        fresh = build(2)
        with checkpointer(path / "store", fresh) as restorer:  # reading is fine
            assert restorer.restore() == 1
        with pytest.raises(Unavailable, match="Read-only"):
            Checkpointer(path / "another", fresh)
    finally:
        end_keeper(path / "store")
        unmount(path)


def test_a_store_that_vanishes_during_training(store):
    state = build(1)
    with pytest.raises(Unavailable), checkpointer(store, state) as saver:  # noqa: PT012
        saver.step(1).wait("local")
        shutil.rmtree(store)
        store.write_text("in its place")
        for step in (2, 3):
            supervised(state)
            with pytest.raises(Unavailable):
                saver.step(step).wait("local")
