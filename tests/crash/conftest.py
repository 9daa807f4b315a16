"""Makes this folder importable: trainer.py is run and imported. And gives sweeps a place."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from everstep.tiers import files

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _small_extents(monkeypatch):
    """Several extents in flight also for a pack of two pages."""
    monkeypatch.setattr(files, "EXTENT_BYTES", 4096)


@pytest.fixture
def folder(tmp_path):
    """In memory where there is such a place: a sweep writes some thousand files."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="everstep-", dir="/dev/shm") as name:
        yield Path(name)
