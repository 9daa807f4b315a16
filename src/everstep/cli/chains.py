"""Which checkpoints go on from which: states, and the logs that are replayed after them.

Only for looking: a restore checks digests on its way back, this does not. What cannot be read goes
on from nothing that could be told.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.errors import EverstepError
from everstep.format.manifest import Manifest
from everstep.store import catalog
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk

WALK_MAX = 1000
"""Manifests that are read to find one log's base: as far apart as everstep itself puts bases."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The state that a log goes back to, and how many records lie between. A log that was made
    whole (everstep materialize), exactly, is such a state."""

    base: CheckpointName
    records: int


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole state that was made of a step that takes a replay: exactly, or but for last bits.
    `size`: bytes of its packs. `ends_chain`: whether restores begin there. `differs`: of
    one that is not exact, what was other than in the run."""

    exact: bool
    size: int
    created: str
    ends_chain: bool = True
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Link:
    behind: CheckpointName | None
    records: int
    whole: Whole | None = None
    is_whole: bool = False
    """Also where it has a base beside it, which is spread over the records before."""


class Chains:
    """Of one store. Reads each manifest at most once, and none before it is needed."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._links: dict[CheckpointName, _Link | None] = {}

    def note(self, manifest: Manifest) -> None:
        """This one was read already."""
        previous = manifest.previous
        behind = CheckpointName(previous.step, previous.epoch) if previous else None
        name = CheckpointName(manifest.step, manifest.epoch)
        whole, is_whole = None, False
        if manifest.records:
            with contextlib.suppress(EverstepError):  # a damaged one is as none
                if state := catalog.read_state(self._disk, name):
                    is_whole = state.ends_chain
                    if not state.is_spread:
                        whole = Whole(
                            state.exact,
                            state.size,
                            state.created,
                            state.ends_chain,
                            replayed(state.topology),
                        )
        self._links[name] = _Link(behind, len(manifest.records), whole, is_whole)

    def whole(self, name: CheckpointName) -> Whole | None:
        """What was made of this step, in the background or by everstep materialize."""
        link = self._link(name)
        return link.whole if link else None

    def origin(self, name: CheckpointName) -> Origin | None:
        """None for a state, and where the way back is broken, or longer than WALK_MAX."""
        records = 0
        here = name
        for _ in range(WALK_MAX):
            link = self._link(here)
            if link is None:
                return None
            if link.is_whole or (link.behind is None and here != name):
                return Origin(here, records)
            if link.behind is None:
                return None
            records += link.records
            here = link.behind
        return None

    def is_exact(self, name: CheckpointName) -> bool:
        """Whether it is restored bit for bit, as far as can be told: not from a state that is not
        exact, and stands for the log before it."""
        origin = self.origin(name)
        whole = self.whole(origin.base) if origin else None
        return whole is None or whole.exact or not whole.ends_chain

    def cut_off(
        self, among: Collection[CheckpointName], is_end: Callable[[CheckpointName], bool]
    ) -> list[CheckpointName]:
        """Those that a restore rebuilds from a checkpoint, themselves apart, for which `is_end`: of
        what was made whole exactly, nothing before it is needed."""
        known: dict[CheckpointName, bool] = {}
        for name in sorted(among):
            path: list[CheckpointName] = []
            here, found = name, False
            while here not in known:
                known[here] = False
                path.append(here)
                link = self._link(here)
                if link is None or link.behind is None or link.is_whole:
                    break
                here = link.behind
                if found := is_end(here):
                    break
            found = found or known[here]
            known.update(dict.fromkeys(path, found))
        return sorted(name for name in among if known[name])

    def _link(self, name: CheckpointName) -> _Link | None:
        if name not in self._links:
            self._links[name] = None
            with contextlib.suppress(EverstepError):
                self.note(catalog.read_manifest(self._disk, name))
        return self._links[name]


def replayed(topology: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a state that was made of a log, and is not exact: what was other than in the run."""
    said = topology.get("replayed")
    differs = said.get("differs") if isinstance(said, dict) else None
    return tuple(map(str, differs)) if isinstance(differs, list) else ()
