"""Packing a record: its chunks are encoded as they arrive, in several threads, and written in
order.

Whether that pays is found out for each record anew: by encoding its first large chunk, which costs
a millisecond where nothing can be saved. Planes of zeros are always dropped; to squeeze the rest
takes more time of the processor, and pays only where the disk is slow.
"""

import mmap
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from secrets import token_hex

from everstep.codecs import planes
from everstep.format.document import digest_of
from everstep.format.packed import HEADER_BYTES, Chunk, header
from everstep.format.packs import PAGE_BYTES, round_up
from everstep.format.tables import FileLink
from everstep.keeper.image import Image
from everstep.store import names
from everstep.store.commit import NewPack
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk
from everstep.tiers.files import NewFile

SMALL_BYTES = 64 << 10
BUFFER_BYTES = 8 << 20
SLOW_BYTES_PER_S = 700e6
"""Of the disk, below which entropy coding (2.9 GB/s a core, where it works) pays."""
_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed part, written: its file, and per digest the stored bytes and their digest.
    `seconds`: spent writing, without the encoding."""

    pack: NewPack
    stored: tuple[int, ...]
    digests: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class Speed:
    """What a disk was seen to write, in bytes a second; None until then."""

    bytes_per_s: float | None = None

    def note(self, size: int, seconds: float) -> None:
        """One write; a mean that forgets."""
        if size >= BUFFER_BYTES and seconds > 0:
            seen = size / seconds
            self.bytes_per_s = 0.7 * (self.bytes_per_s or seen) + 0.3 * seen

    @property
    def is_slow(self) -> bool:
        """Whether bytes cost more than the time to squeeze them."""
        return self.bytes_per_s is not None and self.bytes_per_s < SLOW_BYTES_PER_S


def pays(image: Image, entropy: bool) -> bool:
    """Whether this record should be packed; blocks until its first large chunk has arrived."""
    chunks = image.parsed.chunks if len(image.packs) == 1 else ()
    chunk = next((chunk for chunk in chunks if chunk.extent.size >= SMALL_BYTES), None)
    if chunk is None:
        return False
    return planes.encode(_raw(image, chunk), chunk.item_size, entropy=entropy) is not None


def write_packed(
    disk: Disk,
    name: CheckpointName,
    image: Image,
    pool: ThreadPoolExecutor,
    entropy: bool,
) -> Packed:
    """Encode and write all chunks of a part of one pack; the file is not durable yet. Takes
    BUFFER_BYTES and some chunks of memory, whatever the record's size. Raises what the arrival and
    the disk raise."""
    path = names.pack_path(name, token_hex(4), 0)
    chunks = image.parsed.chunks
    stored: dict[int, int] = {}
    digests: dict[int, str] = {}
    with disk.new_file(path) as file:
        tail = _Tail(file)
        waiting: deque[tuple[int, Future[tuple[bytes | memoryview, str]]]] = deque()
        for chunk in [*chunks, None]:
            while waiting and (chunk is None or len(waiting) > _AHEAD):
                index, task = waiting.popleft()
                data, digests[index] = task.result()
                stored[index] = len(data)
                tail.append(data)
            if chunk:
                task = pool.submit(_encode, image, chunk, entropy)
                waiting.append((chunk.extent.digest, task))
        size = tail.finish()
        first = header(size - HEADER_BYTES)
        tail.put_first(first)
    (index,) = set(range(len(chunks) + 1)) - stored.keys()
    stored[index], digests[index] = len(first), digest_of(first)
    order = range(len(stored))
    return Packed(
        NewPack(FileLink(path, size), file),
        tuple(stored[index] for index in order),
        tuple(digests[index] for index in order),
        tail.seconds,
    )


def _raw(image: Image, chunk: Chunk) -> memoryview:
    return image.view(chunk.extent.pack, chunk.extent.offset, chunk.extent.size)


def _encode(image: Image, chunk: Chunk, entropy: bool) -> tuple[bytes | memoryview, str]:
    """The stored bytes of a chunk and their digest."""
    raw = _raw(image, chunk)
    encoded = None
    if len(raw) >= SMALL_BYTES:
        encoded = planes.encode(raw, chunk.item_size, entropy=entropy)
    found = raw if encoded is None else encoded
    return found, digest_of(found)


class _Tail:
    """The file's end in page-aligned memory: full buffers are written, the rest waits."""

    def __init__(self, file: NewFile) -> None:
        self._file = file
        self._map = mmap.mmap(-1, BUFFER_BYTES)
        self._buffer = memoryview(self._map)
        self._used = 0
        self._at = HEADER_BYTES
        self.seconds = 0.0

    def append(self, data: bytes | memoryview) -> None:
        """Copy these bytes to the end."""
        view = memoryview(data)
        while view:
            part = min(len(view), BUFFER_BYTES - self._used)
            self._buffer[self._used : self._used + part] = view[:part]
            self._used, view = self._used + part, view[part:]
            if self._used == BUFFER_BYTES:
                self._flush()

    def finish(self) -> int:
        """Write the rest, padded with zeros to a whole page; the file's size."""
        padded = round_up(self._used)
        self._buffer[self._used : padded] = bytes(padded - self._used)
        self._used = padded
        self._flush()
        return self._at

    def put_first(self, first: bytes) -> None:
        """Write the file's first page."""
        assert len(first) == PAGE_BYTES
        self._buffer[:PAGE_BYTES] = first
        self._file.write(self._buffer[:PAGE_BYTES], 0)

    def _flush(self) -> None:
        began = time.monotonic()
        if self._used:
            self._file.write(self._buffer[: self._used], self._at)
        self.seconds += time.monotonic() - began
        self._at, self._used = self._at + self._used, 0
