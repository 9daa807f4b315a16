"""Byte planes: exact round trips, what is worth encoding, and encodings made to do harm.

Altered content cannot be told from other content: an encoding has no digest of its own, since the
store keeps digests of the stored bytes. What is tested of it is that nothing crashes, and that no
memory is taken for sizes that only a header claims.
"""

import struct
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from everstep.codecs.planes import decode_into, encode
from everstep.errors import Corrupt

CHUNK_BYTES = 4 << 20
ITEM_SIZES = [1, 2, 4, 8]


def gradient(count, seed=0):
    """float32 of a gradient's magnitudes: normal, over several orders of scale."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(count) * 10.0 ** random.uniform(-5, -3, count)).astype("<f4")


def bfloat16_in_float32(count, seed=0):
    return (gradient(count, seed).view("<u4") & np.uint32(0xFFFF0000)).tobytes()


def bfloat16(count, seed=0):
    return (gradient(count, seed).view("<u4") >> 16).astype("<u2").tobytes()


def noise(size, seed=0):
    return np.random.default_rng(seed).bytes(size)


def decode(encoded, item_size, size):
    into = bytearray(b"\xa5" * size)
    decode_into(encoded, item_size, memoryview(into))
    return bytes(into)


def round_trip(raw, item_size, entropy=True):
    """The encoding (None if it is not worth it), once two readers have got `raw` out of it."""
    encoded = encode(memoryview(raw), item_size, entropy=entropy)
    if encoded is not None:
        assert len(encoded) <= 0.9 * len(raw)
        assert decode(encoded, item_size, len(raw)) == raw
        assert read_as_the_docstring_says(encoded) == raw
    return encoded


def read_as_the_docstring_says(encoded):
    """A second reader, which shares no code with the first."""
    magic, item_size, zero, size = struct.unpack_from("<2sBBI", encoded)
    assert (magic, zero) == (b"P1", 0)
    count, at, planes = size // item_size, 8 + 4 * item_size, []
    for stored in struct.unpack_from(f"<{item_size}I", encoded, 8):
        plane, at = encoded[at : at + stored], at + stored
        if stored == 0:
            plane = bytes(count)
        elif stored < count:
            plane = zstandard.ZstdDecompressor().decompress(plane)
        assert len(plane) == count
        planes.append(plane)
    raw = b"".join(bytes(item) for item in zip(*planes, strict=True)) + encoded[at:]
    assert len(raw) == size
    return raw


@st.composite
def pieces(draw):
    """(raw bytes, item size): each plane of its own kind, and perhaps a tail."""
    item_size = draw(st.sampled_from(ITEM_SIZES))
    count = draw(st.integers(0, 3000))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = {
        "zeros": lambda: np.zeros(count, np.uint8),
        "constant": lambda: np.full(count, 0xFF, np.uint8),
        "noise": lambda: random.integers(0, 256, count, np.uint8),
        "skewed": lambda: random.binomial(255, 0.25, count).astype(np.uint8),
        "rare": lambda: (random.random(count) < 0.001).astype(np.uint8),
        "late": lambda: (np.arange(count) == count - 1).astype(np.uint8),
    }
    planes = [kinds[draw(st.sampled_from(sorted(kinds)))]() for _ in range(item_size)]
    tail = draw(st.binary(max_size=item_size - 1))
    return np.stack(planes, axis=1).tobytes() + tail, item_size


@given(pieces(), st.booleans())
def test_what_is_encoded_comes_back(piece, entropy):
    round_trip(*piece, entropy)


@given(st.binary(max_size=200), st.sampled_from(ITEM_SIZES), st.booleans())
def test_any_bytes_come_back(raw, item_size, entropy):
    round_trip(raw, item_size, entropy)


@given(st.binary(max_size=100), st.sampled_from(ITEM_SIZES), st.integers(0, 40))
def test_random_bytes_are_refused(encoded, item_size, size):
    with pytest.raises(Corrupt):  # a magic and a size that fit are not met by chance
        decode(encoded, item_size, size)


@given(pieces(), st.integers(1, 7))
def test_alignment_does_not_matter(piece, offset):
    raw, item_size = piece
    shifted = memoryview(bytes(offset) + raw)[offset:]
    encoded = encode(memoryview(raw), item_size)
    assert encode(shifted, item_size) == encoded
    if encoded is not None:
        into = bytearray(offset + len(raw))
        decode_into(memoryview(b"x" + encoded)[1:], item_size, memoryview(into)[offset:])
        assert into == bytes(offset) + raw


WORTH_IT = {
    "bfloat16 in float32": (bfloat16_in_float32(1 << 18), 4, True, 0.33, 0.40),
    "the same, zeros dropped only": (bfloat16_in_float32(1 << 18), 4, False, 0.5, 0.501),
    "float32": (gradient(1 << 18).tobytes(), 4, True, 0.8, 0.9),
    "bfloat16": (bfloat16(1 << 18), 2, True, 0.65, 0.80),
    "zeros": (bytes(1 << 20), 4, True, 0, 0.001),
    "a whole chunk of zeros": (bytes(CHUNK_BYTES), 8, False, 0, 0.001),
    "small integers": (np.arange(1 << 16, dtype="<i8").tobytes(), 8, False, 0.25, 0.26),
    "small signed integers": (
        np.random.default_rng(0).integers(-9, 9, 1 << 16, "<i8").tobytes(),
        8,
        True,
        0.1,
        0.25,
    ),
}


@pytest.mark.parametrize("name", WORTH_IT)
def test_it_saves_what_can_be_saved(name):
    raw, item_size, entropy, least, most = WORTH_IT[name]
    encoded = round_trip(raw, item_size, entropy)
    assert encoded is not None
    assert least <= len(encoded) / len(raw) <= most


def test_rows_of_zeros_are_seen():
    """An embedding's gradient: few rows were looked up, the others are zero."""
    rows = gradient(1000 * 768).reshape(1000, 768)
    rows[np.random.default_rng(1).random(1000) > 0.05] = 0
    encoded = round_trip(rows.tobytes(), 4)
    assert encoded is not None
    assert len(encoded) < 0.08 * rows.nbytes


