"""Rounded copies: where a bfloat16 or float16 tensor is what rounding its float32 master gives,
nothing is stored of it (docs/format.md, section 7).

A float16 that is no number is never said to be rounded: processors differ in its bits.

Blocks stay in the cache, and the work is done without the GIL.
"""

import numpy as np
import numpy.typing as npt

from everstep.errors import Corrupt

DTYPES = ("bfloat16", "float16")
SOURCE = "float32"
_BLOCK_ITEMS = 1 << 15
_INFINITY = 0x7C00


def is_rounded(data: memoryview, master: memoryview, dtype: str) -> bool:
    """Whether `data`, of that dtype, is the rounding of `master`; to the bit. Blocks."""
    items = np.frombuffer(data, "<u2")
    if dtype == "float16" and np.any((items & 0x7FFF) > _INFINITY):
        return False
    return np.array_equal(items, np.frombuffer(rounded(master, dtype), "<u2"))


def rounded(master: memoryview, dtype: str) -> memoryview:
    """The rounding of float32 numbers, in new memory. Blocks. Raises Corrupt for another dtype."""
    if dtype not in DTYPES or master.nbytes % 4:
        raise Corrupt(f"rounding {master.nbytes} bytes of float32 to {dtype}: that is not done")
    numbers = np.frombuffer(master, "<u4")
    found = np.empty(len(numbers), "<u2")
    for start in range(0, len(numbers), _BLOCK_ITEMS):
        block = numbers[start : start + _BLOCK_ITEMS]
        found[start : start + len(block)] = _rounded(block, dtype)
    return found.view("u1").data


def _rounded(numbers: npt.NDArray[np.uint32], dtype: str) -> npt.NDArray[np.uint16]:
    if dtype == "float16":
        with np.errstate(all="ignore"):
            return numbers.view("<f4").astype("<f2").view("<u2")
    bits = numbers >> 16
    bits &= 1
    bits += 0x7FFF
    bits += numbers
    return bits.view("<u2")[1::2]
