"""Reads whose every byte is checked against its digest."""

import contextlib
import logging
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from everstep.errors import Corrupt, EverstepError, Missing
from everstep.format.document import digest_of
from everstep.format.manifest import Part
from everstep.format.packed import stored_extents
from everstep.format.packs import PAD_PREFIX
from everstep.format.tables import Extent, FileLink, Table, extents
from everstep.tiers.files import EXTENT_BYTES, Reader, Source
from everstep.tiers.tier import Readable

log = logging.getLogger("everstep")

_READS_IN_FLIGHT = 4


_CACHED_BYTES = 512 << 10
"""What was copied is digested out of a core's cache: a seventh less time than chunk by chunk."""


def check_chunk(view: memoryview, digest: str, where: str) -> None:
    """Raises Corrupt where the bytes do not have that digest. Releases the GIL while it hashes."""
    _check_digest(digest_of(view), len(view), digest, where)


def copy_chunk(source: Source, offset: int, to: memoryview, digest: str, where: str) -> None:
    """Fill it out of memory, and check it there; raises Corrupt. Releases the GIL."""
    found = xxhash.xxh3_128()
    for start in range(0, len(to), _CACHED_BYTES):
        portion = to[start : start + _CACHED_BYTES]
        source.read_into(offset + start, portion)
        found.update(portion)
    _check_digest(found.hexdigest(), len(to), digest, where)


def _check_digest(found: str, size: int, digest: str, where: str) -> None:
    if found != digest:
        raise _other_digest(where, size, found, digest)


def read_chunk(
    sources: Sequence[Source], offset: int, chunk: memoryview, digest: str, where: str
) -> None:
    """Fill it from the first source whose bytes are right; raises what the last one raises."""

    def read(source: Source) -> None:
        if chunk:
            source.read_into(offset, chunk)
        check_chunk(chunk, digest, where)

    from_first(sources, read)


def from_first(sources: Sequence[Source], read: Callable[[Source], None]) -> None:
    """`read` from the first source of which it raises nothing; raises what the last one raises."""
    for number, source in enumerate(sources):
        try:
            read(source)
            return
        except EverstepError as error:
            if number + 1 == len(sources):
                raise
            log.warning("%s; trying the next source", error)


def _other_digest(where: str, size: int, found: str, expected: str) -> Corrupt:
    return Corrupt(
        f"reading {where}: {size} bytes have digest {found}, the manifest says {expected}"
    )


def open_pack(disk: Readable, link: FileLink, direct: bool = False) -> Reader:
    """Open a pack that a manifest names; raises Corrupt where it is gone or of another size."""
    try:
        reader = disk.open(link.path, direct)
    except Missing as error:
        raise Corrupt(f"{error}, but a manifest needs it") from error
    if reader.size == link.size:
        return reader
    reader.close()
    raise _other_size(disk, link, reader.size)


def check_size(disk: Readable, link: FileLink) -> None:
    """Raises Corrupt where `open_pack` would, as far as that shows before it is opened."""
    if (size := disk.size(link.path)) != link.size:
        raise _other_size(disk, link, size)


def _other_size(disk: Readable, link: FileLink, size: int | None) -> Corrupt:
    found = "is not there" if size is None else f"has {size} bytes"
    return Corrupt(f"reading {disk.root / link.path}: it {found}, the manifest says {link.size}")


@contextlib.contextmanager
def opened(disk: Readable, link: FileLink) -> Iterator[Reader]:
    """`open_pack` for as long as this lasts."""
    with contextlib.closing(open_pack(disk, link)) as reader:
        yield reader


def blocks(reader: Reader) -> Iterator[memoryview]:
    """A pack's bytes in order, in new page-aligned memory, while the next ones are being read."""
    if 0 < reader.size <= EXTENT_BYTES:
        yield _read_block(reader, 0, reader.size)
        return
    reads: deque[Future[memoryview]] = deque()
    with ThreadPoolExecutor(_READS_IN_FLIGHT, "everstep-copy") as pool:
        try:
            for offset in range(0, reader.size, EXTENT_BYTES):
                if len(reads) == _READS_IN_FLIGHT:
                    yield reads.popleft().result()
                size = min(EXTENT_BYTES, reader.size - offset)
                reads.append(pool.submit(_read_block, reader, offset, size))
            while reads:
                yield reads.popleft().result()
        finally:
            for each in reads:
                each.cancel()


