"""Streams on their way to the store: written by the trainer itself, in bounded memory, before the
checkpoint that names them is sealed.

Memory: the piece that is given, and one buffer. What is immutable is read by a thread of its own,
while training goes on; what has been begun before the next save is waited for there, not begun
again.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from everstep.errors import EverstepError, Unavailable, Unsupported
from everstep.format.boxes import Box
from everstep.format.document import digest_of
from everstep.format.manifest import CheckpointName, Part, Stream
from everstep.format.packed import HEADER_BYTES
from everstep.format.packs import PackShape, Piece, Spec, chunks
from everstep.format.streams import BUFFER, NOTHING, TENSOR, encode_part, row_name
from everstep.format.tables import FileLink, Table, TensorEntry, seal_table
from everstep.keeper.data import write_packed
from everstep.sharding.leaves import bytes_of, dtype_name
from everstep.state.streams import StreamState
from everstep.store import catalog, commit, names
from everstep.tiers.tier import Tier


class Streams:
    """All streamed parts of a state. For the thread that trains."""

    def __init__(self, disk: Tier, parts: Iterable[StreamState]) -> None:
        self._disk = disk
        self._parts = list(parts)
        self._pool = ThreadPoolExecutor(1, "everstep-stream")
        self._looked = (-1, 0)

    def take(self, step: int, epoch: int | None, failures: int) -> dict[str, Future[Stream]]:
        """Where the content of each is, or will be: what the store has is named, what it has not is
        written. Blocks for what may change. `epoch`: None where it is not claimed yet. `failures`:
        of saves so far: after one, and after a restore, it is looked whether files are (still)
        there. Raises what `stream()` does; what the disk does is in the future."""
        now = failures, sum(part.loads for part in self._parts)
        if now != self._looked:
            self._looked = now
            self._forget_absent()
        return {part.name: self._take(part, step, epoch) for part in self._parts}

    def _forget_absent(self) -> None:
        for part in self._parts:
            found = part.known and part.known[1]
            if found and found.done():
                files = () if found.exception() else found.result().files
                is_there = all(self._disk.size(link.path) == link.size for link in files)
                part.known = part.known if files and is_there else None

    def _take(self, part: StreamState, step: int, epoch: int | None) -> Future[Stream]:
        version = part.version
        if part.known and part.known[0] == version:
            return part.known[1]
        name = CheckpointName(step, epoch or catalog.newest_epoch(self._disk) + 1)
        future = self._pool.submit(write_stream, self._disk, name, part, version)
        part.known = version, future
        if getattr(part.value, "immutable", False) is not True:
            error = future.exception()  # blocks
            if error and not isinstance(error, EverstepError):
                part.known = None
                raise error
        return future

    def close(self) -> None:
        """Nothing more is begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def links_of(streams: Mapping[str, Future[Stream]]) -> dict[str, Stream]:
    """For a descriptor; blocks until all are durable. Raises Unavailable, Unsupported."""
    try:
        return {name: future.result() for name, future in streams.items()}
    except EverstepError:
        raise
    except Exception as error:
        raise Unavailable(f"streaming {', '.join(map(repr, streams))}: {error!r}") from error


def write_stream(disk: Tier, name: CheckpointName, part: StreamState, version: Any) -> Stream:
    """Make the content of a stream, which is of that version, durable, in a file that is named
    after a checkpoint. Raises Unavailable, Unsupported, and what `stream()` raises; then nothing
    is left of it."""
    path = names.pack_path(name, secrets.token_hex(4), 0)
    entries, digests = dict[str, TensorEntry](), list[str]()

    def pieces() -> Iterator[memoryview]:
        at = HEADER_BYTES
        for spec, view in _rows(part):
            piece = Piece(Box.whole(spec.shape), 0, at, len(view), 1 + len(digests))
            entries[spec.name] = TensorEntry(spec, (piece,))
            digests.extend(digest_of(view[start : start + n]) for start, n in chunks(len(view)))
            yield view
            at += len(view)
        if (now := part.version) != version:
            raise Unsupported(
                f"streaming {part.name!r}: its version went from {version!r} to {now!r} while it "
                f"was read. Put new content into an object of its own, or leave out immutable"
            )

    with disk.new_file(path) as file:
        size, first = write_packed(file.write, pieces())
    link = FileLink(path, size)
    try:
        file.finish()
        disk.sync_entries([path])
        shape = PackShape(size, HEADER_BYTES, 0)
        table = seal_table(Table((shape,), dict(sorted(entries.items())), {}))
        digests = [digest_of(first), *digests]
        known = Part(0, commit.write_table(disk, table), (link,), tuple(digests), name.step)
        return Stream(commit.write_table(disk, encode_part(known)), known.table, known.packs)
    except BaseException:
        commit.discard_packs(disk, name, [path])
        raise


def _rows(part: StreamState) -> Iterator[tuple[Spec, memoryview]]:
    """The pieces of a stream, each name's after one of nothing, as its table has them."""
    for number, (key, pieces) in enumerate(part.value.stream()):
        if not isinstance(key, str):
            raise Unsupported(f"streaming {part.name!r}: {key!r} is no name, stream() yields texts")
        yield Spec(row_name(number, 0, NOTHING, key), "uint8", (0,)), memoryview(b"")
        for index, piece in enumerate(pieces, 1):
            if isinstance(piece, torch.Tensor):
                view = bytes_of(piece).numpy().data.cast("B")
                name = row_name(number, index, TENSOR, key)
                yield Spec(name, dtype_name(piece.dtype), tuple(piece.shape)), view
            else:
                try:
                    view = memoryview(piece).cast("B")
                except TypeError as error:
                    raise Unsupported(
                        f"streaming {part.name!r}: a piece of {key!r} is neither a tensor nor a "
                        f"contiguous buffer: {error}"
                    ) from error
                yield Spec(row_name(number, index, BUFFER, key), "uint8", (len(view),)), view
