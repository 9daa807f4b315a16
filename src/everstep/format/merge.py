"""Many ranks' piece tables into one part: one table, one file. Pure: no bytes of tensors are moved.

Each rank has laid out its own boxes (packs.lay_out); its image holds its packs one after another.
The merged file has one header for all, and behind it the data sections as they are:

    rank 0: │ header │ data a ┆ header │ data b │      merged: │ header │ data a │ data b │ data c │
    rank 1: │ header │ data c │

All of these are whole pages, so what was aligned stays aligned. Of the digests only those of the
ranks' own headers vanish; merged they are: the merged headers', then each rank's, in their order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from everstep.errors import Mismatch, Unsupported
from everstep.format import packs
from everstep.format.boxes import Box
from everstep.format.dtypes import carried_as
from everstep.format.merged_sets import merge_optimizers
from everstep.format.packs import PAD_PREFIX, Piece, box_text, chunk_count, entry_name
from everstep.format.tables import PackShape, Table, TensorEntry, seal_table
from everstep.format.tiling import Flaw, find_flaw, find_overlap

_VANISHED = -1
_LISTED_MAX = 8

_Key = tuple[str, tuple[int, ...], tuple[int, ...]]  # a box of a tensor


@dataclass(frozen=True, slots=True)
class RankTable:
    """What one rank writes: its number (for messages), its table, and the merged index of each of
    its hyperparameter sets by optimizer (`merged_sets.merge_sets`; none: they are the same)."""

    rank: int
    table: Table
    sets: Mapping[str, Sequence[int]]


class Section(NamedTuple):
    """`size` bytes at `offset` of the image of the rank at position `rank` of the input."""

    rank: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Merged:
    """One part of many ranks. File number i is `headers[i]`, then `sections[i]`, all whole pages.

    `holders`: by tensor, the number of the rank that wrote each of its pieces, in their order.
    """

    document: bytes
    table: Table
    headers: tuple[bytes, ...]
    sections: tuple[tuple[Section, ...], ...]
    holders: dict[str, tuple[int, ...]]


class _Placed(NamedTuple):
    rank: int
    entry: TensorEntry
    piece: Piece


def merge(ranks: Sequence[RankTable]) -> Merged:
    """Merge the tables of ranks. Deterministic: the same tables in the same order, the same bytes.

    Raises Mismatch where ranks disagree about a tensor or write the same elements, Unsupported
    where names collide. Whether all elements are there is for `check_coverage` to say.
    """
    tensors = _unite([(f"rank {rank.rank}", rank.table) for rank in ranks])
    units = _by_pack(ranks)
    kept = _kept(ranks, units)
    digests, first_digest = _digest_maps(ranks, units, kept)
    headers: list[bytes] = []
    shapes: list[PackShape] = []
    sections: list[tuple[Section, ...]] = []
    moved: dict[str, list[tuple[Piece, int]]] = {}
    for number, file in enumerate(_files(units)):
        entries, places, end = _place(ranks, file)
        header = packs.encode_header(entries)
        headers.append(header)
        shapes.append(PackShape(len(header) + end, len(header), number))
        sections.append(tuple(_sections(ranks, file)))
        for placed, offset in places:
            piece = placed.piece
            digest = digests[placed.rank][piece.digest]
            moved.setdefault(placed.entry.spec.name, []).append(
                (
                    Piece(piece.box, number, len(header) + offset, piece.size, digest, piece.codec),
                    ranks[placed.rank].rank,
                )
            )
    assert len(headers) == first_digest
    found: dict[str, TensorEntry] = {}
    holders: dict[str, tuple[int, ...]] = {}
    for name in sorted(moved):
        rows = moved[name]
        if len(rows) > 1:
            rows.sort(key=lambda row: (row[0].box.offsets, row[0].box.lengths))
            _check_overlap(tensors[name], rows)
        found[name] = replace(tensors[name], pieces=tuple(piece for piece, _ in rows))
        holders[name] = tuple(rank for _, rank in rows)
    optimizers = merge_optimizers([(r.rank, r.table.optimizers, r.sets) for r in ranks])
    table = Table(tuple(shapes), found, optimizers)
    return Merged(
        seal_table(table),
        table,
        tuple(headers),
        tuple(sections),
        holders,
    )


def check_coverage(
    tables: Sequence[Table],
    holders: Sequence[Mapping[str, Sequence[int]]] = (),
) -> None:
    """Check that the pieces of all tables, the merged ones of all parts, cover each tensor exactly.

    `holders`: those of each table (Merged.holders), for the message. Raises Mismatch, which names
    the tensor, its boxes, and the elements that are missing or there twice.
    """
    united = _unite([(f"part {number}", table) for number, table in enumerate(tables)])
    for name, entry in united.items():
        pieces = entry.pieces
        if len(tables) > 1:
            mine = (table.tensors[name].pieces for table in tables if name in table.tensors)
            pieces = tuple(piece for found in mine for piece in found)
        flaw = find_flaw(entry.spec.shape, [piece.box for piece in pieces])
        if flaw is not None:
            rows = [
                (piece.box, f"rank {holders[number][name][at]}" if holders else f"part {number}")
                for number, table in enumerate(tables)
                if name in table.tensors
                for at, piece in enumerate(table.tensors[name].pieces)
            ]
            raise _flawed(entry, flaw, rows)


def _unite(tables: Sequence[tuple[str, Table]]) -> dict[str, TensorEntry]:
    """What all tables say about each tensor; the pieces are those of the first that has it.
    Each table comes with whose it is."""
    united: dict[str, TensorEntry] = {}
    first: dict[str, str] = {}
    tied: dict[str, str] = {}
    for who, table in tables:
        for name, entry in table.tensors.items():
            for alias in entry.aliases:
                if tied.setdefault(alias, name) != name:
                    raise Mismatch(
                        f"merging the tensors of all ranks: {alias!r} is another name of {name!r} "
                        f"({who}) and of {tied[alias]!r}. Tie the same tensors on all ranks"
                    )
            known = united.get(name)
            if known is None:
                united[name], first[name] = entry, who
            elif known is not entry:
                united[name] = _agreed(known, entry, first[name], who)
    for alias in sorted(tied.keys() & united.keys()):
        raise Mismatch(
            f"merging the tensors of all ranks: {alias!r} is a tensor of its own ({first[alias]}), "
            f"and another name of {tied[alias]!r} elsewhere. Tie the same tensors on all ranks"
        )
    return united


def _agreed(known: TensorEntry, entry: TensorEntry, who: str, other: str) -> TensorEntry:
    one, two = known.spec, entry.spec
    if one.dtype != two.dtype or one.shape != two.shape:
        what, value, found = (
            ("dtype", one.dtype, two.dtype)
            if one.dtype != two.dtype
            else ("global shape", one.shape, two.shape)
        )
        raise Mismatch(
            f"merging the tensors of all ranks: {one.name!r} has the {what} {value} ({who}), and "
            f"{found} ({other}). Save it alike on all ranks, or under different names"
        )
    aliases = known.aliases
    if aliases != entry.aliases:
        aliases = tuple(dict.fromkeys((*aliases, *entry.aliases)))
    strides = known.strides if known.strides == entry.strides else None
    if aliases == known.aliases and strides == known.strides:
        return known
    return replace(known, aliases=aliases, strides=strides)


def _by_pack(ranks: Sequence[RankTable]) -> dict[tuple[int, int], list[_Placed]]:
    """The pieces of each pack, by position of its rank and its own, as they lie in it."""
    units: dict[tuple[int, int], list[_Placed]] = {}
    for position, rank in enumerate(ranks):
        own: list[list[_Placed]] = [[] for _ in rank.table.packs]
        for entry in rank.table.tensors.values():
            for piece in entry.pieces:
                own[piece.pack].append(_Placed(position, entry, piece))
        for pack, unit in enumerate(own):
            unit.sort(key=lambda placed: (placed.piece.offset, placed.piece.size))
            units[position, pack] = unit
    return units


def _kept(
    ranks: Sequence[RankTable], units: dict[tuple[int, int], list[_Placed]]
) -> dict[_Key, _Placed]:
    """The pieces that are written, by box. Takes out of `units` what several ranks have of no
    elements (a shard of more ranks than rows): there is nothing to write twice."""
    kept: dict[_Key, _Placed] = {}
    for at, unit in units.items():
        again = set()
        for placed in unit:
            known = kept.setdefault(_key(placed), placed)
            if known is placed:
                continue
            if placed.piece.size:
                rows = [(p.piece, ranks[p.rank].rank) for p in (known, placed)]
                _check_overlap(placed.entry, rows)
            again.add(_key(placed))
        if again:
            units[at] = [p for p in unit if _key(p) not in again]
    return kept


def _key(placed: _Placed) -> _Key:
    box = placed.piece.box
    return placed.entry.spec.name, box.offsets, box.lengths


def _digest_maps(
    ranks: Sequence[RankTable],
    units: dict[tuple[int, int], list[_Placed]],
    kept: dict[_Key, _Placed],
) -> tuple[list[list[int]], int]:
    """By rank, the merged index of each digest; and how many merged headers come before them."""
    maps = []
    for rank in ranks:
        pieces = (piece for entry in rank.table.tensors.values() for piece in entry.pieces)
        count = len(rank.table.packs) + sum(chunk_count(piece.size) for piece in pieces)
        maps.append([_VANISHED] * count)
    for placed in kept.values():
        own = maps[placed.rank]
        for index in _digests(placed):
            own[index] = 0
    first = at = sum(1 for _ in _files(units))
    for own in maps:
        for index, value in enumerate(own):
            if value != _VANISHED:
                own[index] = at
                at += 1
    return maps, first


def _digests(placed: _Placed) -> range:
    first = placed.piece.digest
    return range(first, first + chunk_count(placed.piece.size))


def _files(
    units: dict[tuple[int, int], list[_Placed]],
) -> Iterator[dict[tuple[int, int], list[_Placed]]]:
    """The packs that go into one file each."""
    file: dict[tuple[int, int], list[_Placed]] = {}
    count = 0
    for at, unit in units.items():
        if file and count + len(unit) > packs.ENTRIES_PER_PACK_MAX:
            yield file
            file, count = {}, 0
        file[at] = unit
        count += len(unit)
    if file:
        yield file


def _sections(ranks: Sequence[RankTable], file: Iterable[tuple[int, int]]) -> Iterator[Section]:
    starts = [list(accumulate((p.size for p in r.table.packs), initial=0)) for r in ranks]
    for position, pack in file:
        shape = ranks[position].table.packs[pack]
        if shape.size > shape.header:
            start = starts[position][pack] + shape.header
            yield Section(position, start, shape.size - shape.header)


def _place(
    ranks: Sequence[RankTable], file: dict[tuple[int, int], list[_Placed]]
) -> tuple[dict[str, object], list[tuple[_Placed, int]], int]:
    """The entries of a file's header, where each piece lies behind it, and where all of it ends."""
    entries: dict[str, object] = {}
    places: list[tuple[_Placed, int]] = []
    at = base = 0

    def pad(end: int) -> None:
        nonlocal at
        assert end >= at, "pieces overlap in a pack"
        if end > at:
            name = f"{PAD_PREFIX}{len(entries)}"
            entries[name] = {"dtype": "U8", "shape": [end - at], "data_offsets": [at, end]}
            at = end

    for (position, pack), unit in file.items():
        shape = ranks[position].table.packs[pack]
        for placed in unit:
            spec, piece = placed.entry.spec, placed.piece
            pad(base + piece.offset - shape.header)
            name = entry_name(spec.name, spec.shape, piece.box)
            if name in entries:
                raise Unsupported(
                    f"merging the tensors of all ranks: a tensor cannot be called {name!r} beside "
                    f"one called {name.rpartition('[')[0]!r}, whose box has that name. Rename it"
                )
            dtype, lengths = carried_as(spec.dtype, piece.box.lengths, piece.size)
            end = at + piece.size
            entries[name] = {"dtype": dtype, "shape": lengths, "data_offsets": [at, end]}
            places.append((placed, at))
            at = end
        base += shape.size - shape.header
        pad(base)
    return entries, places, at


