"""Differences to the same bytes of an earlier version: of weights and moments that change little.

Items are taken for integers of their size, so that small differences of either sign have zeros
above (docs/format.md, section 7); these are stored as byte planes (planes.py).

Blocks stay in the cache, and the work is done without the GIL.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from everstep.codecs import planes
from everstep.errors import Corrupt

_BLOCK_BYTES = 1 << 16


def encode(data: memoryview, base: memoryview, item_size: int) -> bytes | None:
    """The difference of whole items to as many others, or None where it would not save a tenth.
    Blocks; any number of threads may call it."""
    if data.nbytes % item_size or data.nbytes != base.nbytes:
        return None
    numbers, bits = np.empty(data.nbytes // item_size, f"<u{item_size}"), 8 * item_size
    for part, now, before in _blocks(numbers, data, base):
        np.subtract(now, before, out=part)
        signs = part.view(f"<i{item_size}") >> (bits - 1)
        part <<= 1
        part ^= signs.view(part.dtype)
    return planes.encode(numbers.view("u1").data, item_size)


def decode_into(encoded: memoryview, base: memoryview, item_size: int, into: memoryview) -> None:
    """Write the bytes to `into`, which has their size. Raises Corrupt."""
    if into.nbytes % item_size or into.nbytes != base.nbytes:
        raise Corrupt(f"decoding a difference: {into.nbytes} bytes, to {base.nbytes} of the base")
    planes.decode_into(encoded, item_size, into)
    numbers = np.frombuffer(into, f"<u{item_size}")
    for part, _, before in _blocks(numbers, into, base):
        signs = np.negative(part & 1)
        part >>= 1
        part ^= signs
        part += before


def _blocks(
    numbers: npt.NDArray[np.unsignedinteger], *others: memoryview
) -> Iterator[list[npt.NDArray[np.unsignedinteger]]]:
    arrays = [numbers, *(np.frombuffer(each, numbers.dtype) for each in others)]
    step = _BLOCK_BYTES // numbers.itemsize
    for at in range(0, len(numbers), step):
        yield [each[at : at + step] for each in arrays]
