"""The bytes of one slot on their way to the disk: digested and written at the same time, and while
they still arrive; a record packed, where that pays."""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from everstep.errors import Corrupt
from everstep.format.manifest import Part
from everstep.format.packed import Chunk, raw_chunks
from everstep.format.packs import pack_starts
from everstep.format.tables import Extent, FileLink, Table, decode_table, extents
from everstep.keeper.arena import Row
from everstep.keeper.arrival import Arrival
from everstep.keeper.job import Job, Writer
from everstep.keeper.pack import Packed, pays, write_packed
from everstep.store import commit, names
from everstep.store.names import CheckpointName

_SHARE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A piece table, and what is made of it for every slot that has it."""

    table: Table
    extents: list[Extent]
    chunks: list[Chunk]


class Data:
    """One slot's image as packs, and what becomes of them. For the session's thread."""

    def __init__(self, writer: Writer, job: Job, row: Row, is_record: bool) -> None:
        """Raises Corrupt where the image is not what its table says; Unsupported where the trainer
        gives the slot up."""
        self.document = job.arena.table(job.slot, row)
        self._written: list[commit.NewPack] = []
        self._seconds = 0.0
        self._writer = writer
        self._arrival = job.arrival
        self._parsed = _parse(bytes(self.document))
        sizes = [pack.size for pack in self._parsed.table.packs]
        if sum(sizes) != row.image_size:
            raise Corrupt(
                f"reading slot {job.slot} of the arena: {row.image_size} bytes, its table needs "
                f"{sum(sizes)}"
            )
        self._image = job.arena.image(job.slot)[: row.image_size]
        self._packs = [
            self._image[start : start + size]
            for start, size in zip(pack_starts(sizes), sizes, strict=True)
        ]
        self._packed: Packed | None = None
        self._waited = 0.0
        self._entropy = writer.speed.is_slow
        self._packs_it = is_record and pays(
            self._image, self._parsed.chunks, self._arrival, self._entropy
        )
        self._shares: list[Future[dict[int, str]]] = []
        if not self._packs_it:
            self._shares = self._begin_digests()

    def write(self, name: CheckpointName) -> None:
        """Write the files of a checkpoint; they are durable after `sync`, and when the entries of
        `links` are."""
        writer, began = self._writer, time.monotonic()
        if self._packs_it:
            self._packed = write_packed(
                writer.disk,
                name,
                self._image,
                self._parsed.chunks,
                self._arrival,
                writer.hasher,
                self._entropy,
            )
            self._written, self._seconds = [self._packed.pack], self._packed.seconds
        else:
            self._written = commit.begin_packs(writer.disk, name, self._packs, self._await)
            self._seconds = time.monotonic() - began - self._waited

    def sync(self) -> None:
        """Make the bytes durable."""
        began = time.monotonic()
        commit.sync_packs(self._writer.disk, self._written)
        seconds = self._seconds + (0.0 if self._packed else time.monotonic() - began)
        self._writer.speed.note(self.size, seconds)

    def discard(self, name: CheckpointName, others: tuple[FileLink, ...] = ()) -> None:
        """Nothing came of it: its files are deleted, and `others` of the same checkpoint."""
        for pack in self._written:
            pack.file.abandon()
        commit.discard_packs(self._writer.disk, name, self.links + others)

    @property
    def links(self) -> tuple[FileLink, ...]:
        """The files."""
        return tuple(pack.link for pack in self._written)

    @property
    def size(self) -> int:
        """Bytes written."""
        return sum(link.size for link in self.links)

    def _await(self, count: int) -> None:
        """For the copy, whose time is not the disk's."""
        began = time.monotonic()
        self._arrival.wait(count)
        self._waited += time.monotonic() - began

    def part(self, step: int) -> Part | None:
        """What the manifest says of them, written or not; blocks until all is digested. None for a
        record that would have been packed, and was not written."""
        table = commit.table_link(self.document)
        if packed := self._packed:
            return Part(0, table, self.links, packed.digests, step, packed.stored)
        if self._packs_it:
            return None
        found = {
            index: digest for share in self._shares for index, digest in share.result().items()
        }
        digests = tuple(found[index] for index in range(len(found)))
        unwritten = tuple(FileLink(f"{names.DATA}/unwritten", len(pack)) for pack in self._packs)
        return Part(0, table, self.links or unwritten, digests, step)

    def _begin_digests(self) -> list[Future[dict[int, str]]]:
        """Hash all extents in several threads, in the order in which they arrive.

        Training that uses all cores waits for its slowest thread: what is taken evenly from all of
        them costs less than what is taken from one.
        """
        starts = pack_starts(pack.size for pack in self._parsed.table.packs)
        shares: dict[int, list[tuple[int, int, int]]] = {}
        for extent in self._parsed.extents:
            start = starts[extent.pack] + extent.offset
            shares.setdefault(start // _SHARE_BYTES, []).append((extent.digest, start, extent.size))
        return [
            self._writer.hasher.submit(_digest, self._image, share, self._arrival)
            for _, share in sorted(shares.items())
        ]


def _digest(
    image: memoryview, share: list[tuple[int, int, int]], arrival: Arrival
) -> dict[int, str]:
    """The digests of some extents (index, start, size), by index. Large ones without the GIL."""
    arrival.wait(max(start + size for _, start, size in share))
    return {
        index: xxhash.xxh3_128_hexdigest(image[start : start + size])
        for index, start, size in share
    }


@lru_cache(maxsize=4)
def _parse(document: bytes) -> _Parsed:
    """Tables change rarely, and parsing one of 10,000 tensors outlasts the rest of a commit."""
    table = decode_table(document, "a piece table in the arena")
    return _Parsed(table, extents(table), raw_chunks(table))
