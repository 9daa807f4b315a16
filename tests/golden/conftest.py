"""Makes programs.py importable, and tests/dist with it; gives the ranks of the slow tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
from gang import Gang


@pytest.fixture(scope="module")
def gang():
    with Gang(4) as made:
        yield made