LEFT_ALONE = {
    "noise of 8 bytes": (noise(1 << 20), 8, True),
    "noise of 1 byte": (noise(1 << 16), 1, True),
    "float32, zeros dropped only": (gradient(1 << 16).tobytes(), 4, False),
    "bfloat16, zeros dropped only": (bfloat16(1 << 16), 2, False),
    "nothing": (b"", 4, True),
    "nothing, zeros dropped only": (b"", 1, False),
    "less than an item": (bytes(3), 4, True),
    "less than the header": (bytes(24), 4, True),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_saves_no_tenth_is_left_alone(name):
    raw, item_size, entropy = LEFT_ALONE[name]
    assert encode(memoryview(raw), item_size, entropy=entropy) is None


@pytest.mark.parametrize("item_size", ITEM_SIZES)
def test_an_encoding_of_fewer_bytes_than_an_item_has_can_be_read(item_size):
    for size in range(item_size):
        encoded = struct.pack(f"<2sBBI{item_size}I", b"P1", item_size, 0, size, *[0] * item_size)
        assert decode(encoded + b"z" * size, item_size, size) == b"z" * size


def test_buffers_of_other_formats():
    raw = np.frombuffer(bfloat16_in_float32(5000), "<f4")
    encoded = encode(raw.data, 4)
    assert encoded == encode(memoryview(raw.tobytes()), 4)
    into = np.empty((50, 100), "<f4")
    decode_into(encoded, 4, into.data)
    assert into.tobytes() == raw.tobytes()


def test_threads_get_what_one_gets():
    raws = [bfloat16_in_float32(1 << 16, seed) for seed in range(4)] * 4
    expected = [encode(memoryview(raw), 4) for raw in raws]
    with ThreadPoolExecutor(4) as threads:
        encodings = list(threads.map(lambda raw: encode(memoryview(raw), 4), raws))
        decoded = list(threads.map(lambda encoded: decode(encoded, 4, 1 << 18), encodings))
    assert encodings == expected
    assert decoded == raws


@pytest.mark.parametrize("item_size", [0, 3, 16, -4])
def test_other_item_sizes_are_wrong_arguments(item_size):
    with pytest.raises(ValueError, match="byte planes"):
        encode(memoryview(bytes(48)), item_size)
    with pytest.raises(ValueError, match="byte planes"):
        decode_into(b"", item_size, memoryview(bytearray(48)))


def test_more_than_a_chunk_is_a_wrong_argument():
    with pytest.raises(ValueError, match="cut them"):
        encode(memoryview(bytes(CHUNK_BYTES + 1)), 4)
    with pytest.raises(ValueError, match="cut them"):
        decode_into(b"", 4, memoryview(bytearray(CHUNK_BYTES + 1)))


def test_nothing_heavy_is_imported_before_it_is_needed():
    program = (
        "import sys, everstep.keeper.process\n"
        "from everstep.codecs import codec\n"
        "def loaded(): return {'numpy', 'zstandard', 'torch'} & set(sys.modules)\n"
        "assert not loaded(), loaded()\n"
        "encoded = codec.encode(codec.ZEROS, memoryview(bytes(4096)), 4)\n"
        "codec.decode_into(codec.PLANES, encoded, 4, memoryview(bytearray(4096)))\n"
        "assert loaded() == {'numpy', 'zstandard'}, loaded()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


SMALL_RAW = bfloat16_in_float32(700) + b"xyz"
SMALL = encode(memoryview(SMALL_RAW), 4)


def test_every_byte_altered():
    """In the header it is noticed. In a plane it may not be: that is what the store's digests are
    for. It must not crash, and the bytes of other planes stay as they were."""
    for at in range(len(SMALL)):
        for flip in (0x01, 0x80, 0xFF):
            altered = bytearray(SMALL)
            altered[at] ^= flip
            try:
                found = decode(bytes(altered), 4, len(SMALL_RAW))
            except Corrupt:
                continue
            assert at >= 24, "what the header says was checked"
            assert found[:-3:4] == SMALL_RAW[:-3:4]
            assert found[1:-3:4] == SMALL_RAW[1:-3:4]


def test_every_truncation_is_noticed():
    for size in range(len(SMALL)):
        with pytest.raises(Corrupt):
            decode(SMALL[:size], 4, len(SMALL_RAW))


def test_something_after_the_end_is_noticed():
    with pytest.raises(Corrupt):
        decode(SMALL + b"\0", 4, len(SMALL_RAW))


@pytest.mark.parametrize(
    ("item_size", "size"), [(4, 2802), (4, 2804), (4, 0), (2, 2803), (8, 2803)]
)
def test_another_size_than_expected_is_noticed(item_size, size):
    with pytest.raises(Corrupt, match="expected"):
        decode(SMALL, item_size, size)


COUNT = 1000


def holding(frame):
    """An encoding of COUNT items of one byte, its plane held in this frame."""
    assert 0 < len(frame) < COUNT
    return struct.pack("<2sBBII", b"P1", 1, 0, COUNT, len(frame)) + frame


def frame_of(size, **options):
    return zstandard.ZstdCompressor(**options).compress(bytes(size))


def frame_claiming(content_size, window_descriptor):
    """The header of a frame, made by hand (RFC 8878, 3.1.1.1), and a last block of run length."""
    header = struct.pack("<IBBQ", 0xFD2FB528, 0b11000000, window_descriptor, content_size)
    return header + (1 | 1 << 1 | COUNT << 3).to_bytes(3, "little") + b"r"


def test_a_frame_made_by_hand_is_read():
    assert decode(holding(frame_claiming(COUNT, 0)), 1, COUNT) == b"r" * COUNT


HOSTILE_FRAMES = {
    "content of an exbibyte": frame_claiming(1 << 60, 0),
    "content one byte longer": frame_claiming(COUNT + 1, 0),
    "content one byte shorter": frame_claiming(COUNT - 1, 0),
    "content of unknown size": frame_of(COUNT, write_content_size=False),
    "a window of 8 MiB": frame_claiming(COUNT, 13 << 3),
    "a window of 3.75 TiB": frame_claiming(COUNT, 0xFF),
    "a bomb": frame_of(64 << 20)[:900],
    "too short a content": frame_of(COUNT - 1),
    "too long a content": frame_of(COUNT + 1),
    "two frames": frame_of(COUNT) * 2,
    "a frame and a byte": frame_of(COUNT) + b"\0",
    "half a frame": zstandard.compress(noise(COUNT // 4) * 4)[:200],
    "only to be skipped": struct.pack("<II", 0x184D2A50, COUNT) + bytes(500),
    "to be skipped, then a frame": struct.pack("<II", 0x184D2A50, 4) + bytes(4) + frame_of(COUNT),
    "another magic": b"\x1e" + frame_of(COUNT)[1:],
    "to be skipped, and there is nothing of it": struct.pack("<II", 0x184D2A50, 0xFFFFFFFF),
    "a magic alone": frame_of(COUNT)[:4],
    "one byte": b"\x28",
    "a dictionary": zstandard.ZstdCompressor(
        dict_data=zstandard.train_dictionary(4096, [noise(500, n) * 2 for n in range(50)])
    ).compress(bytes(COUNT)),
}


@pytest.mark.parametrize("name", HOSTILE_FRAMES)
def test_hostile_frames(name):
    assert refused_with_at_most(1 << 20, holding(HOSTILE_FRAMES[name]), 1, COUNT)


@pytest.mark.parametrize(
    ("size", "stored"),
    [
        (0xFFFFFFFF, [0, 0, 0, 0]),
        (0xFFFFFFFF, [0xFFFFFFFF] * 4),
        (4000, [0xFFFFFFFF] * 4),
        (4000, [0xFFFFFFFF, 1, 0, 0]),  # a sum that is right modulo 2^32
        (4000, [1001, 0, 0, 0]),
        (4000, [4000, 0, 0, 0]),
        (0, [0xFFFFFFFF, 0, 0, 0]),
    ],
)
def test_hostile_headers(size, stored):
    encoded = struct.pack("<2sBBI4I", b"P1", 4, 0, size, *stored)
    for body in (b"", bytes(1000), bytes(1001), bytes(4000)):
        assert refused_with_at_most(1 << 20, encoded + body, 4, 4000)


def refused_with_at_most(memory_bytes_max, encoded, item_size, size):
    into = memoryview(bytearray(size))
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            decode_into(encoded, item_size, into)
        return tracemalloc.get_traced_memory()[1] <= memory_bytes_max
    finally:
        tracemalloc.stop()
