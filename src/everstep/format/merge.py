"""Many ranks' piece tables into one part: one table, one file. Pure: no bytes of tensors are moved.

Each rank has laid out its own boxes (packs.lay_out); its image holds its packs one after another.
The merged file has one header for all, and behind it the data sections as they are:

    rank 0: │ header │ data a ┆ header │ data b │      merged: │ header │ data a │ data b │ data c │
    rank 1: │ header │ data c │

All of these are whole pages, so what was aligned stays aligned. Of the digests only those of the
ranks' own headers vanish; merged they are: the merged headers', then each rank's, in their order.

Ranks may hold other parameters of one optimizer, and number its hyperparameter sets differently:
what each calls by an index of its own gets common indices.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from everstep.errors import Mismatch, Unsupported
from everstep.format import packs
from everstep.format.boxes import Box
from everstep.format.global_tensors import optimizers_of, whole_tensors
from everstep.format.packs import (
    Entries,
    PackShape,
    Piece,
    Spec,
    chunk_count,
    entry_name,
    in_groups,
    pack_starts,
)
from everstep.format.tables import Table, TensorEntry, seal_table
from everstep.format.tiling import Flaw, find_flaw

_LISTED_MAX = 8


NamedTables = Sequence[tuple[str, Table]]
"""Tables, each of which comes with whose it is, for messages: "rank 3"."""


class Section(NamedTuple):
    """`size` bytes at `offset` of the image of the rank at position `rank` of the input."""

    rank: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Merged:
    """One part of many ranks. File number i is `headers[i]`, then `sections[i]`: whole pages."""

    document: bytes
    table: Table
    headers: tuple[bytes, ...]
    sections: tuple[tuple[Section, ...], ...]


class _Placed(NamedTuple):
    entry: TensorEntry
    piece: Piece


@dataclass(frozen=True, slots=True)
class _Pack:
    """A rank's pack, and the pieces that are taken of it, as they lie in it."""

    shape: PackShape
    section: Section
    pieces: list[_Placed]


def merge(ranks: NamedTables, *, are_all: bool = True) -> Merged:
    """Merge the tables of ranks. Deterministic: the same tables in the same order, the same bytes.

    `are_all`: there are no others, on other nodes. Raises what `unite_tables` and
    `unite_optimizers` do, and Unsupported where names collide.
    """
    tensors = unite_tables(ranks, are_all=are_all)
    packs_by_rank = _packs([table for _, table in ranks])
    files = list(_files(packs_by_rank))
    digests = _digests(packs_by_rank, len(files))
    headers: list[bytes] = []
    shapes: list[PackShape] = []
    moved: dict[str, list[Piece]] = {}
    for number, file in enumerate(files):
        entries = Entries()
        placed = [(pack, found, at) for pack in file for found, at in _place(entries, pack)]
        headers.append(header := entries.encode())
        size = len(header) + entries.size
        shapes.append(replace(file[0].shape, size=size, header=len(header), digest=number))
        for pack, (entry, piece), at in placed:
            digest = digests[pack.section.rank, piece.digest]
            again = replace(piece, pack=number, offset=len(header) + at, digest=digest)
            moved.setdefault(entry.spec.name, []).append(again)
    found: dict[str, TensorEntry] = {}
    for name, pieces in sorted(moved.items()):
        pieces.sort(key=lambda piece: (piece.box.offsets, piece.box.lengths))
        found[name] = replace(tensors[name], pieces=tuple(pieces))
    table = Table(tuple(shapes), found, unite_optimizers(ranks))
    sections = tuple(tuple(p.section for p in file if p.section.size) for file in files)
    return Merged(seal_table(table), table, tuple(headers), sections)


Sets = Mapping[str, Sequence[Any]]


