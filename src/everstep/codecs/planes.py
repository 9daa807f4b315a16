"""Byte planes: a lossless codec for numbers whose bytes differ in how much they say.

Plane i is byte i of every item. A gradient from a bfloat16 backward that lies in a float32 tensor
has two planes of zeros, one of noise, and one (sign and seven bits of the exponent) which a Huffman
code makes about a third as large. So each plane is stored in the way that suits it, as zeros, raw
or as a Zstandard frame: docs/format.md (section 7) draws it. The store's digests, of the stored
bytes, tell whether they are the ones that were written.
"""

import struct

import numpy as np
import numpy.typing as npt
import zstandard

from everstep.codecs import WORTH, zstd
from everstep.errors import Corrupt
from everstep.format.packs import CHUNK_BYTES

ITEM_SIZES = (1, 2, 4, 8)
MAGIC = b"P1"
PREFIX = struct.Struct("<2sBBI")
SAMPLE_RUNS = 32
SAMPLE_RUN_BYTES = 512


def encode(data: memoryview, item_size: int, *, entropy: bool = True) -> bytes | None:
    """The byte planes of `data` (contiguous, at most 4 MiB), or None where they would not save a
    tenth. Without `entropy`, planes of zeros are dropped and nothing else is done. Blocks, without
    the GIL; any number of threads may call it. Raises ValueError for another item size, or more."""
    _check_arguments(item_size, data.nbytes)
    count = data.nbytes // item_size
    if count == 0:
        return None
    bits = int(np.bitwise_or.reduce(np.frombuffer(data, f"<u{item_size}", count)))
    zeros = [byte == 0 for byte in bits.to_bytes(item_size, "little")]
    items = np.frombuffer(data, np.uint8, count * item_size).reshape(count, item_size)
    compressor = _compressor() if entropy else None
    shares = [
        0.0 if zero else _expected_share(items[:, plane], compressor)
        for plane, zero in enumerate(zeros)
    ]
    if sum(shares) > WORTH * item_size:
        return None
    planes: list[bytes | memoryview] = []
    for plane, share in enumerate(shares):
        raw = b"" if zeros[plane] else np.ascontiguousarray(items[:, plane]).data
        if compressor is not None and 0 < share <= WORTH:
            frame = compressor.compress(raw)
            raw = frame if len(frame) < count else raw
        planes.append(raw)
    stored = [len(plane) for plane in planes]
    sizes = struct.pack(f"<{item_size}I", *stored)
    header = PREFIX.pack(MAGIC, item_size, 0, data.nbytes) + sizes
    tail = data.cast("B")[count * item_size :]
    if len(header) + sum(stored) + len(tail) > WORTH * data.nbytes:
        return None
    return b"".join((header, *planes, tail))


def decode_into(encoded: memoryview | bytes, item_size: int, into: memoryview) -> None:
    """Write the raw bytes to `into`, which has their size, and may hold anything after an error.
    Blocks, without the GIL. Takes memory for one plane at a time, whatever the header says. Raises
    Corrupt for what is no encoding of so many bytes of such items, ValueError as `encode`."""
    _check_arguments(item_size, into.nbytes)
    source = memoryview(encoded)
    source = source.cast("B") if source.nbytes else source
    count, tail_size = divmod(into.nbytes, item_size)
    stored = _read_sizes(source, item_size, into.nbytes)
    if tail_size:
        into.cast("B")[-tail_size:] = source[-tail_size:]
    if count == 0:
        return
    raw = np.frombuffer(into, np.uint8, count * item_size)
    items = raw.reshape(count, item_size)
    if 0 in stored:
        raw.fill(0)  # one run over memory is faster than a strided one for each plane
    at = PREFIX.size + 4 * item_size
    for plane, size in enumerate(stored):
        if size:
            found = source[at : at + size]
            what = f"byte planes: the frame of plane {plane}"
            bytes_of_plane = found if size == count else zstd.decode(found, count, what)
            items[:, plane] = np.frombuffer(bytes_of_plane, np.uint8)
        at += size


def _check_arguments(item_size: int, size: int) -> None:
    if item_size not in ITEM_SIZES:
        raise ValueError(f"items of {item_size} bytes have no byte planes; expected {ITEM_SIZES}")
    if size > CHUNK_BYTES:
        raise ValueError(f"{size} bytes at once; cut them into chunks of at most {CHUNK_BYTES}")


def _read_sizes(source: memoryview, item_size: int, size: int) -> tuple[int, ...]:
    """The stored size of each plane, once all that the header says is known to hold."""
    header_size = PREFIX.size + 4 * item_size
    if len(source) < header_size:
        raise Corrupt(
            f"decoding byte planes: {len(source)} bytes, too few for a header of {header_size}"
        )
    found = PREFIX.unpack_from(source)
    if found != (expected := (MAGIC, item_size, 0, size)):
        raise Corrupt(
            f"decoding byte planes: expected (magic, item size, 0, raw size) to be {expected}, "
            f"found {found}"
        )
    stored: tuple[int, ...] = struct.unpack_from(f"<{item_size}I", source, PREFIX.size)
    count, tail_size = divmod(size, item_size)
    if max(stored) > count or header_size + sum(stored) + tail_size != len(source):
        raise Corrupt(
            f"decoding byte planes: stored sizes {list(stored)} of planes of {count} bytes do not "
            f"go with an encoding of {len(source)}"
        )
    return stored


def _expected_share(
    plane: npt.NDArray[np.uint8], compressor: zstandard.ZstdCompressor | None
) -> float:
    """What part of a plane's bytes is likely to be stored: 1.0 if it is not worth compressing. Told
    from runs spread evenly over it, so that rows of zeros are seen, too."""
    if compressor is None:
        return 1.0
    runs = plane
    if len(plane) > SAMPLE_RUNS * SAMPLE_RUN_BYTES:
        step = len(plane) // SAMPLE_RUNS
        runs = plane[: SAMPLE_RUNS * step].reshape(SAMPLE_RUNS, step)[:, :SAMPLE_RUN_BYTES]
    share = len(compressor.compress(np.ascontiguousarray(runs).data)) / runs.size
    return share if share <= WORTH else 1.0


def _compressor() -> zstandard.ZstdCompressor:
    """Made anew for each call, as no two threads may share one: nearly a pure Huffman coder, which
    still finds runs of equal bytes."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1,
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        chain_log=6,
        window_log=17,
        target_length=0,
        write_content_size=True,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)
