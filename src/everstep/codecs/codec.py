"""The codecs by their names, as manifests have them: how a chunk is encoded, and back.

All are lossless, and see one chunk at a time, of at most 4 MiB. A new one is a module with
`encode` and `decode_into`, its name here and in ENCODERS, a case in `encode` and `decode_into`:
choice.py and the keeper measure it by themselves. Their modules, and with them numpy and zstandard,
are loaded when something is encoded: the keeper starts without.
"""

from everstep.codecs import WORTH
from everstep.errors import Unsupported

RAW = "raw"
PLANES = "planes"
ZSTD = "zstd"

ZEROS = "zeros"
"""Byte planes of which those of zeros are dropped, and nothing else is done: as fast as memory."""

ROUNDED = "rounded"
"""Nothing is stored: the chunk is rounded from the same elements of a float32 tensor, whose name
follows, as in "rounded:masters.weight"."""

DIFFERENCE = "difference"
"""To the same chunk of an earlier checkpoint, which the part names as its `base`."""

CHAIN_MAX = 8
"""So many differences one after another a reader takes, at most."""

ENCODERS = (ZEROS, PLANES, ZSTD)
"""What a chunk can be encoded with, by rising cost. What comes of `ZEROS` is called `PLANES`."""


def encode(
    codec: str, data: memoryview, item_size: int, before: memoryview | None = None
) -> bytes | None:
    """The encoding of a chunk of such items, or None where it would not save a tenth. `before`: of
    a difference, to what. Blocks, without the GIL; any number of threads may call it."""
    from everstep.codecs import difference, planes, zstd

    if codec == DIFFERENCE:
        assert before is not None
        return difference.encode(data, before, item_size)
    if codec == ZSTD:
        found = zstd.encode(data)
        return found if len(found) <= WORTH * data.nbytes else None
    assert codec in (ZEROS, PLANES)
    return planes.encode(data, item_size, entropy=codec == PLANES)


def name_of(encoder: str) -> str:
    """The codec that decodes what one of `ENCODERS` makes."""
    return PLANES if encoder == ZEROS else encoder


def master_of(codec: str | None) -> str | None:
    """The tensor from which a chunk is rounded; None for any other codec."""
    kind, _, name = (codec or "").partition(":")
    return name if kind == ROUNDED else None


def decode_into(codec: str, encoded: memoryview, item_size: int, into: memoryview) -> None:
    """Write the raw bytes to `into`, which has their size. Raises Corrupt where it is no encoding
    of so many bytes, Unsupported for a codec that is not known here."""
    from everstep.codecs import planes, zstd

    if codec == PLANES:
        planes.decode_into(encoded, item_size, into)
    elif codec == ZSTD:
        into[:] = zstd.decode(encoded, into.nbytes, "a zstd chunk")
    else:
        raise Unsupported(
            f"reading a chunk that is encoded with {codec!r}, which this everstep cannot decode. "
            f"Install the everstep that wrote it, or a newer one"
        )
