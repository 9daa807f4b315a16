"""Makes tests/ importable: stores.py and independent_reader.py are shared by all tests.

And gives a store whose keeper does not outlive the test.
"""

import pytest

from stores import end_keeper


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