def _check_overlap(entry: TensorEntry, rows: Sequence[tuple[Piece, int]]) -> None:
    boxes = [piece.box for piece, _ in rows]
    flaw = find_overlap(entry.spec.shape, boxes)
    if flaw is not None:
        raise _flawed(entry, flaw, [(piece.box, f"rank {rank}") for piece, rank in rows])


def _flawed(entry: TensorEntry, flaw: Flaw, rows: Sequence[tuple[Box, str]]) -> Mismatch:
    spec = entry.spec
    what = f"merging the pieces of {spec.name!r} ({spec.dtype}, shape {spec.shape}): "
    if flaw.members:
        (one, who), (two, other) = (rows[index] for index in flaw.members)
        return Mismatch(
            f"{what}overlap: {who} wrote {box_text(one)} and {other} wrote {box_text(two)}, both "
            f"have {box_text(flaw.box)}. Give different tensors different names on all ranks"
        )
    listed = [f"{who} wrote {box_text(box)}" for box, who in rows[:_LISTED_MAX]]
    more = f" and {len(rows) - _LISTED_MAX} more" if len(rows) > _LISTED_MAX else ""
    return Mismatch(
        f"{what}hole: nobody wrote {box_text(flaw.box)}; {', '.join(listed)}{more}. "
        f"All ranks that hold some of it must save it, under the same name"
    )
