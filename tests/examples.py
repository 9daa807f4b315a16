"""What `make test` leaves to `make test-slow`: most examples of property tests, of which hypothesis
chooses others at each run, and parameters that go the same ways as others."""

import os

import pytest


def examples(count: int) -> int:
    """A fifth of `count`; all of them under `make test-slow`."""
    if os.environ.get("EVERSTEP_EXAMPLES") == "all":
        return count
    return max(count // 5, min(count, 5))


def stride() -> int:
    """Of faults that happen at one call after another: each fifth; all under `make test-slow`."""
    return 1 if os.environ.get("EVERSTEP_EXAMPLES") == "all" else 5


def slow(*values: object) -> list[object]:
    """Parameters of a test (tuples: of several) with which only `make test-slow` calls it."""
    rows = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]