def merge_sets(ranks: Sequence[Sets]) -> tuple[dict[str, list[Any]], list[dict[str, list[int]]]]:
    """All sets of all ranks (tagged JSON, by optimizer), and each rank's indices into them.

    Those of the first keep their indices. Another's set keeps its index where an equal set or none
    has it; else it gets that of the first equal set, or a new one.
    """
    merged: dict[str, list[Any]] = {}
    texts: dict[str, list[str]] = {}
    indices: list[dict[str, list[int]]] = []
    for rank in ranks:
        own: dict[str, list[int]] = {}
        for optimizer, sets in rank.items():
            values, known = merged.setdefault(optimizer, []), texts.setdefault(optimizer, [])
            own[optimizer] = []
            for index, value in enumerate(sets):
                # Texts: 1, 1.0 and true are different values.
                text = json.dumps(value, sort_keys=True)
                if index < len(known) and known[index] != text:
                    index = known.index(text) if text in known else len(known)
                if index == len(known):
                    known.append(text)
                    values.append(value)
                own[optimizer].append(index)
        indices.append(own)
    return merged, indices


def renumbered(table: Table, sets: Mapping[str, Sequence[int]]) -> Table:
    """A table with the numbers that its hyperparameter sets have in the united ones (`merge_sets`),
    by optimizer; others stay."""
    optimizers = dict(table.optimizers)
    for name in optimizers.keys() & sets.keys():
        groups = {key: sets[name][index] for key, index in optimizers[name]["groups"].items()}
        optimizers[name] = {**optimizers[name], "groups": groups}
    return replace(table, optimizers=optimizers)


def unite_optimizers(tables: NamedTables) -> dict[str, dict[str, Any]]:
    """What tables say together of optimizers. Raises Mismatch where two have one parameter in
    different sets."""
    first: dict[tuple[str, str], tuple[str, int]] = {}
    for who, table in tables:
        for optimizer, said in table.optimizers.items():
            for name, index in said["groups"].items():
                other, known = first.setdefault((optimizer, name), (who, index))
                if known != index:
                    raise Mismatch(
                        f"merging the optimizers of all ranks: in {optimizer!r} the parameter "
                        f"{name!r} has other hyperparameters on {who} (set {index}) than on "
                        f"{other} (set {known}). Set them alike"
                    )
    return optimizers_of([table for _, table in tables])


def unite_tables(tables: NamedTables, *, are_all: bool) -> dict[str, TensorEntry]:
    """What tables say together of each tensor.

    Raises Mismatch where they disagree about a tensor, have the same elements, or, if these
    `are_all`, not each element: with its name, the boxes, and the elements.
    """
    _check_specs(tables)
    united = whole_tensors([table for _, table in tables])
    for name, entry in united.items():
        if flaw := find_flaw(entry.spec.shape, [p.box for p in entry.pieces], holes=are_all):
            own = ((who, table.tensors[name]) for who, table in tables if name in table.tensors)
            raise _flawed(entry, flaw, [(piece.box, who) for who, e in own for piece in e.pieces])
    return united


def _check_specs(tables: NamedTables) -> None:
    first: dict[str, tuple[str, Spec]] = {}
    tied: dict[str, str] = {}
    for who, table in tables:
        for name, entry in table.tensors.items():
            for alias in entry.aliases:
                if tied.setdefault(alias, name) != name:
                    raise Mismatch(
                        f"merging the tensors of all ranks: {alias!r} is another name of {name!r} "
                        f"({who}) and of {tied[alias]!r}. Tie the same tensors on all ranks"
                    )
            other, known = first.setdefault(name, (who, entry.spec))
            if known != entry.spec:
                raise _unlike(known, other, entry.spec, who)
    for alias in sorted(tied.keys() & first.keys()):
        raise Mismatch(
            f"merging the tensors of all ranks: {alias!r} is a tensor of its own "
            f"({first[alias][0]}), and another name of {tied[alias]!r} elsewhere. Tie the same "
            f"tensors on all ranks"
        )


