"""Tensors over all parts of a checkpoint: several may have pieces of one, which must be all of it.

The parts of one step make up a tensor together; of different steps (of a spread state, of a log's
records) each has a version of its own, and the latest counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.errors import Corrupt
from everstep.format.manifest import Manifest, Record
from everstep.format.packs import Spec
from everstep.format.tables import Table, TensorEntry
from everstep.format.tiling import problem_of


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor of a checkpoint: its entry in the table of each part that has pieces of it."""

    entries: tuple[TensorEntry, ...]

    @property
    def spec(self) -> Spec:
        """Name, dtype and global shape, which all entries have in common."""
        return self.entries[0].spec

    @property
    def device(self) -> str:
        """Where the first of its pieces was."""
        return self.entries[0].device

    @property
    def strides(self) -> tuple[int, ...] | None:
        """How its elements lay in memory; None: row-major, or nobody had all of it."""
        return self.entries[0].strides

    @property
    def aliases(self) -> tuple[str, ...]:
        """Its other names, in whichever part they stand."""
        if len(self.entries) == 1:
            return self.entries[0].aliases
        return tuple(dict.fromkeys(name for entry in self.entries for name in entry.aliases))


def groups(manifest: Manifest, tables: Sequence[Table]) -> list[list[Table]]:
    """Which of a checkpoint's tables (one for each part) belong together, by rising step."""
    found: dict[int, list[Table]] = {}
    for part, table in zip(manifest.all_parts, tables, strict=True):
        found.setdefault(part.steps, []).append(table)
    return [found[step] for step in sorted(found)]


def tables_of_records(
    manifest: Manifest, tables: Sequence[Table]
) -> list[tuple[Record, tuple[Table, ...]]]:
    """Each record of a checkpoint with the tables (of which there is one for each part) of its
    parts."""
    found = {id(part): table for part, table in zip(manifest.all_parts, tables, strict=True)}
    return [
        (record, tuple(found[id(part)] for part in record.parts)) for record in manifest.records
    ]


def whole_tensors(tables: Sequence[Table]) -> dict[str, GlobalTensor]:
    """The tensors of tables that belong together, by name."""
    found: dict[str, list[TensorEntry]] = {}
    for table in tables:
        for name, entry in table.tensors.items():
            found.setdefault(name, []).append(entry)
    return {name: GlobalTensor(tuple(entries)) for name, entries in found.items()}


def optimizers_of(tables: Sequence[Table]) -> dict[str, Any]:
    """The optimizers of tables that belong together: each may have parameters of its own."""
    found: dict[str, Any] = {}
    for table in tables:
        for name, said in table.optimizers.items():
            known = found.get(name, {})
            merged = {key: {**known.get(key, {}), **said[key]} for key in ("groups", "state")}
            found[name] = {**said, **merged}
    return found


def check_whole(
    manifest: Manifest,
    tables: Sequence[Table],
    where: object,
    known: set[tuple[int, ...]] | None = None,
) -> None:
    """Raises Corrupt where a tensor of a checkpoint is not all there. `known`: the tables, by id(),
    which were found to be whole together; is added to."""
    for group in groups(manifest, tables):
        key = tuple(map(id, group))
        if known is None or key not in known:
            for problem in problems_of(group):
                raise Corrupt(f"reading step {manifest.step} of {where}: {problem}")
        if known is not None:
            known.add(key)


def problems_of(tables: Sequence[Table]) -> Iterator[str]:
    """What is wrong with the tensors of tables that belong together: a hole, an overlap."""
    for name, whole in whole_tensors(tables).items():
        specs = {entry.spec for entry in whole.entries}
        if len(specs) > 1:
            said = " and ".join(sorted(f"{spec.dtype}{list(spec.shape)}" for spec in specs))
            yield f"tensor {name!r}: its parts differ in what it is ({said})"
            continue
        boxes = [piece.box for entry in whole.entries for piece in entry.pieces]
        if problem := problem_of(whole.spec.shape, boxes):
            yield f"tensor {name!r}: {problem}"
