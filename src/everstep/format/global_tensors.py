"""Tensors over all parts of a checkpoint: several may have pieces of one, which must be all of it.

The parts of one step make up a tensor together; of different steps (of a spread state, of a log's
records) each has a version of its own, and the latest counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep.errors import Corrupt
from everstep.format.boxes import Box
from everstep.format.index import Index, Placed, runs_of
from everstep.format.manifest import Manifest, Part, Record
from everstep.format.tables import Table, TensorEntry, is_own
from everstep.format.tiling import find_flaw

Version = Sequence[tuple[Part, Table]]
"""Parts of one step: together they have all of each tensor that is in them."""


@dataclass(frozen=True, slots=True)
class Described:
    """A manifest, and the table of each of its parts; or in outline, which its index gives: then
    without them."""

    manifest: Manifest
    tables: Sequence[Table]

    @property
    def outline(self) -> Index | None:
        """The index, where that is all there is."""
        return None if self.tables else self.manifest.index

    @property
    def versions(self) -> list[Version]:
        """Its parts by rising step."""
        found: dict[int, list[tuple[Part, Table]]] = {}
        for part, table in zip(self.manifest.all_parts, self.tables, strict=True):
            found.setdefault(part.steps, []).append((part, table))
        return [found[step] for step in sorted(found)]

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """The state's, by all their names, as its last part that has each has it."""
        if self.outline:
            return _by_all_names(self.outline.tensors)
        found: dict[str, TensorEntry] = {}
        for version in self.versions:
            found |= stored(version, is_record=bool(self.manifest.records))
        return found

    @property
    def optimizers(self) -> dict[str, Any]:
        """The state's, as the last parts that have each have it."""
        if self.outline:
            return {**self.outline.optimizers}
        found: dict[str, Any] = {}
        for version in self.versions:
            found.update(optimizers_of([table for _, table in version]))
        return found

    @property
    def records(self) -> list[tuple[Record, tuple[Table, ...]]]:
        """Each with the tables of its parts."""
        found = {
            id(part): table
            for part, table in zip(self.manifest.all_parts, self.tables, strict=True)
        }
        return [
            (record, tuple(found[id(part)] for part in record.parts))
            for record in self.manifest.records
        ]

    def problems(self, known: set[tuple[int, ...]] | None = None) -> Iterator[str]:
        """What is wrong with its tensors: a hole, an overlap. `known`: the tables, by id(), which
        were found to be whole together; is added to."""
        for version in self.versions:
            tables = [table for _, table in version]
            if known is None or tuple(map(id, tables)) not in known:
                yield from _problems_of(tables)
            if known is not None:
                known.add(tuple(map(id, tables)))

    def check(self, where: object, known: set[tuple[int, ...]] | None = None) -> None:
        """Raises Corrupt where a tensor is not all there. `known`: see `problems`."""
        for problem in self.problems(known):
            raise Corrupt(f"reading step {self.manifest.step} of {where}: {problem}")

    def index_problems(self) -> Iterator[str]:
        """Of which pieces its index, if it has one, does not tell."""
        index = self.manifest.index
        for number, table in enumerate(self.tables if index else ()):
            for name, entry in table.tensors.items():
                if index and not index.tells_of(number, entry):
                    yield f"tensor {name!r}: the index tells otherwise of part {number}"

    def check_boxes(self, wanted: Mapping[str, Sequence[Box]], where: object) -> None:
        """Raises Corrupt where these parts do not have each element of these boxes once, or have
        other tensors than the index says."""
        assert self.manifest.index is not None
        entries = entries_by_name(self.tables)
        for name, boxes in wanted.items():
            own, spec = entries.get(name, []), self.manifest.index.tensors[name].spec
            pieces = [piece.box for entry in own for piece in entry.pieces]
            problem = None
            if any(entry.spec != spec for entry in own):
                problem = "its parts differ in what it is"
            elif find_flaw(spec.shape, pieces, holes=False):
                problem = "two pieces overlap"
            for box in () if problem else boxes:
                common = (each.intersect(box) for each in pieces)  # which do not overlap
                if box.count != sum(each.count for each in common if each):
                    problem = f"elements {box} are not all in those parts of which the index tells"
            if problem:
                step = self.manifest.step
                raise Corrupt(f"reading step {step} of {where}: tensor {name!r}: {problem}")