def _unlike(one: Spec, who: str, two: Spec, other: str) -> Mismatch:
    what, value, found = "dtype", str(one.dtype), str(two.dtype)
    if value == found:
        what, value, found = "global shape", str(one.shape), str(two.shape)
    return Mismatch(
        f"merging the tensors of all ranks: {one.name!r} has the {what} {value} ({who}), and "
        f"{found} ({other}). Save it alike on all ranks, or under different names"
    )


def _packs(tables: Sequence[Table]) -> list[_Pack]:
    """All ranks' packs. What several ranks have of no elements (a shard of more ranks than rows) is
    taken of the first: there is nothing to write twice."""
    found: list[_Pack] = []
    empty: set[tuple[str, Box]] = set()
    for position, table in enumerate(tables):
        starts = pack_starts(shape.size for shape in table.packs)
        own = [
            _Pack(shape, Section(position, start + shape.header, shape.size - shape.header), [])
            for shape, start in zip(table.packs, starts, strict=True)
        ]
        for name, entry in table.tensors.items():
            for piece in entry.pieces:
                if piece.size or (name, piece.box) not in empty:
                    own[piece.pack].pieces.append(_Placed(entry, piece))
                if not piece.size:
                    empty.add((name, piece.box))
        for pack in own:
            pack.pieces.sort(key=lambda placed: (placed.piece.offset, placed.piece.size))
        found += own
    return found


def _digests(found: Sequence[_Pack], first: int) -> dict[tuple[int, int], int]:
    """The merged index of each piece's first digest, by position of its rank, and its own."""
    at = first
    merged: dict[tuple[int, int], int] = {}
    rows = ((p.section.rank, placed.piece) for p in found for placed in p.pieces)
    for position, piece in sorted(rows, key=lambda row: (row[0], row[1].digest)):
        merged[position, piece.digest] = at
        at += chunk_count(piece.size)
    return merged


def _files(found: Sequence[_Pack]) -> Iterator[list[_Pack]]:
    """The packs that go into one file each; the still ones last, and by their turns, in
    files of their own."""

    def kind(pack: _Pack) -> tuple[bool, int]:
        return pack.shape.still, pack.shape.turn

    for _, group in groupby(sorted(found, key=kind), kind):
        rows = ((pack, len(pack.pieces)) for pack in group)
        yield from in_groups(rows, packs.ENTRIES_PER_PACK_MAX)


def _place(entries: Entries, pack: _Pack) -> Iterator[tuple[_Placed, int]]:
    """Go on with the entries of a file's header, and say where each piece of a pack lies in it."""
    base = entries.size
    for placed in pack.pieces:
        spec, piece = placed.entry.spec, placed.piece
        entries.pad(base + piece.offset - pack.shape.header)
        name = entry_name(spec.name, spec.shape, piece.box)
        if name in entries.rows:
            raise Unsupported(
                f"merging the tensors of all ranks: a tensor cannot be called {name!r} beside "
                f"one called {name.rpartition('[')[0]!r}, whose box has that name. Rename it"
            )
        yield placed, entries.add(name, spec.dtype, piece.box.lengths, piece.size)
    entries.pad(base + pack.section.size)


def _flawed(entry: TensorEntry, flaw: Flaw, rows: Sequence[tuple[Box, str]]) -> Mismatch:
    spec = entry.spec
    what = f"merging the pieces of {spec.name!r} ({spec.dtype}, shape {spec.shape}): "
    if flaw.members:
        (one, who), (two, other) = (rows[index] for index in flaw.members)
        return Mismatch(
            f"{what}overlap: {who} wrote {one} and {other} wrote {two}, both have {flaw.box}. Give "
            f"different tensors different names on all ranks"
        )
    listed = [f"{who} wrote {box}" for box, who in rows[:_LISTED_MAX]]
    more = f" and {len(rows) - _LISTED_MAX} more" if len(rows) > _LISTED_MAX else ""
    return Mismatch(
        f"{what}hole: nobody wrote {flaw.box}; {', '.join(listed)}{more}. "
        f"All ranks that hold some of it must save it, under the same name"
    )
