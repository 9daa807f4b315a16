"""Derived parts at a replay: their rules run after each record, and are compared with the run.

A rule may look at the model's buffers, which a record has as they were after its step. So they are
put back before it runs; optimizers' tensors are there already.
"""

from collections.abc import Callable, Mapping, Sequence, Set

import torch

from everstep.errors import Corrupt, Mismatch
from everstep.format.manifest import Record
from everstep.format.tables import Table, TensorEntry, is_own
from everstep.redo.replay import Loaded
from everstep.redo.rules import Rules, digest_of, is_in, own_sample
from everstep.redo.samples import sample_of
from everstep.restore.choose import Described
from everstep.sharding.topology import ALONE
from everstep.state.placement import Destination, Placement, Saved
from everstep.state.view import State

_RULED = (
    "Its rule is another one now, or depends on something beside the weights, the buffers, the "
    "part itself and the step; or torch and processor are others"
)
_CONSTANT = (
    "It was said to be changed by nobody (derive=), and something changed it unnoticed: no step "
    "after that can be restored, up to the next base"
)

Fill = Callable[[Record, Table, list[tuple[TensorEntry, list[Destination]]]], None]


class Derivation:
    """What rules derive in the replay of one log."""

    def __init__(
        self,
        base: Described,
        logs: Sequence[Described],
        rules: Rules | None,
        state: State,
        optimized: Set[str],
    ) -> None:
        """`optimized`: the names of what optimizers change. Raises Mismatch where a part that a
        rule derived has none here."""
        self._rows = {
            record.step: (described, record, tables[0])  # nothing is derived on several nodes
            for described in logs
            for record, tables in described.records
        }
        parts, ruled = derived_parts(logs)
        self._parts = parts
        self._rules = rules
        self._state = state
        self._constant = parts - ruled
        self._optimized = frozenset(optimized)
        world = state.world
        self._rank = None if world.is_alone else world.rank
        self._layout = state.layout() if parts else ALONE
        self._constants: dict[str, dict[str, torch.Tensor]] = {}
        missing = sorted(ruled - set(rules.ruled if rules else ()))
        if missing:
            raise Mismatch(
                f"restoring step {logs[-1].manifest.step}: its log has to be replayed from step "
                f"{base.manifest.step}, and {', '.join(map(repr, missing))} was derived by a rule "
                f"that this Checkpointer does not have. Give it derive={{{missing[0]!r}: ...}} as "
                f"the run did, or restore step {base.manifest.step}, which is whole"
            )
        self.names: Set[str] = derived_names(base, parts, optimized)
        """Of the tensors that are derived."""

    def live(self) -> dict[str, torch.Tensor]:
        """The derived tensors as they are now, by all their names."""
        parts = self._parts
        return {name: found for part in parts for name, found in self._tensors(part).items()}

    def after(
        self, loaded: Loaded, tensors: Callable[[], Mapping[str, torch.Tensor]], fill: Fill
    ) -> None:
        """Its optimizer calls are made: let the rules follow. `tensors` gives those of the state's
        modules, by all their names. Raises Corrupt where a rule came to other bytes than in the
        run, and what the rules raise."""
        if loaded.step not in self._rows:  # of a base that is spread: what is derived came last
            return
        described, record, table = self._rows[loaded.step]
        if ruled := record.ruled:
            assert self._rules is not None
            self._put_back(described, record, table, tensors(), fill)
            self._rules.run(record.step, ruled)
        for part in record.derived:
            live = self._tensors(part)
            names = [name for name in self.names if is_in(name, part)]
            if lost := [name for name in names if name not in live]:
                raise Corrupt(f"{_at(record, part)} has no tensor {lost[0]!r} any more")
            then = described.manifest.topology.get("layout", ALONE)
            if then == self._layout:  # else what a rank then had of it is not what one has here
                compare(loaded, record, part, {name: live[name] for name in names}, self._rank)

    def _tensors(self, part: str) -> dict[str, torch.Tensor]:
        """By all names; of a part that nobody changes they stay the same."""
        if part not in self._constant:
            return self._state.tensors_of(part)
        if part not in self._constants:
            self._constants[part] = self._state.tensors_of(part)
        return self._constants[part]

    def _put_back(
        self,
        described: Described,
        record: Record,
        table: Table,
        tensors: Mapping[str, torch.Tensor],
        fill: Fill,
    ) -> None:
        placement = Placement(Saved.of(described.manifest, described.tables))
        for name in table.tensors:
            if not is_own(name) and name in tensors and name not in self._optimized | self.names:
                placement.into(name, tensors[name])
        if placement.problems:
            raise Corrupt(f"replaying step {record.step}: {'; '.join(placement.problems)}")
        if placement.destinations:
            found = placement.destinations
            fill(record, table, [(table.tensors[name], to) for name, (_, to) in found.items()])


def derived_parts(logs: Sequence[Described]) -> tuple[set[str], set[str]]:
    """The names of the parts that are in bases only; and of those among them that have a rule."""
    records = [record for described in logs for record, _ in described.records]
    derived = {part for record in records for part in record.derived}
    return derived, {part for record in records for part in record.ruled}


def derived_names(base: Described, parts: Set[str], optimized: Set[str]) -> set[str]:
    """The tensors in these parts, but for what optimizers change (`optimized`)."""
    return {
        name
        for table in base.tables
        for name in table.tensors
        if name not in optimized and any(is_in(name, part) for part in parts)
    }


def compare(
    loaded: Loaded,
    record: Record,
    part: str,
    found: Mapping[str, torch.Tensor],
    rank: int | None = None,
) -> None:
    """Raises Corrupt where a part is not what the run had after this step, as far as its record
    tells. `rank`: of as many as it had."""
    said = record.derived[part]
    known = loaded.tensors.get(own_sample(part, rank))
    is_same = known is None or sample_of(found, record.step).cpu().equal(known.cpu())
    digest = said["digest"] if rank is None else said["digests"][rank]
    # None where nothing is hashed: a pass over the part, which samples spare.
    if not is_same or (digest is not None and digest != digest_of(found)):
        raise Corrupt(
            f"{_at(record, part)} came to other bytes than the run had after this step. "
            f"{_RULED if said['rule'] else _CONSTANT}"
        )


def _at(record: Record, part: str) -> str:
    return f"replaying step {record.step}: the derived part {part!r}"
