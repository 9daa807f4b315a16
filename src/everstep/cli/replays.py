"""What a manifest says of exactness."""

from collections.abc import Mapping
from typing import Any


def without_tests(topology: Mapping[str, Any]) -> dict[str, Any]:
    """The topology without what `replayed` tells, what stands with each optimizer, and what runs of
    before said of a self-test."""
    elsewhere = ("selftest", "replayed", "optimizers", "attributes")
    return {key: value for key, value in topology.items() if key not in elsewhere}


def replayed(topology: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a state that was made of a log, and is not exact: what was other than in the run."""
    said = topology.get("replayed")
    differs = said.get("differs") if isinstance(said, dict) else None
    return tuple(map(str, differs)) if isinstance(differs, list) else ()
