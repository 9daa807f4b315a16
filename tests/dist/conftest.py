"""Gives each file of these tests a gang of four ranks; makes gang.py and zoo.py importable."""

import pytest
from gang import Gang


@pytest.fixture(scope="module")
def gang():
    """Four ranks, used by all tests of a file; `size=2` of a call takes two of them."""
    with Gang(4) as made:
        yield made
