"""Copies between tiers while something fails: at each system call, and by SIGKILL at each write to
a bucket. What is in the target is whole, and the next copy goes on."""

import argparse
import itertools
import os
import signal

import pytest
from faults import Fault
from sweep import Promises, sweep

from everstep import Store
from everstep.cli import cp
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.store import catalog
from everstep.store.copy import Copier, fork
from everstep.tiers.bucket import Bucket
from everstep.tiers.disk import Disk
from examples import slow
from forked import run
from stores import Trainer, Unsynced

FAULTS = [Fault.KILL, *slow(Fault.EIO, Fault.NO_SYNC, Fault.DEAD_DISK)]
LOG = [CheckpointName(step, 1) for step in (1, 2, 3)]


@pytest.fixture
def source(tmp_path):
    return logged(tmp_path / "source")


def logged(path):
    """A state and two records that go on from it."""
    trainer = Trainer(Disk(path, Unsynced()))
    trainer.claim()
    trainer.save(1)
    trainer.record(2, 1)
    trainer.record(3, 2)
    return trainer.disk


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_to_a_disk_goes_on_after_any_fault(folder, source, fault):
    def copy(disk, promises):
        Copier(source, disk).copy(LOG[-1], tags=["best"])
        promises.checkpoints |= set(LOG)
        promises.epochs.add(1)
        promises.tags["best"] = LOG[-1]

    assert sweep(folder, lambda disk: Promises(), copy, fault) > 40


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fork_goes_on_after_any_fault(folder, fault):
    def prepare(disk):
        logged(disk.root.parent / "source")
        return Promises()

    def begin(disk, promises):
        source = Disk(disk.root.parent / "source", Unsynced())
        assert fork(source, disk, LOG[-1]).bytes == 0
        promises.checkpoints |= set(LOG)
        promises.epochs.add(1)

    assert sweep(folder, prepare, begin, fault) > 40


def copies_until(number, path, url):
    """Dies before the `number`-th object that it writes."""
    written = itertools.count(1)

    def dying(method):
        def write(*args):
            if next(written) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args)

        return write

    Bucket.create, Bucket.stream = dying(Bucket.create), dying(Bucket.stream)
    assert cp.run(argparse.Namespace(words=[path, url], json=True)).code == 0


@pytest.mark.parametrize("server", slow("bucket", "ceph_bucket"))
def test_a_copy_to_a_bucket_goes_on_after_any_death(source, server, request):
    bucket = request.getfixturevalue(server)
    deaths = 0
    for number in itertools.count(1):
        url = f"{bucket}/{number}"
        code = run(copies_until, number, str(source.root), url).returncode
        if code == 0:
            break
        assert code == -signal.SIGKILL
        deaths += 1
        if number > 1:
            there = catalog.committed(Bucket(url))
            assert there == LOG[: len(there)]
            assert Store(url).verify().ok
        assert main(["cp", str(source.root), url]) == 0
        assert Store(url).steps() == [1, 2, 3]
        assert Store(url).verify().ok
    assert deaths >= 9  # run, epoch; and of each step pack and manifest, and two tables
