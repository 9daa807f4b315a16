"""Reads whose every byte is checked against its digest."""

from collections.abc import Iterator

from everstep.errors import Corrupt, Missing
from everstep.format.document import digest_of
from everstep.format.manifest import Part
from everstep.format.packed import stored_extents
from everstep.format.packs import CHUNK_BYTES, PAD_PREFIX
from everstep.format.tables import Extent, FileLink, Table, extents
from everstep.tiers.files import Reader
from everstep.tiers.tier import Tier


def check_chunk(view: memoryview, digest: str, where: str) -> None:
    """Raises Corrupt where the bytes do not have that digest. Releases the GIL while it hashes."""
    found = digest_of(view)
    if found != digest:
        raise Corrupt(
            f"reading {where}: {len(view)} bytes have digest {found}, the manifest says {digest}"
        )


def open_pack(disk: Tier, link: FileLink, direct: bool = False) -> Reader:
    """Open a pack that a manifest names; raises Corrupt where it is gone or of another size."""
    try:
        reader = disk.open(link.path, direct)
    except Missing as error:
        raise Corrupt(f"{error}, but a manifest needs it") from error
    if reader.size == link.size:
        return reader
    reader.close()
    raise _other_size(disk, link, reader.size)


def check_size(disk: Tier, link: FileLink) -> None:
    """Raises Corrupt where `open_pack` would, as far as that shows before it is opened."""
    if (size := disk.size(link.path)) != link.size:
        raise _other_size(disk, link, size)


def _other_size(disk: Tier, link: FileLink, size: int | None) -> Corrupt:
    found = "is not there" if size is None else f"has {size} bytes"
    return Corrupt(f"reading {disk.root / link.path}: it {found}, the manifest says {link.size}")


def verify_part(disk: Tier, part: Part, table: Table) -> Iterator[tuple[int, Corrupt | None]]:
    """Read every byte of a part's packs, padding too.

    Yields, by extent, (bytes read, what is wrong or None).
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    by_pack: list[list[Extent]] = [[] for _ in part.packs]
    found = extents(table) if part.stored is None else stored_extents(table, part.stored)
    for extent in found:
        by_pack[extent.pack].append(extent)
    for link, pack in zip(part.packs, by_pack, strict=True):
        try:
            reader = open_pack(disk, link)
        except Corrupt as error:
            yield 0, error
            continue
        try:
            yield from _verify_pack(reader, part, pack, buffer)
        finally:
            reader.close()


def _verify_pack(
    reader: Reader, part: Part, pack: list[Extent], buffer: memoryview
) -> Iterator[tuple[int, Corrupt | None]]:
    end = 0
    path = part.packs[pack[0].pack].path
    for extent in pack:
        problem: Corrupt | None = None
        view = (
            buffer[: extent.size]
            if extent.size <= len(buffer)
            else memoryview(bytearray(extent.size))
        )
        try:
            _check_padding(reader, end, extent.offset, path)
            reader.read_into(extent.offset, view)
            check_chunk(
                view, part.digests[extent.digest], f"{path} at byte {extent.offset} ({extent.what})"
            )
        except Corrupt as error:
            problem = error
        end = extent.offset + extent.size
        yield extent.size, problem
    try:
        _check_padding(reader, end, reader.size, path)
    except Corrupt as error:
        yield 0, error


def _check_padding(reader: Reader, start: int, end: int, path: str) -> None:
    view = memoryview(bytearray(max(0, end - start)))
    reader.read_into(start, view)
    if any(view):
        raise Corrupt(
            f"reading {path}: the padding ({PAD_PREFIX}*) from byte {start} on is not all zeros"
        )
