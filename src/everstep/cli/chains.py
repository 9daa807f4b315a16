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
    `whole`: the facts of a state that was made of it, also of one that is not exact, and is not
    taken."""

    behind: CheckpointName | None
    records: int
    whole: dict[str, Any] | None = None


class Chains:
    """Of one store. Reads each manifest at most once, and none before it is needed."""

    def __init__(self, disk: Tier) -> None:
        self._disk = disk
        self._links: dict[CheckpointName, Link | None] = {}

    def read(self, name: CheckpointName) -> Manifest:
        """Raises Missing, Corrupt, Unsupported."""
        self._links[name] = None
        manifest = catalog.read_manifest(self._disk, name)
        state = None
        if manifest.records:
            with contextlib.suppress(EverstepError):  # a damaged one is as none
                state = catalog.read_state(self._disk, name)
        is_made = state is not None and state.ends_chain
        behind = None if is_made or not manifest.previous else manifest.previous.name
        whole = _whole_facts(state) if state and not state.is_spread else None
        self._links[name] = Link(behind, len(manifest.records), whole)
        return manifest

    def whole(self, name: CheckpointName) -> dict[str, Any] | None:
        """What was made of this step, in the background or by everstep materialize."""
        link = self._link(name)
        return link.whole if link else None

    def origin(self, name: CheckpointName) -> tuple[CheckpointName, int] | None:
        """The state that a restore begins with, and how many records are replayed after it. None
        where the way back is broken, or longer than WALK_MAX."""
        here, link, records = name, self._link(name), 0
        for _ in range(WALK_MAX):
            if link is None or link.behind is None:
                break
            records += link.records
            here = link.behind
            link = self._link(here)
        return (here, records) if link and link.behind is None else None

    def is_exact(self, name: CheckpointName) -> bool:
        """Whether it is restored bit for bit, as far as can be told: not from a state that is not
        exact, and stands for the log before it."""
        origin = self.origin(name)
        whole = self.whole(origin[0]) if origin else None
        return whole is None or whole["exact"] or not whole["ends_chain"]

    def _link(self, name: CheckpointName) -> Link | None:
        if name not in self._links:
            with contextlib.suppress(EverstepError):
                self.read(name)
        return self._links[name]


def facts_of(manifest: Manifest) -> dict[str, Any]:
    """What its manifest says of a checkpoint."""
    kept = ("step", "epoch", "size", "created", "exact", "metrics")
    return {
        "kind": "log" if manifest.previous else "state",
        **{key: getattr(manifest, key) for key in kept},
        "previous": asdict(manifest.previous) if manifest.previous else None,
        "added": catalog.added_bytes(manifest),
    }


def _whole_facts(state: Manifest) -> dict[str, Any]:
    """`ends_chain`: whether restores begin there. `differs`: of a state that is not exact, what was
    other than in the run."""
    return {
        "exact": state.exact,
        "size": state.size,
        "created": state.created,
        "ends_chain": state.ends_chain,
        "differs": replayed(state.topology),
    }


def replayed(topology: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a state that was made of a log, and is not exact: what was other than in the run."""
    said = topology.get("replayed")
    differs = said.get("differs") if isinstance(said, dict) else None
    return tuple(map(str, differs)) if isinstance(differs, list) else ()