def index_of(tables: Sequence[Table]) -> Index:
    """Of the tables of all parts, which are whole together."""
    whole = whole_tensors(tables)
    placed: dict[str, list[Placed]] = {name: [] for name in whole}
    for number, table in enumerate(tables):
        for name, entry in table.tensors.items():
            placed[name] += ((number, p.box.offsets, p.box.lengths) for p in entry.pieces)
    tensors = {name: replace(whole[name], pieces=()) for name in sorted(whole)}
    runs = {name: runs_of(placed[name]) for name in tensors}
    return Index(tensors, optimizers_of(tables), runs)


def whole_tensors(tables: Sequence[Table]) -> dict[str, TensorEntry]:
    """The tensors of tables that belong together, by name: with the boxes that all of them have,
    and all aliases. Which part a piece lies in, only that part's own table tells."""
    return {name: _joined(found) for name, found in entries_by_name(tables).items()}


def entries_by_name(tables: Sequence[Table]) -> dict[str, list[TensorEntry]]:
    """What each of these tables that has a tensor says of it, in their order."""
    entries: dict[str, list[TensorEntry]] = {}
    for table in tables:
        for name, entry in table.tensors.items():
            entries.setdefault(name, []).append(entry)
    return entries


def _joined(entries: Sequence[TensorEntry]) -> TensorEntry:
    first, *others = entries
    if not others:
        return first
    pieces = tuple(piece for entry in entries for piece in entry.pieces)
    aliases = dict.fromkeys(alias for entry in entries for alias in entry.aliases)
    strides = first.strides if all(entry.strides == first.strides for entry in others) else None
    return replace(first, pieces=pieces, aliases=tuple(aliases), strides=strides)


def stored(version: Version, *, is_record: bool) -> dict[str, TensorEntry]:
    """The state's tensors in it, by all their names; a record has others of its own."""
    whole = whole_tensors([table for _, table in version])
    return _by_all_names(
        {name: entry for name, entry in whole.items() if not (is_record and is_own(name))}
    )


def _by_all_names(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    return {each: entry for name, entry in tensors.items() for each in (name, *entry.aliases)}


def optimizers_of(tables: Sequence[Table]) -> dict[str, Any]:
    """The optimizers of tables that belong together: each may have parameters of its own, or some
    state of them."""
    found: dict[str, Any] = {}
    for table in tables:
        for name, said in table.optimizers.items():
            known = found.setdefault(name, {**said, "groups": {}, "state": {}})
            known["groups"].update(said["groups"])
            for parameter, keys in said["state"].items():
                own = known["state"].setdefault(parameter, keys)
                if own != keys:
                    known["state"][parameter] = list(dict.fromkeys([*own, *keys]))
    return found


def _problems_of(tables: Sequence[Table]) -> Iterator[str]:
    for name, entries in entries_by_name(tables).items():
        whole = _joined(entries)
        if any(entry.spec != whole.spec for entry in entries):
            specs = {entry.spec for entry in entries}
            said = " and ".join(sorted(f"{spec.dtype}{list(spec.shape)}" for spec in specs))
            yield f"tensor {name!r}: its parts differ in what it is ({said})"
        elif flaw := find_flaw(whole.spec.shape, [piece.box for piece in whole.pieces]):
            hole = f"elements {flaw.box} are in no piece"
            problem = f"two pieces overlap at {flaw.box}" if flaw.members else hole
            yield f"tensor {name!r}: {problem}"
