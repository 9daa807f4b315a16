"""Several nodes, each with a directory and a keeper of its own, which the others do not see."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import trains

from comparing import check_equal, check_stored
from everstep import Store
from stores import keeper_pid, packs_of

NODES = "aabb"


@pytest.fixture
def folders():
    """A short path: below it each node has its store and its runtime directory."""
    with tempfile.TemporaryDirectory(prefix="es-") as name:
        yield Path(name)
        for node in "abc":
            end_node(name, node)


def at(folders, node):
    """What is the node's own."""
    return Path(folders) / node


def node_keeper(folders, node):
    """Its process, if there is one."""
    with pytest.MonkeyPatch.context() as patch:
        (at(folders, node) / "run").mkdir(parents=True, exist_ok=True, mode=0o700)
        patch.setenv("EVERSTEP_RUNTIME_DIR", str(at(folders, node) / "run"))
        return keeper_pid(at(folders, node) / "store", node)


def end_node(folders, node):
    if pid := node_keeper(folders, node):
        os.kill(pid, signal.SIGKILL)


def on_node(folders, nodes, function, *args, **options):
    """Call it where this rank's node has its things."""
    here = at(folders, nodes[dist.get_rank()])
    (here / "run").mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ["EVERSTEP_RUNTIME_DIR"] = str(here / "run")
    return function(*args[:1], here / "store", *args[1:], nodes=nodes, **options)


def united(folders, nodes="ab"):
    """All stores as one directory, as one would have them who has them all."""
    for node in nodes:
        shutil.copytree(at(folders, node) / "store", folders / "all", dirs_exist_ok=True)
    return folders / "all"


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_each_node_has_its_packs_and_what_all_need(gang, folders, layout):
    saved, *_ = gang.run(
        on_node, folders, NODES, trains, layout, 3, waits=True, after=1, strategy="full"
    )
    a, b = (at(folders, node) / "store" for node in "ab")
    assert not packs_of(a) & packs_of(b)
    assert Store(a).steps() == Store(b).steps() == [1, 2, 3]
    for step in (1, 2, 3):
        manifest = Store(a).manifest(step)
        assert manifest == Store(b).manifest(step)
        assert [part.rank for part in manifest.parts] == [0, 1]
        assert {pack.path for part in manifest.parts for pack in part.packs} <= (
            packs_of(a) | packs_of(b)
        )
    assert not list(folders.glob("*/store/checkpoints/*/part-*.json"))
    check_stored(united(folders), saved.states[3])
    for nodes in (NODES, "abab"):
        run, *_ = gang.run(on_node, folders, nodes, trains, layout, after=1)
        assert run.first == 3
        check_equal(run.begun, saved.states[3])
