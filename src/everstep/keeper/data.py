"""The bytes of one part on their way to the disk: digested and written at the same time, and while
they still arrive; a record packed, where that pays."""

import time
from concurrent.futures import Future

import xxhash

from everstep.format.manifest import Part
from everstep.format.packs import pack_starts
from everstep.format.tables import Extent, FileLink
from everstep.keeper.image import Image
from everstep.keeper.job import Writer
from everstep.keeper.pack import Packed, pays, write_packed
from everstep.store import commit, names
from everstep.store.names import CheckpointName

_SHARE_BYTES = 16 << 20


class Data:
    """One part's image as packs, and what becomes of them. For the team's thread."""

    def __init__(self, writer: Writer, image: Image, is_record: bool) -> None:
        """Raises Unsupported where a trainer gives its slot up."""
        self.document = image.parsed.document
        self._written: list[commit.NewPack] = []
        self._seconds = 0.0
        self._writer = writer
        self._image = image
        self._packed: Packed | None = None
        self._waited = 0.0
        self._entropy = writer.speed.is_slow
        self._packs_it = is_record and pays(image, self._entropy)
        self._shares: list[Future[dict[int, str]]] = []
        if not self._packs_it:
            self._shares = self._begin_digests()

    def write(self, name: CheckpointName) -> None:
        """Write the files of a checkpoint; they are durable after `sync`, and when the entries of
        `links` are."""
        writer, began = self._writer, time.monotonic()
        if self._packs_it:
            self._packed = write_packed(
                writer.disk, name, self._image, writer.hasher, self._entropy
            )
            self._written, self._seconds = [self._packed.pack], self._packed.seconds
        else:
            packs = [[segment.view for segment in pack] for pack in self._image.packs]
            self._written = commit.begin_packs(writer.disk, name, packs, self._await)
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

    @property
    def squeezed(self) -> float | None:
        """Which part of the gradients' bytes was not written, as they were packed; None where there
        are none."""
        gradients = self._image.parsed.gradients
        saved = sum(self._image.sizes) - self.size if self._packed else 0
        return saved / gradients if gradients and self._written else None

    def _await(self, pack: int, end: int) -> None:
        """For the copy, whose time is not the disk's."""
        began = time.monotonic()
        self._image.wait(pack, end)
        self._waited += time.monotonic() - began

    def part(self, step: int) -> Part | None:
        """What the manifest says of them, written or not; blocks until all is digested. None for a
        record that would have been packed, and was not written."""
        table = commit.table_link(self.document)
        if packed := self._packed:
            return Part(0, table, self.links, packed.digests, step, packed.stored)
        if self._packs_it:
            return None
        unwritten = tuple(FileLink(f"{names.DATA}/unwritten", size) for size in self._image.sizes)
        return Part(0, table, self.links or unwritten, self._digests(), step)

    def _digests(self) -> tuple[str, ...]:
        found = {
            index: digest for share in self._shares for index, digest in share.result().items()
        }
        return tuple(found[index] for index in range(len(found)))

    def _begin_digests(self) -> list[Future[dict[int, str]]]:
        """Hash all extents in several threads, in the order in which they arrive.

        Training that uses all cores waits for its slowest thread: what is taken evenly from all of
        them costs less than what is taken from one.
        """
        parsed = self._image.parsed
        starts = pack_starts(pack.size for pack in parsed.table.packs)
        shares: dict[int, list[Extent]] = {}
        for extent in parsed.extents:
            start = starts[extent.pack] + extent.offset
            shares.setdefault(start // _SHARE_BYTES, []).append(extent)
        return [
            self._writer.hasher.submit(_digest, self._image, share)
            for _, share in sorted(shares.items())
        ]


def _digest(image: Image, share: list[Extent]) -> dict[int, str]:
    """The digests of some extents, by index. Large ones without the GIL."""
    return {
        extent.digest: xxhash.xxh3_128_hexdigest(
            image.view(extent.pack, extent.offset, extent.size)
        )
        for extent in share
    }
