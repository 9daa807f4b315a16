"""A store for a test, whose keeper does not outlive the test."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import end_keeper


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
