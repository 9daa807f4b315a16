"""Stored tensors into their places: out of a checkpoint's packs, whose spans are read in parallel,
or of what a replay came to.

Every chunk is checked: before it is put into its tensor, or there, where it comes out of memory.
Where a nearer source (memory) fails the check, the next (disk) is asked; where all fail, Corrupt is
raised and the tensors are left half filled.
"""

import contextlib
import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from everstep.codecs import codec, difference
from everstep.codecs.rounded import rounded
from everstep.errors import Corrupt
from everstep.format.boxes import Box
from everstep.format.document import digest_of
from everstep.format.global_tensors import Version
from everstep.format.manifest import Part, check_table
from everstep.format.packs import CHUNK_BYTES, PAGE_BYTES
from everstep.format.tables import Table, TensorEntry
from everstep.keeper.arena import Arena
from everstep.restore.deliver import Delivery, address, devices_of, has_overlaps, put
from everstep.restore.plan import Chunks, Span, Target, plan
from everstep.sharding.layout import LocalBox
from everstep.store import catalog
from everstep.store.read import check_chunk, copy_chunk, from_first, read_chunk
from everstep.tiers.files import Source

if TYPE_CHECKING:
    from everstep.restore.choose import Candidate

READS_IN_FLIGHT = min(16, max(8, os.cpu_count() or 8))
"""More than the disk asks for: some of the threads touch new memory meanwhile."""
_COPIES_IN_FLIGHT = min(READS_IN_FLIGHT, os.cpu_count() or 8)
"""Out of memory: a thread more than there are cores only waits."""
_BUFFER_BYTES = CHUNK_BYTES + PAGE_BYTES
_HUGE_PAGE_BYTES = 2 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # of shared memory there are no huge pages
Deliveries = Sequence[Delivery]
Wanted = Mapping[str, tuple[TensorEntry, list[LocalBox]]]
"""Stored tensors by their first names, and where their boxes are to go."""


@dataclass(frozen=True, slots=True)
class MemorySource:
    """A pack in memory, in one stretch after another: in one arena, or in those of several
    ranks. `is_raw`: that of a packed part, which lies raw there."""

    stretches: Sequence[memoryview]
    arenas: Sequence[Arena] = ()
    """In which they lie; where in none, in memory of this process."""
    is_raw: bool = False

    def read_into(self, offset: int, view: memoryview) -> None:
        """A copy within memory; releases the GIL. Raises Corrupt past the end."""
        for stretch in self.stretches:
            part = stretch[offset : offset + len(view)]
            if len(part):
                self._copy(address(part), view[: len(part)])
            view, offset = view[len(part) :], max(0, offset - len(stretch))
        if len(view):
            raise Corrupt("reading from memory: the image is shorter than the manifest says")

    def _copy(self, at: int, to: memoryview) -> None:
        for arena in self.arenas:
            if arena.address <= at < arena.address + arena.size:
                arena.read_into(at - arena.address, to)
                return
        ctypes.memmove(address(to), at, len(to))


ReadBase = Callable[[int, Target], memoryview]
"""The raw bytes of a pack's chunk in the checkpoint before; verified."""


def decode(
    pack: int, target: Target, chunk: memoryview, into: memoryview, where: str, base: ReadBase
) -> None:
    """Write the raw bytes of a chunk to `into`, which has their size. Raises Corrupt, Unsupported,
    and what `base` raises."""
    try:
        if target.codec == codec.DIFFERENCE:
            difference.decode_into(chunk, base(pack, target), target.item_size, into)
        else:
            codec.decode_into(target.codec or "", chunk, target.item_size, into)
    except Corrupt as error:
        raise Corrupt(f"reading {where}: {error}") from error
    if target.content:
        check_chunk(into, target.content, f"what is encoded in {where}")


class Earlier:
    """The part of the same table in the checkpoint to which another one's part has differences. It
    is looked up when the first chunk is wanted. For any thread."""

    def __init__(
        self, candidate: "Candidate", later: Part, table: Table, stack: ExitStack, depth: int = 1
    ) -> None:
        """Files that are opened are closed with the `stack`."""
        self._candidate, self._later, self._table = candidate, later, table
        self._stack, self._depth = stack, depth
        self._lock = threading.Lock()
        self._found: tuple[Chunks, Sequence[Sequence[Source]], Earlier] | None = None

    def read(self, pack: int, target: Target) -> memoryview:
        """The raw bytes that the chunk had there, in memory of their own. Raises Corrupt,
        Unavailable."""
        with self._lock:
            chunks, sources, before = self._found = self._found or self._find()
        here = chunks.again(target)
        where = f"{chunks.part.packs[pack].path} at byte {here.offset} (tensor {here.name!r})"
        stored = memoryview(bytearray(here.size))
        read_chunk(sources[pack], here.offset, stored, here.digest, where)
        if here.codec is None:
            return stored
        raw = memoryview(bytearray(here.raw))
        decode(pack, here, stored, raw, where, before.read)
        return raw

    def _find(self) -> "tuple[Chunks, Sequence[Sequence[Source]], Earlier]":
        disk, base, table = self._candidate.disk, self._later.base, self._later.table
        where = self._later.packs[0].path
        if base is None or self._depth > codec.CHAIN_MAX:
            raise Corrupt(f"reading {where}: there is nothing, or too much, that it differs from")
        parts = catalog.read_behind(disk, base, where).parts
        same = [part for part in parts if part.table == table]
        if len(same) != 1:
            raise Corrupt(f"reading {where}: step {base.step} has no part of {table.path}")
        (part,) = same
        check_table(self._table, part, table.path)
        sources = [self._candidate.files(pack, self._stack) for pack in part.packs]
        before = Earlier(self._candidate, part, self._table, self._stack, self._depth + 1)
        return Chunks(part, self._table), sources, before


