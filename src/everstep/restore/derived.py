"""Derived parts at a replay: their rules run after each record, and are compared with the run.

A rule may look at what no optimizer owns, buffers say. A record has it as it was after its step, if
it has changed since the base. So it is put back before the rule runs; optimizers' tensors are there
already.
"""

from collections.abc import Container
from dataclasses import replace

import torch

from everstep.errors import Corrupt, Mismatch
from everstep.format.global_tensors import Described, Version, stored
from everstep.format.manifest import Record
from everstep.format.tables import Table
from everstep.redo.derived import Derived
from everstep.redo.replay import Comparison, Loaded
from everstep.redo.rolling_digest import known_digests
from everstep.restore.chain import Chain
from everstep.restore.choose import Candidate
from everstep.restore.load import Loader, fill
from everstep.sharding.layout import local_of
from everstep.sharding.leaves import Leaf
from everstep.state.placement import Placement, Saved
from everstep.state.view import State

_RULED = (
    "Its rule is another one now, or depends on something beside the weights, the buffers, the "
    "part itself and the step"
)


class Derivation:
    """What rules derive in the replay of one log."""

    def __init__(self, chain: Chain, derived: Derived, state: State) -> None:
        """Raises Mismatch where a part that a rule derived has none here."""
        self._rows: dict[int, tuple[Described, Record, Table]] = {
            record.step: (described, record, tables[0])  # nothing is derived on several nodes
            for described in chain.logs
            for record, tables in described.records
        }
        self._names = {part: chain.names_in(part) for part in chain.ruled}
        self._derived = derived
        self._state = state
        self._base = chain.base
        self.filled: Container[str] = ()
        """Of the base, once it is in place."""
        self._optimized = chain.optimized
        if missing := sorted(self._names.keys() - set(derived.parts)):
            base = chain.base.manifest.step
            raise Mismatch(
                f"restoring step {chain.last.manifest.step}: its log has to be replayed from step "
                f"{base}, and {', '.join(map(repr, missing))} was derived by a rule that this "
                f"Checkpointer does not have. Give it derive={{{missing[0]!r}: ...}} as the run "
                f"did, or restore step {base}, which is whole"
            )
        self.names = {name for names in self._names.values() for name in names}
        """Of the tensors that rules derive."""
        self._tensors: dict[str, torch.Tensor] | None = None

    def live(self) -> dict[str, torch.Tensor]:
        """The derived tensors as they are now, by all their names."""
        live = map(self._state.tensors_of, self._names)
        return {name: found for own in live for name, found in own.items()}

    def after(self, loaded: Loaded, candidate: Candidate, loader: Loader) -> None:
        """Its optimizer calls are made: let the rules follow. Raises Corrupt where one came to
        other bytes than in the run, and what the rules raise."""
        if loaded.step not in self._rows:  # of a base that is spread: what is derived came last
            return
        described, record, table = self._rows[loaded.step]
        if not record.ruled:
            return
        self._put_back(described, [(record.part, table)], candidate, loader)
        self._derived.redo(record.step, record.ruled)
        if comparison := loaded.comparison:
            for part in record.ruled:
                self._compare(loaded, record, part, comparison)

    def _put_back(
        self, described: Described, version: Version, candidate: Candidate, loader: Loader
    ) -> None:
        """What no optimizer owns and no rule derives, as it was then: at the first record also what
        only the base has."""
        versions, tensors = [version], stored(version, is_record=True)
        if self._tensors is None:
            self._tensors = self._state.live_tensors()
            versions, tensors = [*self._base.versions, version], {**self._base.tensors, **tensors}
        placement = Placement(replace(Saved.of(described), tensors=tensors))
        later = {name for _, table in version for name in table.tensors}
        for name, whole in placement.saved.tensors.items():
            is_there = name not in later and whole.spec.name in self.filled
            if name in self._tensors and not is_there and name not in self._optimized | self.names:
                placement.into(name, self._tensors[name])
        if placement.problems:
            step = described.manifest.step
            raise Corrupt(f"replaying step {step}: {'; '.join(placement.problems)}")
        fill(candidate, versions, placement.destinations, loader)

    def _compare(self, loaded: Loaded, record: Record, part: str, comparison: Comparison) -> None:
        """With what the run had after this step, as far as its record tells."""
        live = self._state.tensors_of(part)
        if lost := sorted(self._names[part] - live.keys()):
            raise Corrupt(
                f"replaying step {record.step}: the derived part {part!r} has no tensor "
                f"{lost[0]!r} any more"
            )
        found = {name: live[name] for name in self._names[part]}
        if digests := known_digests(loaded.tensors, comparison.rank).get(part):
            leaves = [Leaf(name, local_of(found[name])) for name in sorted(found)]
            comparison.check(record.step, part, digests, leaves, _RULED)
