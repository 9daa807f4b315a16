"""The rolling digest: in each record, one K-th of the bytes that its updates came to.

What belongs to one part of the state (an optimizer's parameters and their state, or what a rule
derives) is one row of bytes, cut into K slices. A record has the digest of one slice, the next
record that of the next. What goes astray once stays astray, so that K records in a row prove all.

    step          t       t+1      t+2      t+3
    slice        0..¼     ¼..½     ½..¾     ¾..1      K = 4
    replay to t+3, and the digest of t+2 differs: what came after t+2-K is not proven

The digest of what lies on the CPU is XXH3-128. That of what lies on a GPU is a sum of its bytes, as
numbers of 64 bits, each multiplied by an odd number that depends on its place: it wraps, goes by no
order, and needs no synchronisation.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import xxhash

from everstep.format.packs import in_groups
from everstep.sharding.leaves import Leaf
from everstep.sharding.ranked import own_name, unowned
from everstep.state.fingerprint import Fingerprint

DIGEST_OWNER = -2
"""Owns the digests among a record's leaves: they are copied when they have been made, and no update
is held for that."""

DERIVED_OWNER = -3
"""Owns what rules derive, as far as digests go."""

PREFIX = "@0!digest"
"""Begins their names: `@0!digest.<part>` for the CPU, `@0!digest!<n>.<part>` for the n-th GPU of
those that have any of it; then, of several, comes the rank."""

BYTES_PER_S = 2.5e7
"""Digested for each second of a step: at 2 GB/s, as beside training that fills the memory's
bandwidth (alone it is 12), that is a little over one percent of one core."""
TENSOR_BYTES = 32 << 10
"""So many are digested in the time that it takes to come to another tensor."""
STEP_S = 0.01
"""Where nobody knows yet how long a step takes."""
COUNT_MAX = 1000
BLOCK_BYTES = 8 << 20
"""Of a GPU's slice, as much is digested at once: its weights and products take memory."""

_HEAD = struct.Struct("<QQ16s")
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # Fibonacci hashing, as a signed number


