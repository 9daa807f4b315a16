"""A Zstandard frame (RFC 8878) of a chunk, for what is no noise: text, indices, tables, rows that
come again.
"""

import zstandard

from everstep.errors import Corrupt
from everstep.format.packs import CHUNK_BYTES

LEVEL = 1


def encode(data: memoryview) -> bytes:
    """The frame. Blocks, without the GIL; any number of threads may call it."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)


def decode(frame: memoryview | bytes, size: int, what: str) -> bytes:
    """The `size` bytes in a frame, whose header is checked before memory is taken. Raises Corrupt,
    which names it as `what`."""
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size != size or header.window_size > CHUNK_BYTES:
            raise Corrupt(
                f"decoding {what}: it claims {header.content_size} bytes and a window of "
                f"{header.window_size}, expected {size} bytes and at most {CHUNK_BYTES}"
            )
        found = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"decoding {what}: {error}") from error
    if len(found) != size:  # a frame that is to be skipped claims a size and has no content
        raise Corrupt(f"decoding {what}: it has {len(found)} bytes, expected {size}")
    return found
