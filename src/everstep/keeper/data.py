"""The bytes of one part on their way to the disk: digested and written at the same time, and while
they still arrive; encoded, where that pays.

They are an image, the packs as they will lie on the disk, in the memory in which they arrive:

    one rank      the slot's image itself
    several       a header for all, then the data of each rank's packs, straight from its slot

So any number of ranks and tensors becomes a few large files, and nothing is copied to that end.
A still pack is digested before it is written, as another file may have it (still.py).

A packed part's chunks are encoded as they arrive, in several threads, and written in order. Which
tensors are, the writer's encoder decides for each part anew (encoder.py).
"""

import mmap
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import cycle
from secrets import token_hex
from typing import NamedTuple

from everstep.codecs.codec import DIFFERENCE, master_of
from everstep.errors import Corrupt
from everstep.format.document import digest_of
from everstep.format.manifest import CheckpointName, Encoded, Part, Previous
from everstep.format.merge import Merged
from everstep.format.packed import HEADER_BYTES, header, raw_chunks
from everstep.format.packs import in_groups, pack_starts, round_up
from everstep.format.tables import Extent, FileLink, Table, decode_table, extents
from everstep.keeper.encoder import Base, Encoding
from everstep.keeper.job import Job
from everstep.keeper.still import Content, Seen, contents
from everstep.keeper.writer import Writer
from everstep.store import commit, names
from everstep.tiers.bucket import Upload
from everstep.tiers.files import NewFile

BUFFER_BYTES, BUFFERS = 4 << 20, 3
_AHEAD_BYTES = 16 << 20
"""Of chunks that are encoded before they are written."""

_SHARE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Parsed:
    """A piece table, and what is made of it for every part that has it."""

    document: bytes
    table: Table
    extents: list[Extent]
    chunks: list[Extent]

    @classmethod
    def of(cls, document: bytes, table: Table) -> "Parsed":
        """Everything that follows from a table."""
        return cls(document, table, extents(table), raw_chunks(table))


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a pack: its memory, and the job that says when bytes of it are there (None: they
    are), `base` being where it begins in what arrives."""

    view: memoryview
    job: Job | None = None
    base: int = 0

    def wait(self, end: int) -> None:
        """Block until the first `end` bytes are there. Raises Unsupported."""
        if self.job:
            self.job.wait(self.base + end)


@dataclass(slots=True)
class Image:
    """All packs of one part. For the keeper's threads."""

    parsed: Parsed
    packs: Sequence[Sequence[Segment]]
    _starts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._starts = [pack_starts(len(each.view) for each in pack) for pack in self.packs]

    def view(self, extent: Extent) -> memoryview:
        """Bytes that lie in one segment, as those of a header and of a piece do; blocks until they
        are there. Raises Unsupported where they never will be."""
        starts = self._starts[extent.pack]
        at = max(0, bisect_right(starts, extent.offset) - 1) if len(starts) > 1 else 0
        segment, start = self.packs[extent.pack][at], extent.offset - starts[at]
        segment.wait(start + extent.size)
        return segment.view[start : start + extent.size]

    def wait(self, pack: int, end: int) -> None:
        """Block until the first `end` bytes of a pack are there. Raises Unsupported."""
        for segment, start in zip(self.packs[pack], self._starts[pack], strict=True):
            if segment.job and start < end:
                segment.wait(min(len(segment.view), end - start))


def whole(job: Job) -> Image:
    """The image of one slot, as its table says. Raises Corrupt."""
    parsed = parse(job.table)
    sizes = [pack.size for pack in parsed.table.packs]
    view = job.image
    _check_size(view, sum(sizes), job)
    packs = [
        [Segment(view[start : start + size], job, start)]
        for start, size in zip(pack_starts(sizes), sizes, strict=True)
    ]
    return Image(parsed, packs)


def gathered(jobs: Sequence[Job], merged: Merged, parsed: Parsed) -> Image:
    """The images of several ranks' slots as one part. Raises Corrupt."""
    packs = []
    for first, sections in zip(merged.headers, merged.sections, strict=True):
        pack = [Segment(_aligned(first))]
        for rank, start, size in sections:
            view = jobs[rank].image[start : start + size]
            _check_size(view, size, jobs[rank])
            pack.append(Segment(view, jobs[rank], start))
        packs.append(pack)
    return Image(parsed, packs)


