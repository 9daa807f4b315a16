"""How much byte planes save, and how fast they are, on one thread.

    python -m benchmarks.codecs.planes

One chunk per call, as the library cuts them. Medians, in MB (10^6 bytes) of raw bytes per second;
the ratio is raw to stored, or "raw" where the codec found it not worth while.
"""

import statistics
import timeit
from collections.abc import Callable

import numpy as np

from everstep.codecs.planes import decode_into, encode

SIZE_BYTES, RUNS = 4 << 20, 15
ROW = "{:34} {:>9} {:>7} {:>12} {:>12}"


def main() -> None:
    print(ROW.format("data", "path", "ratio", "encode MB/s", "decode MB/s"))
    for name, (raw, item_size) in kinds(SIZE_BYTES).items():
        for entropy in (True, False):
            row = measure(raw, item_size, entropy)
            print(ROW.format(name, "entropy" if entropy else "zeros", *row))


def kinds(size: int) -> dict[str, tuple[bytes, int]]:
    """Raw bytes and item size, by name."""
    random = np.random.default_rng(0)
    rows = size // 4 // 1024
    scale = 10.0 ** random.uniform(-5, -3, (rows, 1))  # magnitudes differ from row to row
    exact = (random.standard_normal((rows, 1024)) * scale).astype("<f4").view("<u4")
    rounded = exact & np.uint32(0xFFFF0000)
    embedding = rounded * (random.random((rows, 1)) < 0.05).astype("<u4")
    return {
        "bfloat16 in float32": (rounded.tobytes(), 4),
        "bfloat16 in float32, clipped": ((rounded.view("<f4") * np.float32(0.73)).tobytes(), 4),
        "float32": (exact.tobytes(), 4),
        "bfloat16": ((np.tile(rounded, (2, 1)) >> 16).astype("<u2").tobytes(), 2),
        "embedding, a 20th of the rows": (embedding.tobytes(), 4),
        "zeros": (bytes(size), 4),
        "noise": (random.bytes(size), 4),
    }


def measure(raw: bytes, item_size: int, entropy: bool) -> tuple[str, str, str]:
    """The ratio, and how fast raw bytes are encoded and decoded."""

    def rate(work: Callable[[], object]) -> str:
        work()  # it imports and touches memory
        seconds = statistics.median(timeit.repeat(work, number=1, repeat=RUNS))
        return f"{len(raw) / seconds / 1e6:.0f}"

    encoded = encode(memoryview(raw), item_size, entropy=entropy)
    encode_rate = rate(lambda: encode(memoryview(raw), item_size, entropy=entropy))
    if encoded is None:
        return "raw", encode_rate, ""
    into = bytearray(len(raw))
    decode_rate = rate(lambda: decode_into(encoded, item_size, memoryview(into)))
    assert into == raw, "it comes back as it was"
    return f"{len(raw) / len(encoded):.2f}", encode_rate, decode_rate


if __name__ == "__main__":
    main()
