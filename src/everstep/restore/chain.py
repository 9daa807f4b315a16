"""What a checkpoint is rebuilt from: a state, and the records that bring it to the step."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from everstep.errors import Unsupported
from everstep.format.global_tensors import Described, Version
from everstep.format.manifest import LEFT_OUT, Manifest, Record
from everstep.format.tables import Table, TensorEntry, owned_names
from everstep.redo.replay import Comparison
from everstep.sharding.topology import ALONE, adopted, differences, layout_differences
from everstep.state.objects import references
from everstep.state.placement import Saved


@dataclass(frozen=True, slots=True)
class Chain:
    """A state, and the logs that go on from it, which may be none."""

    base: Described
    logs: Sequence[Described]

    @property
    def replayed(self) -> list[Described]:
        """Whose records are replayed: the logs; and first the base, where it is spread."""
        return [self.base, *self.logs] if self.base.manifest.is_spread else [*self.logs]

    @property
    def records(self) -> list[tuple[Record, tuple[Table, ...]]]:
        """Those that are replayed, in their order, with the tables of their parts."""
        return [row for described in self.replayed for row in described.records]

    @property
    def calls(self) -> list[Mapping[str, Any]]:
        """Of optimizers, in their order."""
        return [call for record, _ in self.records for call in record.calls]

    @property
    def last(self) -> Described:
        """What was asked for."""
        return self.logs[-1] if self.logs else self.base

    @property
    def versions(self) -> list[Version]:
        """All parts, by rising step."""
        return [version for each in (self.base, *self.logs) for version in each.versions]

    @property
    def later_names(self) -> set[str]:
        """The tensors that the logs have."""
        tables = {id(table): table for log in self.logs for table in log.tables}  # most share one
        return {name for table in tables.values() for name in table.tensors}

    @property
    def optimized(self) -> set[str]:
        """The names of the tensors that optimizers change."""
        return {name for table in self.base.tables for name in owned_names(table.optimizers)}

    @property
    def ruled(self) -> set[str]:
        """The parts that rules derive: they are in the base, and in no record."""
        return {part for record, _ in self.records for part in record.ruled}

    def check_unruled(self, what: str) -> None:
        """Raises Unsupported where some of it takes the program."""
        if ruled := sorted(self.ruled):
            raise Unsupported(
                f"{what}, without the program: {', '.join(map(repr, ruled))} is derived by a rule "
                f"of its own (derive=). Restore the step there, or take one that is a whole state"
            )

    @property
    def left_out(self) -> list[str]:
        """Parts of which the last record has no tensors."""
        said = self.last.manifest.capture.get(LEFT_OUT)
        return list(map(str, said)) if isinstance(said, list) else []

    def differences(self, layout: str) -> list[str]:
        """What is other here than where the records were made, of what a replay may depend on.
        `layout`: of the ranks that replay."""
        found: set[str] = set()
        for described in self.replayed:
            then = described.manifest.topology
            calls = (call for record in described.manifest.records for call in record.calls)
            found |= {*differences(then), *layout_differences(then, layout, calls)}
        return sorted(found)

    def moved(self, kinds: Mapping[str, str] | None = None) -> list[str]:
        """That it is replayed on another kind of device than the run's, which comes to other last
        bits. `kinds`: of the parameters that are here, by name; None: all are, on the CPU."""
        found = set()
        for table in self.base.tables:
            for optimizer in table.optimizers.values():
                for name in optimizer["groups"].keys() & table.tensors.keys():
                    then, _, _ = table.tensors[name].device.partition(":")
                    now = "cpu" if kinds is None else kinds.get(name, then)
                    found |= {f"parameters on {then}, here on {now}"} if then != now else set()
        return sorted(found)

    @property
    def why_inexact(self) -> list[str]:
        """What may make it another state than the run's: what is other in this process, where it is
        replayed, than where it was recorded; where it begins; and what records do without."""
        differing = list[str]()
        if self.replayed:
            with adopted(self.last.manifest.topology):
                differing += [*self.differences(ALONE), *self.moved()]
        if not (base := self.base.manifest).exact:
            differing.append(f"what is stored of step {base.step} is not exact")
        differing += [f"{part} has no tensors in records" for part in self.left_out]
        return sorted(differing)

    def comparison(
        self, layout: str, rank: int | None = None, *, is_moved: bool
    ) -> Comparison | None:
        """How a replay on this machine, by ranks of this layout, is compared with the run; None
        where no rank has what one had then. `rank`: this one of several. `is_moved`: on another
        kind of device."""
        layouts = [each.manifest.topology.get("layout", ALONE) for each in self.replayed]
        if not layouts or layouts.count(layout) < len(layouts) or is_moved:
            return None
        return Comparison(self.base.manifest.exact and not self.differences(layout), rank)

    def saved(self, names: Set[str]) -> Saved:
        """What the state has after the last record, each tensor as it was stored last; `names`:
        of what a replay brings, which is in the base.

        A record need not have what has not changed. But what only an object had is gone when the
        object has let go of it.
        """
        rows: dict[str, tuple[TensorEntry, Described]] = {}
        for described in (self.base, *self.logs):
            rows |= {name: (whole, described) for name, whole in described.tensors.items()}
        last, known = objects_tensors(self.last.manifest), dict[int, set[str]]()

        def is_there(name: str, whole: TensorEntry, described: Described) -> bool:
            if described is self.last or not names.isdisjoint((name, *whole.aliases)):
                return True
            if id(described) not in known:
                known[id(described)] = objects_tensors(described.manifest)
            return name in last or name not in known[id(described)]

        tensors = {name: row[0] for name, row in rows.items() if is_there(name, *row)}
        return replace(Saved.of(self.last), tensors=tensors)


def objects_tensors(manifest: Manifest) -> set[str]:
    """The tensors to which its objects refer."""
    own = (each["value"] for rank in manifest.ranks for each in rank.values())
    return set(references([manifest.objects, manifest.hyperparameters, *own]))


def is_brought(whole: TensorEntry, names: Iterable[str]) -> bool:
    """Whether a stored tensor is one of these, under one of its names."""
    return not {whole.spec.name, *whole.aliases}.isdisjoint(names)
