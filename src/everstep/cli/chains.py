"""Which checkpoints go on from which: states, and the logs that are replayed after them.

Only for looking: a restore checks digests on its way back, this does not. What cannot be read goes
on from nothing that could be told.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from everstep.errors import EverstepError
from everstep.format.manifest import CheckpointName, Manifest
from everstep.store import catalog
from everstep.tiers.tier import Tier

WALK_MAX = 1000
"""Manifests that are read to find one log's base: as far apart as everstep itself puts bases."""


@dataclass(frozen=True, slots=True)
class Link:
    """A checkpoint in its chain. `behind`: what a restore reads before it; None where one begins.
    `exact`: whether that what it reads here is so."""

    facts: dict[str, Any]
    behind: CheckpointName | None
    records: int
    exact: bool


class Chains:
    """Of one store. Reads each manifest at most once, and none before it is needed."""

    def __init__(self, disk: Tier) -> None:
        self._disk = disk
        self._links: dict[CheckpointName, Link] = {}

    def link(self, name: CheckpointName) -> Link:
        """Raises Missing, Corrupt, Unsupported."""
        if name not in self._links:
            manifest = catalog.read_manifest(self._disk, name)
            state = state_beside(self._disk, manifest)
            taken = state if state and state.ends_chain else manifest
            behind = taken.previous.name if taken.previous else None
            facts, records = facts_of(manifest, state), len(manifest.records)
            self._links[name] = Link(facts, behind, records, taken.exact)
        return self._links[name]

    def origin(self, name: CheckpointName) -> tuple[CheckpointName, int] | None:
        """The state that a restore begins with, and how many records are replayed after it. None
        where the way back is broken, or longer than WALK_MAX."""
        records = 0
        with contextlib.suppress(EverstepError):
            for _ in range(WALK_MAX):
                link = self.link(name)
                if link.behind is None:
                    return name, records
                records += link.records
                name = link.behind
        return None


def state_beside(disk: Tier, manifest: Manifest) -> Manifest | None:
    """What was made of a step that takes a replay, in the background or by everstep materialize; a
    damaged one is as none."""
    with contextlib.suppress(EverstepError):
        return catalog.read_state(disk, manifest.name) if manifest.records else None
    return None


def facts_of(manifest: Manifest, state: Manifest | None) -> dict[str, Any]:
    """What its manifest says of a checkpoint; under "whole" of the state beside it, also of one
    that is not exact, and is not taken: `ends_chain`: whether restores begin there; `differs`: of
    one that is not exact, what was other than in the run."""
    kept = ("step", "epoch", "size", "created", "exact", "metrics")
    of_state = None
    if state and not state.is_spread:
        told = ("exact", "size", "created", "ends_chain")
        of_state = {key: getattr(state, key) for key in told}
        of_state["differs"] = replayed(state.topology)
    return {
        "kind": "log" if manifest.previous else "state",
        **{key: getattr(manifest, key) for key in kept},
        "previous": asdict(manifest.previous) if manifest.previous else None,
        "added": catalog.added_bytes(manifest),
        "whole": of_state,
    }


def replayed(topology: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a state that was made of a log, and is not exact: what was other than in the run."""
    said = topology.get("replayed")
    differs = said.get("differs") if isinstance(said, dict) else None
    return tuple(map(str, differs)) if isinstance(differs, list) else ()
