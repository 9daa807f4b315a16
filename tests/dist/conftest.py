"""Gives each file of these tests a gang of four ranks, or as many as its RANKS says, and each test
a place for a store; makes gang.py and zoo.py importable."""

import pytest
from gang import Gang

from stores import end_keeper


@pytest.fixture(scope="module")
def gang(request):
    """Ranks that are used by all tests of a file; `size=2` of a call takes two of them."""
    with Gang(getattr(request.module, "RANKS", 4)) as made:
        yield made


@pytest.fixture
def store(tmp_path):
    """Where a store can be made; its keeper is ended afterwards."""
    yield tmp_path / "store"
    end_keeper(tmp_path / "store")
