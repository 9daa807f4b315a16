"""A store for a test, whose keeper does not outlive the test."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from everstep.keeper import wire

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # two test processes on two cores; and sums in one order


def end_keeper(path):
    """Kill the keeper of a store, if one is running."""
    try:
        connection = wire.connect(wire.endpoint(path).with_suffix(".sock"))
    except OSError:
        return
    with connection:
        os.kill(wire.check_peer(connection), signal.SIGKILL)


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    yield path
    end_keeper(path)


@pytest.fixture
def other_store(tmp_path):
    path = tmp_path / "other"
    yield path
    end_keeper(path)