class Loader:
    """The threads that read, each with its buffer: kept from part to part of a restore."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(READS_IN_FLIGHT, "everstep-read")
        self._local = threading.local()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        # After an error none may go on filling; else nothing is read any more, and to free the
        # buffers takes a while.
        self._pool.shutdown(wait=failure is not None, cancel_futures=True)

    def load(
        self, candidate: "Candidate", part: Part, table: Table, wanted: Mapping[str, Deliveries]
    ) -> None:
        """Read what a part has of these boxes of tensors; blocks. Raises Corrupt, Unavailable."""
        known = table.tensors
        here = {name: found for name, found in wanted.items() if name in known}
        if not here:
            return
        devices = devices_of(each.items for found in here.values() for each in found)
        with candidate.sources(part) as sources, ExitStack() as stack:
            boxes = ((known[name], [each.box for each in found]) for name, found in here.items())
            left = deque(plan(boxes, part, table))
            is_near = all(isinstance(near, MemorySource) for near, *_ in sources)
            buffer = partial(self._buffer, bool(devices), is_near)
            base = Earlier(candidate, part, table, stack)
            task = _Task(part, sources, here, devices, buffer, base.read, candidate.already)
            for device in devices:
                # Kernels that initialise the tensors may still run, or those of a replay on a
                # stream of its own that used the memory before.
                torch.cuda.synchronize(device)
            count = min(_COPIES_IN_FLIGHT if is_near else READS_IN_FLIGHT, len(left))
            reads = [self._pool.submit(task.read_all, left) for _ in range(count)]
            try:
                for read in reads:
                    read.result()
            finally:
                left.clear()  # after an error none may go on filling
                wait(reads)

    def _buffer(self, pinned: bool, is_near: bool) -> memoryview:
        """This thread's page-aligned buffer."""
        if getattr(self._local, "kind", None) != (pinned, is_near):
            self._local.kind = pinned, is_near
            self._local.buffer = _pinned_buffer() if pinned else _plain_buffer(huge=not is_near)
        buffer: memoryview = self._local.buffer
        return buffer


@dataclass(frozen=True, slots=True)
class _Task:
    part: Part
    sources: Sequence[Sequence[Source]]
    deliveries: Mapping[str, Deliveries]
    devices: set[torch.device]
    buffer: Callable[[], memoryview]
    read_base: ReadBase
    already: Container[str]

    def read_all(self, left: deque[Span]) -> None:
        """What is left, span by span, beside other threads."""
        while True:
            try:
                span = left.popleft()
            except IndexError:
                return
            if not all(each.name in self.already and self._is_there(each) for each in span.targets):
                from_first(self.sources[span.pack], partial(self._read_from, span))

    def _is_there(self, target: Target) -> bool:
        """Whether its bytes are in their place."""
        digest = target.content if target.codec else target.digest
        deliveries = self.deliveries.get(target.name, ())
        if len(deliveries) != 1 or target.copies or digest is None:
            return False
        window = deliveries[0].window(target)
        return window is not None and digest_of(window) == digest

    def _read_from(self, span: Span, source: Source) -> None:
        is_raw = isinstance(source, MemorySource) and source.is_raw
        for each in map(partial(_raw_span, span.pack), span.targets) if is_raw else [span]:
            self._read_span(source, each)

    def _read_span(self, source: Source, span: Span) -> None:
        if isinstance(source, MemorySource) and self._copied(source, span):
            return
        view = self.buffer()[: span.size]
        source.read_into(span.offset, view)
        sent: list[memoryview] = []  # a device copies from it until it is waited for
        try:
            for target in span.targets:
                at = target.offset - span.offset
                chunk = view[at : at + target.size]
                where = self._where(span, target)
                check_chunk(chunk, target.digest, where)
                if target.codec:
                    chunk = self._decoded(span.pack, target, chunk, where)
                sent += self._deliver(target, chunk)
        finally:  # also where a chunk was bad: the buffer is filled again then
            for device in self.devices:
                torch.cuda.current_stream(device).synchronize()

    def _deliver(self, target: Target, chunk: memoryview) -> Iterator[memoryview]:
        """The chunk, and what is rounded from it. Yields what a device may still copy from."""
        copies = ((copy, rounded(chunk, dtype)) for dtype, copy in target.copies)
        for each, raw in ((target, chunk), *copies):
            for delivery in self.deliveries.get(each.name, ()):
                delivery.put(each, raw)
            yield raw

    def _copied(self, source: MemorySource, span: Span) -> bool:
        """Copy a chunk to where it belongs, and check it there: an arena may be adopted by another
        trainer meanwhile. False where it has to be taken apart."""
        target, *others = span.targets
        deliveries = self.deliveries.get(target.name, ())
        if others or len(deliveries) != 1 or target.codec or target.copies:
            return False
        if (window := deliveries[0].window(target)) is None:
            return False
        copy_chunk(source, target.offset, window, target.digest, self._where(span, target))
        return True

    def _where(self, span: Span, target: Target) -> str:
        path = self.part.packs[span.pack].path
        return f"{path} at byte {target.offset} (tensor {target.name!r})"

    def _decoded(self, pack: int, target: Target, chunk: memoryview, where: str) -> memoryview:
        """The raw bytes, in memory of their own: the device may still be copying from what another
        chunk was decoded to."""
        raw = torch.empty(target.raw, dtype=torch.uint8, pin_memory=bool(self.devices))
        view: memoryview = raw.numpy().data
        decode(pack, target, chunk, view, where, self.read_base)
        return view


