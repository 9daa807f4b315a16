"""Gives each file of these tests a gang of four ranks, or as many as its RANKS says, and each test
a place for a store; makes gang.py and zoo.py importable."""

import os
import signal

import pytest
from gang import Gang

from stores import end_keeper, keeper_pid


@pytest.fixture(scope="module")
def gang(request):
    """Ranks that are used by all tests of a file; `size=2` of a call takes two of them."""
    with Gang(getattr(request.module, "RANKS", 4)) as made:
        yield made


@pytest.fixture
def store(tmp_path):
    """Where a store can be made; its keepers are ended afterwards, of all nodes that are played."""
    path = tmp_path / "store"
    yield path
    for node in ("", "a", "b"):
        if pid := keeper_pid(path, node):
            os.kill(pid, signal.SIGCONT)
        end_keeper(path, node)


@pytest.fixture
def files(tmp_path):
    """A folder by which a test and its ranks tell each other how far they are."""
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@pytest.fixture
def impatient(monkeypatch):
    """A node is not waited for long."""
    monkeypatch.setenv("EVERSTEP_PARTS_S", "3")
