"""What is stopped in the middle leaves nothing half-made, and the source as it was; memory."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from trained import Job

from commands import run
from everstep import Checkpointer, Store
from everstep.interchange.export import FORMATS, Options, export
from everstep.interchange.sources import read_source
from everstep.interchange.trees import Options as Taken
from everstep.interchange.write import write
from everstep.store import catalog
from everstep.tiers.disk import Disk
from examples import slow


class Stopped(BaseException):
    """Ctrl-C, at some tensor."""


def stops_after(count):
    def progress(done, total):
        nonlocal count
        count -= 1
        if count < 0:
            raise Stopped

    return progress


def files_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def source(tmp_path):
    job = Job()
    job.run(1, 4)
    folder = tmp_path / "source"
    folder.mkdir()
    saved = {name: part.state_dict() for name, part in job.state.items()}
    torch.save({**saved, "step": 3}, folder / "latest.pt")
    return folder / "latest.pt"


@pytest.mark.parametrize("count", [0, 5, 20])
def test_an_import(store, source, count):
    before = files_of(source.parent)
    assert run("import", source, store, "--step", "5") == 0
    there = files_of(store)
    draft = read_source(source, None, Taken())
    with pytest.raises(Stopped):
        write(Disk(store), draft, 3, branch=True, progress=stops_after(count))
    assert files_of(store) == there
    assert Store(store).steps() == [5]
    with pytest.raises(Stopped):
        write(Disk(store.parent / "new"), draft, 3, progress=stops_after(count))
    assert Store(store.parent / "new").steps() == []
    assert files_of(source.parent) == before
    assert run("import", source, store.parent / "new") == 0
    assert Store(store.parent / "new").verify().ok


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(FORMATS))
def test_an_export(store, tmp_path, kind):
    job = Job()
    job.train(1)
    with Checkpointer(store, job.state) as checkpointer:
        checkpointer.save(1)
    before, disk = files_of(store), Disk(store)
    name = catalog.find(disk, None)
    for count in (0, 3, 8):
        with pytest.raises(Stopped):
            export(disk, name, tmp_path / "out", kind, Options(), stops_after(count))
        assert {each.name for each in tmp_path.iterdir()} == {"store"}
    export(disk, name, tmp_path / "out", kind, Options())
    assert files_of(store) == before
    assert {each.name for each in tmp_path.iterdir()} == {"store", "out"}


def test_one_that_is_killed(store, source, tmp_path):
    """By SIGKILL: the steps that were there are there, and the next import goes well."""
    assert run("import", source, store, "--step", "5") == 0
    program = (
        "import os, signal, sys\n"
        "import everstep.interchange.write as w\n"
        "def claim(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "w.commit.claim_epoch = claim\n"
        "from everstep.cli.main import main\n"
        "main(sys.argv[1:])"
    )
    words = ["import", source, store, "--step", "4", "--branch"]
    command = [sys.executable, "-c", program, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, env=dict(os.environ), timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert Store(store).steps() == [5]
    assert run("import", source, store, "--step", "6") == 0
    assert Store(store).steps() == [5, 6]
    assert Store(store).verify().ok


@pytest.mark.parametrize("kind", slow("dcp", "torch"))
def test_memory_of_an_import(store, tmp_path, kind):
    """Of 600 MB, in a process of its own."""
    weights = {f"part{number}": torch.zeros(5_000_000) for number in range(30)}
    with Checkpointer(
        tmp_path / "first", {"model": torch.nn.ParameterDict(weights)}, memory_bytes=2 << 30
    ) as checkpointer:
        checkpointer.save(1)
    assert run("export", tmp_path / "first", "--to", kind, tmp_path / "out") == 0
    source = tmp_path / "out" / "checkpoint.pt" if kind == "torch" else tmp_path / "out"
    program = (
        "import resource, sys, torch, everstep.interchange.sources, everstep.cli.main as m\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert m.main(sys.argv[1:]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    words = ["import", source, store, "--step", "1"]
    command = [sys.executable, "-c", program, *map(str, words)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(said.split()[-1]) << 10 < (2 * 20 << 20) + (256 << 20)