def _read_block(reader: Reader, offset: int, size: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, size))
    reader.read_into(offset, view)
    return view


class PackCheck:
    """Compares the bytes of a pack, in their order, with digests and zeros. For one thread."""

    def __init__(self, part: Part, index: int, table: Table) -> None:
        """`table`: the part's; `index`: which of its packs."""
        self._link = part.packs[index]
        self._digests = part.digests
        found = extents(table) if part.stored is None else stored_extents(table, part.stored)
        self._runs = list(self._runs_of([each for each in found if each.pack == index]))

    @property
    def expected(self) -> tuple[object, ...]:
        """What the pack is to be: equal only where it is one file with the same bytes."""
        ends = [(end, self._digests[each.digest] if each else None) for end, each in self._runs]
        return self._link, *ends

    def checked(self, reader: Reader) -> Iterator[memoryview]:
        """Hand on a pack block by block. Raises Corrupt, in place of a block, where a chunk that
        ends in it is not what was written."""
        for block, problems in self.examined(reader):
            if problems:
                raise problems[0]
            yield block

    def examined(self, reader: Reader) -> Iterator[tuple[memoryview, list[Corrupt]]]:
        """Each block, and what is wrong with what ends in it. Raises Corrupt where the medium
        cannot read it."""
        digest, start = xxhash.xxh3_128(), 0
        runs = deque(self._runs)
        for block in blocks(reader):
            at, stop = start, start + len(block)
            problems: list[Corrupt] = []
            while runs and at <= stop:
                end, extent = runs[0]
                part = block[at - start : min(end, stop) - start]
                if extent is None:
                    problems += self._flaws_of_padding(part, at)
                else:
                    digest.update(part)
                at += len(part)
                if at < end:
                    break
                if extent is not None:
                    problems += self._flaws_of(extent, digest.hexdigest())
                    digest.reset()
                runs.popleft()
            yield block, problems
            start = stop

    def is_passed_by(self, disk: Readable) -> bool:
        """Whether the tier's pack is as it was written; reads all of it."""
        try:
            with opened(disk, self._link) as reader:
                for _ in self.checked(reader):
                    pass
        except Corrupt:
            return False
        return True

    def _runs_of(self, pack: list[Extent]) -> Iterator[tuple[int, Extent | None]]:
        """Chunks and the padding between them (None), each with the offset of its end."""
        end = 0
        for extent in pack:
            if extent.offset > end:
                yield extent.offset, None
            if extent.offset < end or extent.offset + extent.size > self._link.size:
                raise Corrupt(f"reading {self._link.path}: {extent.what} lies where it cannot be")
            end = extent.offset + extent.size
            yield end, extent
        if end < self._link.size:
            yield self._link.size, None

    def _flaws_of(self, extent: Extent, found: str) -> list[Corrupt]:
        expected = self._digests[extent.digest]
        where = f"{self._link.path} at byte {extent.offset} ({extent.what})"
        return [] if found == expected else [_other_digest(where, extent.size, found, expected)]

    def _flaws_of_padding(self, view: memoryview, at: int) -> list[Corrupt]:
        if bytes(view).count(0) == len(view):
            return []
        said = f"the padding ({PAD_PREFIX}*) from byte {at} on is not all zeros"
        return [Corrupt(f"reading {self._link.path}: {said}")]


Verified = dict[tuple[object, ...], list[Corrupt]]
"""What is wrong with packs that were read, by what they are to be."""


def verify_part(
    disk: Readable, part: Part, table: Table, known: Verified
) -> Iterator[tuple[int, Corrupt | None]]:
    """Read every byte of a part's packs, padding too; but of those that are known.

    Yields (bytes read, what is wrong or None).
    """
    for index, link in enumerate(part.packs):
        try:
            check = PackCheck(part, index, table)
            if check.expected not in known:
                found = known[check.expected] = []
                with opened(disk, link) as reader:
                    for block, problems in check.examined(reader):
                        yield len(block), None
                        found += problems
            yield from ((0, problem) for problem in known[check.expected])
        except Corrupt as error:
            yield 0, error
