"""What a manifest says of exactness: the self-test that a run kept, and what a replay elsewhere
came to."""

from collections.abc import Mapping
from typing import Any

from everstep.cli import wording


def without_tests(topology: Mapping[str, Any]) -> dict[str, Any]:
    """The topology without what `test_pairs` and `replayed` tell, and what stands with each
    optimizer."""
    elsewhere = ("selftest", "replayed", "optimizers", "attributes")
    return {key: value for key, value in topology.items() if key not in elsewhere}


def test_pairs(topology: Mapping[str, Any]) -> list[tuple[str, str]]:
    """By optimizer: what was tried in the run, and the digest of what came of it."""
    recipes = topology.get("selftest")
    pairs = []
    for name, recipe in recipes.items() if isinstance(recipes, dict) else ():
        if isinstance(recipe, dict):
            digest = f"digest {recipe.get('digest')}"
            text = f"not run: {recipe['problem']}" if "problem" in recipe else digest
            pairs.append((name, wording.clean(f"{recipe.get('class')} · {text}")))
    return pairs


def replayed(topology: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Of a state that was made of a log, and is not exact: what was other than in the run, and what
    the self-test found, by optimizer."""
    said = topology.get("replayed")
    known = said if isinstance(said, dict) else {}
    differs, tests = known.get("differs"), known.get("selftest")
    return (
        tuple(map(str, differs)) if isinstance(differs, list) else (),
        {name: str(text) for name, text in tests.items()} if isinstance(tests, dict) else {},
    )