def count_for(tensors: Iterable[torch.Tensor], step_s: float) -> int:
    """K, for these in all and steps of that length (0: not known yet)."""
    size = sum(tensor.nbytes + TENSOR_BYTES for tensor in tensors)
    return min(COUNT_MAX, max(1, -int(-size // (BYTES_PER_S * (step_s or STEP_S)))))


class RollingDigests:
    """Of some parts of the state on this rank. For the thread that trains."""

    def __init__(
        self, owners: Mapping[str, int], rank: int | None = None, *, is_full: bool = False
    ) -> None:
        """`owners`: whose updates have to wait for the digest of each part. `rank`: of several.
        `is_full`: digest all at each update."""
        self._owners = owners
        self._rank = rank
        self._is_full = is_full
        self._rows: dict[str, Rows] = {}
        self._count = 1
        self._turn = 0

    def set(self, parts: Mapping[str, Sequence[torch.Tensor]], step_s: float) -> None:
        """What is digested from now on, so much at a time that it goes unseen beside a step of
        `step_s`: plain tensors, in an order that is the same at a replay on this layout."""
        self._rows = {part: Rows.of(tensors) for part, tensors in parts.items()}
        found = chain.from_iterable(parts.values())
        self._count = 1 if self._is_full else count_for(found, step_s)

    @torch.inference_mode(False)  # another thread writes to what is made here
    def next(self, fingerprints: Mapping[str, Fingerprint]) -> "list[Slice]":
        """The next slice of each part. `fingerprints`: of its tensors, taken when the update was
        made."""
        number, self._turn = self._turn % self._count, self._turn + 1
        return [
            Slice(part, rows, self._owners[part], number, self._count, self._rank, fingerprint)
            for part, rows in self._rows.items()
            for fingerprint in [fingerprints[part].in_place()]
        ]


class Slice:
    """What one record's digest is of. Made by the thread that trains, digested by the one that
    copies, for which the next update waits."""

    def __init__(
        self,
        part: str,
        rows: "Rows",
        owner: int,
        number: int,
        count: int,
        rank: int | None,
        fingerprint: Fingerprint,
    ) -> None:
        self.owner = owner
        self._fingerprint = fingerprint
        self._rows = rows
        self._number, self._count = number, count
        self._head = torch.empty(_HEAD.size, dtype=torch.uint8, device="cpu")
        self._sums = {
            device: torch.empty(1, dtype=torch.int64, device=device) for device in rows.on_gpus
        }
        named = {f"{PREFIX}.{part}": self._head}
        for position, found in enumerate(self._sums.values()):
            named[f"{PREFIX}!{position}.{part}"] = found.view(torch.uint8)
        self.leaves = tuple(
            Leaf(name if rank is None else own_name(name, rank), tensor, DIGEST_OWNER)
            for name, tensor in named.items()
        )

    @property
    def devices(self) -> set[torch.device]:
        """The GPUs on which something is to be digested."""
        return set(self._sums)

    def enqueue_on(self, device: torch.device) -> None:
        """Enqueue the digest of what lies there on the current stream; before `digest`."""
        if device in self._sums:
            pieces = self._rows.on_gpus[device].cut(self._number, self._count)
            self._sums[device].copy_(_sum(pieces, device))

    def digest(self) -> None:
        """Digest what lies on the CPU; blocks, without the GIL. Where somebody has written to the
        tensors since the update, the digest says nothing: K is 0."""
        digest = digest_of(self._rows.on_cpu.cut(self._number, self._count))
        count = 0 if self._fingerprint.changed() else self._count
        head = _HEAD.pack(count, self._number, digest)
        self._head.copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))


def known_digests(
    tensors: Mapping[str, torch.Tensor], rank: int | None
) -> dict[str, list[torch.Tensor]]:
    """Of a record's tensors the digests that a rank (None: the only one) made of each part: the
    CPU's first, then those of its GPUs."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        own = unowned(name)
        if name.startswith(PREFIX) and name == (own if rank is None else own_name(own, rank)):
            place, _, part = own.partition(".")
            found.setdefault(part, {})[place] = tensor
    return {part: [own[place] for place in sorted(own)] for part, own in found.items()}


def differs(known: Sequence[torch.Tensor], leaves: Sequence[Leaf]) -> tuple[int, list[str]] | None:
    """Returns K, and the names of the tensors on the CPU that have bytes in the slice, where they
    have other bytes than the run had, as far as the digests of one slice tell; else None. So where
    they lie on other kinds of devices. Waits for the device. Raises ValueError and struct.error
    for what is no digest."""
    count, number, digest = _HEAD.unpack(bytes(known[0].tolist()))
    if count == 0:
        return None
    if not number < count <= COUNT_MAX:
        raise ValueError(f"slice {number} of {count} is none")
    rows = Rows.of(leaf.tensor for leaf in leaves)
    if len(rows.on_gpus) != len(known) - 1:
        return None
    is_same = digest_of(rows.on_cpu.cut(number, count)) == digest
    for (device, row), then in zip(rows.on_gpus.items(), known[1:], strict=True):
        now = _sum(row.cut(number, count), device).cpu()
        is_same &= now.view(torch.uint8).equal(then.cpu())
    if is_same:
        return None
    names = [leaf.name for leaf in leaves if leaf.tensor.is_cpu and leaf.tensor.numel()]
    return count, [names[index] for index, *_ in rows.on_cpu.spans(number, count)]


class Row:
    """Tensors of one device as one row of bytes."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._ends = list(accumulate(tensor.nbytes for tensor in tensors))

    @property
    def size(self) -> int:
        """In bytes."""
        return self._ends[-1] if self._ends else 0

    def cut(self, number: int, count: int) -> list[torch.Tensor]:
        """The elements of one slice, in pieces of one dim."""
        spans = self.spans(number, count)
        return [_flat(self._tensors[index], first, last) for index, first, last in spans]

    def spans(self, number: int, count: int) -> list[tuple[int, int, int]]:
        """Of which tensors a slice has which elements; one that is cut through belongs to the
        next."""
        begin, end = self.size * number // count, self.size * (number + 1) // count
        found = []
        for index in range(bisect_right(self._ends, begin), len(self._tensors)):
            tensor = self._tensors[index]
            start = self._ends[index] - tensor.nbytes
            if start >= end:
                break
            first = max(0, begin - start) // tensor.itemsize
            last = min(tensor.nbytes, end - start) // tensor.itemsize
            if first < last:
                found.append((index, first, last))
        return found


class Rows(NamedTuple):
    """By device; GPUs in the order in which they first come."""

    on_cpu: Row
    on_gpus: dict[torch.device, Row]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> "Rows":
        """Of tensors, in their order."""
        found: dict[torch.device, list[torch.Tensor]] = {torch.device("cpu"): []}
        for tensor in tensors:
            if tensor.numel():
                found.setdefault(tensor.device, []).append(tensor.detach())
        rows = {device: Row(members) for device, members in found.items()}
        return cls(rows.pop(torch.device("cpu")), rows)


def _flat(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """These elements in row-major order: a view where they lie so, else a copy of few more."""
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        width = tensor.numel() // tensor.shape[0]
        top = first // width
        tensor = tensor[top : -(-last // width)].contiguous()
        first, last = first - top * width, last - top * width
    return tensor.view(-1)[first:last]


def digest_of(pieces: Iterable[torch.Tensor]) -> bytes:
    """XXH3-128 of pieces on the CPU; releases the GIL."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece.view(torch.uint8).numpy().data)
    return digest.digest()


def _sum(pieces: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The weighted sum of their bytes, one element on the device."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    parts = (part for piece in pieces for part in piece.view(torch.uint8).split(BLOCK_BYTES))
    blocks = in_groups(((part, len(part)) for part in parts), BLOCK_BYTES)
    for number, block in enumerate(blocks):
        numbers = torch.cat([*block, block[0].new_zeros(-sum(map(len, block)) % 8)])
        numbers = numbers.view(torch.int64)
        places = torch.arange(len(numbers), dtype=torch.int64, device=device)
        weights = (places + number * (BLOCK_BYTES // 4)) * _ODD | 1
        total += (numbers * weights).sum()
    return total
