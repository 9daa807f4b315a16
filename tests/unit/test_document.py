"""Sealed documents."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep import Corrupt, Unsupported
from everstep.format.document import digest_of, seal, unseal

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text().filter(lambda key: key not in ("digest", "format")), JSON, min_size=1)
)
def test_what_is_sealed_comes_back(value):
    data = seal(value)
    assert json.loads(data) == {**value, "digest": digest_of(data[:-46])}
    found = unseal(data, "x")
    del found["digest"]
    assert found == value


def test_every_flipped_bit_is_seen():
    data = seal({"format": 1, "text": "über", "list": [1, 2.5, None]})
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt, match=r"there/x.json"):
            unseal(damaged, "there/x.json")


def test_every_truncation_and_extension_is_seen():
    data = seal({"format": 1, "text": "x" * 50})
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            unseal(data[:size], "x")
    with pytest.raises(Corrupt):
        unseal(data + b"\n", "x")


def test_unknown_versions_say_what_to_install():
    with pytest.raises(Unsupported, match=r"format version 2.*newer"):
        unseal(seal({"format": 2}), "x")


@pytest.mark.parametrize("body", [b"", b"[1", b"\xff", b'{"a":' + b"[" * 100_000])
def test_sealed_nonsense_is_corrupt(body):
    data = body + b',"digest":"' + digest_of(body).encode() + b'"}\n'
    with pytest.raises(Corrupt):
        unseal(data, "x")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_has_not_are_refused(number):
    with pytest.raises(ValueError, match="JSON"):
        seal({"a": number})