@lru_cache(maxsize=16)
def parse(document: bytes) -> Parsed:
    """Tables change rarely, and parsing one of 10,000 tensors outlasts the rest of a commit."""
    return Parsed.of(document, decode_table(document, "a piece table in the arena"))


def _check_size(view: memoryview, size: int, job: Job) -> None:
    if len(view) != size:
        raise Corrupt(
            f"reading slot {job.slot} of the arena: {len(view)} bytes, its table needs {size}"
        )


@lru_cache(maxsize=4)
def _aligned(header: bytes) -> memoryview:
    """In page-aligned memory, from which it can be written directly."""
    memory = mmap.mmap(-1, len(header))
    memory[:] = header
    return memoryview(memory)


class Data:
    """One part's image as packs, and what becomes of them. For the team's thread."""

    def __init__(
        self,
        writer: Writer,
        image: Image,
        is_record: bool,
        link_bytes_per_s: float | None = None,
        base: Base | None = None,
        kept: Part | None = None,
        turns: Container[int] = (),
    ) -> None:
        """`link_bytes_per_s`: of the slowest tier that it goes to. `base`: what chunks may be
        differences to. `kept`: has the packs of these `turns`, of which the image has
        nothing. Raises Unsupported where a trainer gives its slot up."""
        self.document = image.parsed.document
        self._written: dict[int, tuple[FileLink, NewFile | Upload]] = {}
        """By the number of the pack; no file is durable before it is finished."""
        self._links: dict[int, FileLink] = {}
        self._known: dict[int, Stored] = {}
        """What lies behind digests, but for those that are still made."""
        shapes = image.parsed.table.packs
        if kept:
            self._links = {n: kept.packs[n] for n, pack in enumerate(shapes) if pack.turn in turns}
            rows = (each for each in image.parsed.extents if each.pack in self._links)
            self._known = {e.digest: Stored(e.size, kept.digests[e.digest]) for e in rows}
        self._seconds = 0.0
        self._writer = writer
        self._image = image
        self._is_record = is_record
        self._encoding = writer.encoder.begin(
            self.document,
            image.parsed.chunks,
            image.view,
            link_bytes_per_s,
            is_record=is_record,
            # A copy may be of another step than the master that it is rounded from.
            table=None if is_record or any(each.turn for each in shapes) else image.parsed.table,
            base=base if base and base.document == self.document else None,
        )
        self._shares: list[Future[dict[int, Stored]]] = []
        is_packed = bool(self._encoding.encoders)
        self._moving = {n for n, shape in enumerate(shapes) if is_packed and not shape.still}
        """The packs of which chunks are encoded."""
        self._begin_digests(set(range(len(shapes))) - self._links.keys() - self._moving)

    def write(self, name: CheckpointName) -> None:
        """Write the files of a checkpoint; they are durable after `sync`, and when the entries of
        `new` are. After an error the caller discards them."""
        token = token_hex(4)
        for number in sorted(self._moving):
            self._write_packed(names.pack_path(name, token, number), number)
        began = time.monotonic()
        for number, pack in self._new():
            path = names.pack_path(name, token, number)
            size = sum(map(len, pack))
            with self._writer.disk.new_file(path, size) as file:
                file.fill(pack, partial(self._wait, number))
            self._written[number] = FileLink(path, size), file
        self._links |= {number: link for number, (link, _) in self._written.items()}
        self._seconds += time.monotonic() - began

    def sync(self) -> None:
        """Make the bytes durable. After an error the caller discards them."""
        began = time.monotonic()
        for _, file in self._written.values():
            file.finish()
        self._writer.traffic.wrote(self.size, self._seconds + time.monotonic() - began)

    @contextmanager
    def durable(self, name: CheckpointName) -> Iterator[None]:
        """Write the files of a checkpoint, durably, and keep them if what is done within succeeds:
        else they are deleted."""
        try:
            self.write(name)
            self.sync()
            self._writer.disk.sync_entries([link.path for link in self.new])
            yield
        except BaseException:
            self.discard(name)
            raise

    def discard(self, name: CheckpointName) -> None:
        """Nothing came of it: its files are deleted."""
        for _, file in self._written.values():
            file.abandon()
        commit.discard_packs(self._writer.disk, name, [link.path for link in self.new])

    def _new(self) -> Iterator[tuple[int, list[memoryview]]]:
        """The packs that are to be written raw, by their numbers; of a still one it is known when
        all of it has arrived, and is digested."""
        writer, shapes = self._writer, self._image.parsed.table.packs
        for number, pack in enumerate(self._image.packs):
            if number in self._moving or number in self._links:
                continue
            if shapes[number].still and not shapes[number].turn:
                with self._waiting():
                    content = self._contents[number]
                if link := writer.still.find(writer.disk, content, writer.parent):
                    self._links[number] = link
                    continue
            yield number, [segment.view for segment in pack]

    def _wait(self, pack: int, end: int) -> None:
        with self._waiting():
            self._image.wait(pack, end)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """For the copy, whose time is not the disk's."""
        began = time.monotonic()
        yield
        self._seconds -= time.monotonic() - began

    @cached_property
    def _contents(self) -> dict[int, Content]:
        parsed = self._image.parsed
        return contents(parsed.table, parsed.extents, self._content)

    def note_durable(self) -> Seen:
        """What does not change is named by later checkpoints. Returns what is seen of that."""
        parsed, still = self._image.parsed, self._writer.still
        still.note(self._contents, self._links)
        return still.compare(parsed.document, parsed.table, self._content)

    @property
    def new(self) -> tuple[FileLink, ...]:
        """Those that were written for it."""
        return tuple(link for link, _ in self._written.values())

    @property
    def size(self) -> int:
        """Bytes written."""
        return sum(link.size for link in self.new)

    def part(self, step: int) -> Part:
        """What the manifest says of them, written or not; blocks until all is digested."""
        shapes = self._image.parsed.table.packs
        if self._moving and len(self._links) < len(shapes):  # memory has it raw
            self._begin_digests(self._moving)
            self._moving = set()
        links = tuple(
            self._links.get(number) or FileLink(f"{names.DATA}/unwritten", shape.size)
            for number, shape in enumerate(shapes)
        )
        stored = self._stored()
        digests = tuple(each.digest for each in stored)
        part = Part(0, commit.table_link(self.document), links, digests, step)
        if not self._moving:
            return part
        rows = (Encoded(i, each.codec, each.content) for i, each in enumerate(stored) if each.codec)
        before, lengths = self._before(stored), tuple(each.size for each in stored)
        base = before.name if before else None
        return replace(part, stored=lengths, encoded=tuple(rows), base=base)

    def _before(self, stored: Sequence["Stored"]) -> Base | None:
        is_different = any(each.codec == DIFFERENCE for each in stored)
        return self._encoding.base if is_different else None

    def base(self, name: Previous) -> Base | None:
        """Itself as the base of the next one, where that can want it. It is committed as `name`."""
        if not self._encoding.layout.samples:
            return None
        stored = self._stored()
        contents = {
            index: each.content or each.digest
            for index, each in enumerate(stored)
            if master_of(each.codec) is None
        }
        before = self._before(stored)
        depth = before.depth + 1 if before else 0
        return Base(name, self.document, self._image.view, contents, depth)

    def _stored(self) -> list["Stored"]:
        """What lies behind each digest; blocks until that is known."""
        found = dict(self._known)
        for share in self._shares:
            found |= share.result()
        return [found[index] for index in range(len(found))]

    @cached_property
    def _content(self) -> list[str]:
        """The digests of what is stored raw, and of what the others decode to, where that is known;
        the same of two parts only where their bytes are."""
        return [each.content or each.digest for each in self._stored()]

    def _begin_digests(self, packs: Collection[int]) -> None:
        """Hash all extents of these packs in several threads, in the order in which they arrive.

        Training that uses all cores waits for its slowest thread: what is taken evenly from all of
        them costs less than what is taken from one.
        """
        rows = [(each, each.size) for each in self._image.parsed.extents if each.pack in packs]
        self._shares += [
            self._writer.hasher.submit(_digest, self._image, self._encoding, share)
            for share in in_groups(rows, _SHARE_BYTES)
        ]

    def _write_packed(self, path: str, number: int) -> None:
        """Encode and write all chunks of a pack; the file is not durable yet. Takes BUFFERS and
        _AHEAD_BYTES of memory, whatever the pack's size. Raises what the arrival and the disk
        raise."""
        parsed = self._image.parsed
        chunks = [chunk for chunk in parsed.chunks if chunk.pack == number]
        with self._writer.disk.new_file(path) as file:

            def write(view: memoryview, offset: int) -> None:
                began = time.monotonic()
                file.write(view, offset)
                self._seconds += time.monotonic() - began

            size, first = write_packed(write, self._encoded(chunks))
        self._known[parsed.table.packs[number].digest] = Stored(len(first), digest_of(first))
        self._written[number] = FileLink(path, size), file

    def _encoded(self, chunks: Sequence[Extent]) -> Iterator[bytes | memoryview]:
        """What is stored of these chunks, in order; some are made ahead: of as many bytes as keep
        the threads that encode at work while a buffer is written."""
        waiting: deque[tuple[int, Future[bytes | memoryview]]] = deque()
        ahead = 0
        for chunk in chunks:
            waiting.append((chunk.size, self._writer.hasher.submit(self._encode, chunk)))
            ahead += chunk.size
            while ahead > _AHEAD_BYTES:
                size, task = waiting.popleft()
                ahead -= size
                yield task.result()
        for _, task in waiting:
            yield task.result()

    def _encode(self, chunk: Extent) -> bytes | memoryview:
        """The digest of a state's chunk is that of its raw bytes, too: memory has these, and other
        checkpoints may."""
        raw = self._image.view(chunk)
        self._encoding.look(chunk, raw)
        data, codec = self._encoding.encode(chunk, raw)
        content = digest_of(raw) if codec and not self._is_record else None
        self._known[chunk.digest] = Stored(len(data), digest_of(data), codec, content)
        return data