def _raw_span(pack: int, target: Target) -> Span:
    """The read that brings one chunk from where it lies raw. Raises Corrupt."""
    if target.content is None:
        raise Corrupt(f"reading tensor {target.name!r} from memory: its digest is not known there")
    at, size = target.raw_offset, target.raw
    raw = replace(target, offset=at, size=size, digest=target.content, codec=None)
    return Span(pack, at, size, (raw,))


def _plain_buffer(*, huge: bool) -> memoryview:
    """In huge pages, if wanted and the kernel has them: a direct read into scattered small pages
    becomes many small requests, and takes twice as long on a fast disk. From a source in memory
    little goes through it, and a huge page may take 5 ms where the host has to find it first."""
    region = mmap.mmap(-1, _BUFFER_BYTES + _HUGE_PAGE_BYTES, flags=_PRIVATE)
    with contextlib.suppress(OSError):  # a matter of speed only
        if huge:
            region.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(region)
    start = -address(view) % _HUGE_PAGE_BYTES
    return view[start : start + _BUFFER_BYTES]


def _pinned_buffer() -> memoryview:
    return torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True).numpy().data


def fill(
    candidate: "Candidate", versions: Sequence[Version], wanted: Wanted, loader: Loader
) -> None:
    """Read each tensor as the last of the versions has it; blocks. Raises Corrupt, Unavailable,
    and Mismatch where elements share memory that were different."""
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []

    def delivery(destination: LocalBox) -> Delivery:
        """Bytes go into the destination itself; where they cannot, as it is conjugated or its
        elements share memory, contiguous memory gets them, which is put there at the end."""
        tensor = destination.tensor
        if not (tensor.is_conj() or tensor.is_neg() or has_overlaps(tensor)):
            return Delivery.to(destination)
        contiguous = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        staged.append((tensor.detach(), contiguous))
        return Delivery.to(LocalBox(destination.box, contiguous))

    left = {name: list(map(delivery, found)) for name, (_, found) in wanted.items()}
    for version in reversed(versions):
        names = {name for _, table in version for name in left.keys() & table.tensors.keys()}
        here = {name: left.pop(name) for name in names}
        for part, table in version:
            loader.load(candidate, part, table, here)
    for tensor, contiguous in staged:
        put(tensor, contiguous)
    for device in devices_of(tensor for tensor, _ in staged):
        # whoever uses them may do so on another stream
        torch.cuda.current_stream(device).synchronize()


def gathered(rows: Iterable[tuple[TensorEntry, LocalBox]]) -> Wanted:
    """These boxes of stored tensors, by tensor."""
    found: dict[str, tuple[TensorEntry, list[LocalBox]]] = {}
    for entry, place in rows:
        found.setdefault(entry.spec.name, (entry, []))[1].append(place)
    return found


def boxes_of(wanted: Wanted) -> dict[str, list[Box]]:
    """Those that are wanted of each tensor."""
    return {name: [place.box for place in places] for name, (_, places) in wanted.items()}


def fill_from_live(live: Mapping[str, Sequence[LocalBox]], wanted: Wanted) -> None:
    """Copy what is here already, under any name of the stored tensor; nothing where it is not."""
    for whole, destinations in wanted.values():
        names = (whole.spec.name, *whole.aliases)
        source = next((live[name] for name in names if name in live), ())
        for box, tensor in source:
            for destination in destinations:
                common = box.intersect(destination.box)
                if common and not is_same_memory(tensor, destination.tensor):
                    inside = destination.tensor[common.slices_in(destination.box)]
                    put(inside, tensor.detach()[common.slices_in(box)])


def is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all elements of one are those of the other."""
    alike = (tensor.shape, tensor.stride()) == (other.shape, other.stride())
    return tensor is other or (alike and tensor.data_ptr() == other.data_ptr())
