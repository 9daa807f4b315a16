"""Packs: safetensors files laid out for direct I/O (docs/format.md, section 7), computed before a
byte is written.

Large pieces come first and start on a page; small ones follow by falling item size, so that each
lies on a multiple of its own item size. Gaps are entries of zero bytes: safetensors allows no
holes. A header depends only on names, dtypes, shapes: it stays the same from step to step.

What seems not to change (frozen weights) lies in packs of its own, which come last: `still`. Where
all bytes of one are those of an earlier checkpoint, the manifest names that one's file. So do
tensors that are saved in turn, by their turns; the manifest names the file of their last one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import TypeVar

from everstep.errors import Unsupported
from everstep.format.boxes import Box
from everstep.format.dtypes import ITEM_SIZES, carried_as

PAGE_BYTES = 4096
ALIGNED_FROM_BYTES = 1 << 20
CHUNK_BYTES = 4 << 20
ENTRIES_PER_PACK_MAX = 1 << 16
PAD_PREFIX = "__pad__."

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor as the format sees it: its name, logical dtype (torch's name) and global shape;
    and which box of it this is about, None: all of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The shape of its box."""
        return self.shape if self.box is None else self.box.lengths

    @property
    def size(self) -> int:
        """Bytes of the raw elements of its box."""
        return ITEM_SIZES[self.dtype] * prod(self.lengths)

    @property
    def entry(self) -> str:
        """What its box is called in the header of a pack."""
        return self.name if self.box is None else entry_name(self.name, self.shape, self.box)


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a box of a tensor lies: `size` stored bytes at `offset` of pack number `pack`.

    `digest` is the index of its first digest in the part's list; one digest per 4 MiB chunk
    of the stored bytes, at least one.
    """

    box: Box
    pack: int
    offset: int
    size: int
    digest: int


@dataclass(slots=True)
class Entries:
    """What the header of a pack says of its data section, which is filled from its start."""

    rows: dict[str, object] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, dtype: str, lengths: tuple[int, ...], size: int) -> int:
        """An entry of `size` bytes; where it begins."""
        start, self.size = self.size, self.size + size
        carried, shape = carried_as(dtype, lengths, size)
        self.rows[name] = {"dtype": carried, "shape": shape, "data_offsets": [start, self.size]}
        return start

    def pad(self, end: int) -> None:
        """Fill up to there."""
        gap = end - self.size
        assert gap >= 0, "pieces overlap in a pack"
        if gap:
            self.add(f"{PAD_PREFIX}{len(self.rows)}", "uint8", (gap,), gap)

    def encode(self) -> bytes:
        """The header, a multiple of 4096 bytes: length, JSON, blanks."""
        text = json.dumps(self.rows, separators=(",", ":"), ensure_ascii=False).encode()
        size = round_up(8 + len(text))
        return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


@dataclass(frozen=True, slots=True)
class PackShape:
    """A pack as its table has it: file size, size of the header, index of the header's digest,
    whether a file of an earlier checkpoint may have it: as it seems not to change, or is saved at
    some steps, with all of the same `turn`."""

    size: int
    header: int
    digest: int
    still: bool = False
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """All packs of one part with their headers (length and blanks included), and the piece of each
    tensor, in the order of `specs`."""

    specs: tuple[Spec, ...]
    pieces: tuple[Piece, ...]
    packs: tuple[PackShape, ...]
    headers: tuple[bytes, ...]
    digest_count: int

    @property
    def size(self) -> int:
        """Bytes of all packs."""
        return sum(pack.size for pack in self.packs)


def entry_name(name: str, shape: tuple[int, ...], box: Box) -> str:
    """What a box of a tensor is called in the header of a pack: as the tensor, if it is whole."""
    return name if box.lengths == shape else f"{name}{box}"


def round_up(value: int, multiple: int = PAGE_BYTES) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def chunks(size: int) -> list[tuple[int, int]]:
    """(start, length) of the chunks of a piece of `size` bytes; an empty piece has an empty one."""
    return [chunk_at(size, index) for index in range(chunk_count(size))]


def chunk_at(size: int, index: int) -> tuple[int, int]:
    """(start, length) of that one."""
    start = index * CHUNK_BYTES
    return start, min(CHUNK_BYTES, size - start)


def chunk_count(size: int) -> int:
    """How many digests a piece of `size` stored bytes has."""
    return max(1, -(-size // CHUNK_BYTES))


def in_groups(rows: Iterable[tuple[T, int]], most: int) -> list[list[T]]:
    """What has these sizes, in groups of at most so much, but for what is larger alone."""
    groups: list[list[T]] = []
    filled = 0
    for item, size in rows:
        if not groups or filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    return groups


def pack_starts(sizes: Iterable[int]) -> list[int]:
    """Where each pack begins in an image, which holds one after the other."""
    return list(accumulate(sizes, initial=0))[:-1]


def lay_out(
    specs: Sequence[Spec],
    still: Mapping[str, int] = MappingProxyType({}),
    turns: Mapping[str, int] = MappingProxyType({}),
) -> Layout:
    """Place every tensor, or its box, into packs; those whose entries are `still`, by groups, and
    those of each of the `turns` (both from 1 on), into packs of their own. Pure and deterministic:
    same specs, same bytes.

    Raises Unsupported for names that cannot stand in a safetensors header.
    """
    _check_names(specs)
    pieces: list[Piece | None] = [None] * len(specs)
    packs: list[PackShape] = []
    headers: list[bytes] = []
    digest = 0
    for kind, members in _members(specs, still, turns):
        entries = Entries()
        offsets = [_place(entries, specs[i]) for i in members]
        entries.pad(round_up(entries.size))
        header = entries.encode()
        header_digest, digest = digest, digest + 1
        for i, offset in zip(members, offsets, strict=True):
            size = specs[i].size
            box = specs[i].box or Box.whole(specs[i].shape)
            pieces[i] = Piece(box, len(packs), len(header) + offset, size, digest)
            digest += chunk_count(size)
        packs.append(PackShape(len(header) + entries.size, len(header), header_digest, *kind))
        headers.append(header)
    placed = tuple(piece for piece in pieces if piece is not None)
    return Layout(tuple(specs), placed, tuple(packs), tuple(headers), digest)


def _members(
    specs: Sequence[Spec], still: Mapping[str, int], turns: Mapping[str, int]
) -> Iterator[tuple[tuple[bool, int], list[int]]]:
    """Which specs lie in each pack, whether it is a still one, and its turn."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i in sorted(range(len(specs)), key=lambda i: _rank(specs[i])):
        entry = specs[i].entry
        group = still.get(entry, 0)
        groups.setdefault((0 if group else turns.get(entry, 0), group), []).append(i)
    for (turn, group), members in sorted(groups.items()):
        for first in range(0, len(members), ENTRIES_PER_PACK_MAX):
            yield (turn + group > 0, turn), members[first : first + ENTRIES_PER_PACK_MAX]


def _check_names(specs: Sequence[Spec]) -> None:
    assert len({spec.entry for spec in specs}) == len(specs), "names are unique"
    for spec in specs:
        if spec.name == "__metadata__" or spec.name.startswith(PAD_PREFIX):
            raise Unsupported(
                f"a tensor cannot be called {spec.name!r}: safetensors files and everstep use that "
                f"name themselves. Rename it"
            )
        try:
            spec.name.encode()
        except UnicodeEncodeError as error:
            raise Unsupported(f"a tensor cannot be called {spec.name!r}: {error}") from error


def _rank(spec: Spec) -> tuple[bool, int, str]:
    large = spec.size >= ALIGNED_FROM_BYTES
    return (not large, 0 if large else -ITEM_SIZES[spec.dtype], spec.entry)


def _place(entries: Entries, spec: Spec) -> int:
    """Where the box begins in the data section."""
    offset = entries.add(spec.entry, spec.dtype, spec.lengths, spec.size)
    if spec.size >= ALIGNED_FROM_BYTES:
        entries.pad(round_up(entries.size))
    return offset
