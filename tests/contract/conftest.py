"""Makes this folder importable: runs.py and keepers.py are shared by these tests."""

import sys
from pathlib import Path

import pytest

from everstep.restore import portions

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def small_portions(monkeypatch):
    """What is replayed here is small: its first and last records come in portions all the same."""
    monkeypatch.setattr(portions, "MIN_BYTES", 1)
