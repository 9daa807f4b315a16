"""Integer differences: to the bit, whatever the bytes."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep import Corrupt
from everstep.codecs import planes
from everstep.codecs.difference import decode_into, encode


def check(raw, base, item_size):
    encoded = encode(memoryview(raw), memoryview(base), item_size)
    if encoded is not None:
        into = bytearray(len(raw))
        decode_into(memoryview(encoded), memoryview(base), item_size, memoryview(into))
        assert into == raw
    return encoded


@given(st.binary(max_size=600), st.data(), st.sampled_from(planes.ITEM_SIZES))
def test_what_is_encoded_comes_back(raw, data, item_size):
    base = bytearray(raw)
    for _ in range(data.draw(st.integers(0, 5)) if raw else 0):
        base[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    check(raw, bytes(base), item_size)


@pytest.mark.parametrize("item_size", planes.ITEM_SIZES)
def test_long_ones_in_blocks(item_size):
    raw = random.Random(item_size).randbytes(400_000)
    base = bytearray(raw)
    base[5::1000] = bytes(len(base[5::1000]))
    assert len(check(raw, bytes(base), item_size)) < len(raw) / 4
    assert check(raw, raw, item_size) == planes.encode(memoryview(bytes(400_000)), item_size)


def test_small_changes_of_either_sign_are_small():
    """As of weights: what XOR makes of a carry is not."""
    random = np.random.default_rng(1)
    base = random.standard_normal(1 << 18).astype("<f4")
    raw = base * (1 + 1e-4 * random.standard_normal(1 << 18).astype("<f4"))
    mixed = (raw.view("<u4") ^ base.view("<u4")).tobytes()
    found = check(raw.astype("<f4").tobytes(), base.tobytes(), 4)
    assert len(found) < len(planes.encode(memoryview(mixed), 4)) < 0.6 * raw.nbytes


def test_other_sizes():
    assert encode(memoryview(bytes(10)), memoryview(bytes(10)), 4) is None
    assert encode(memoryview(bytes(8)), memoryview(bytes(12)), 4) is None
    with pytest.raises(Corrupt, match="base"):
        decode_into(memoryview(b""), memoryview(bytes(8)), 4, memoryview(bytearray(4)))


@given(st.binary(max_size=100))
def test_nonsense_is_no_difference(data):
    with pytest.raises(Corrupt):
        decode_into(memoryview(data), memoryview(bytes(400)), 4, memoryview(bytearray(400)))