class Stored(NamedTuple):
    """What lies behind a digest of a packed part. `codec`: None where it is raw; `content`: the
    digest of its raw bytes then, if that is known."""

    size: int
    digest: str
    codec: str | None = None
    content: str | None = None


def _digest(image: Image, encoding: Encoding, share: list[Extent]) -> dict[int, Stored]:
    """What some extents are stored as, raw, by the index of the digest. Large ones are hashed
    without the GIL."""
    found = {}
    for each in share:
        view = image.view(each)
        found[each.digest] = Stored(each.size, digest_of(view))
        if encoding.wanted:
            encoding.look(each, view)
    return found


def write_packed(
    write: Callable[[memoryview, int], None], pieces: Iterable[bytes | memoryview]
) -> tuple[int, bytes]:
    """Write a packed file: these pieces, padded to a whole page, and after all else the header;
    blocks. One buffer is filled while those before it are written, in order, by a thread of its
    own. Returns the file's size, and the header. Raises what writes and pieces raise."""
    at, writes = HEADER_BYTES, deque[Future[None]]()
    buffers = cycle([memoryview(mmap.mmap(-1, BUFFER_BYTES)) for _ in range(BUFFERS)])
    with ThreadPoolExecutor(1, "everstep-tail") as thread:
        for block in blocks_of(pieces, buffers):
            try:
                writes.append(thread.submit(write, block, at))
            except RuntimeError:  # the program ends, and with it all pools; or no thread starts
                _settle(writes, 0)
                thread.shutdown(cancel_futures=True)  # of this write, too: it may have kept it
                write(block, at)
            at += len(block)
            _settle(writes, BUFFERS - 1)
        _settle(writes, 0)
    first = header(at - HEADER_BYTES)
    write(_aligned(first), 0)
    return at, first


def _settle(writes: deque[Future[None]], in_flight: int) -> None:
    while len(writes) > in_flight:
        writes.popleft().result()


def blocks_of(
    pieces: Iterable[bytes | memoryview], buffers: Iterator[memoryview]
) -> Iterator[memoryview]:
    """The same bytes, padded with zeros to a whole page, in these buffers, each of which is filled
    when it is its turn."""
    block, used = next(buffers), 0
    for piece in pieces:
        view = memoryview(piece)
        while view:
            part = min(len(view), len(block) - used)
            block[used : used + part] = view[:part]
            used, view = used + part, view[part:]
            if used == len(block):
                yield block
                block, used = next(buffers), 0
    if used:
        padded = round_up(used)
        block[used:padded] = bytes(padded - used)
        yield block[:padded]
