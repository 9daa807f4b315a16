"""Sealed documents."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import Corrupt, Unsupported
from everstep.format.document import anything, digest, digest_of, find_flaw, natural, seal, unseal
from examples import examples

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
    assert json.loads(data) == {"format": 1, **value, "digest": digest_of(data[:-46])}
    assert unseal(data, "x") == json.loads(data)


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


SHAPES = st.recursive(
    st.sampled_from([str, bool, float, natural, digest, anything, None]),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(lambda each: {str: each}, inner)
        | st.dictionaries(st.sampled_from(["a", "b", "c?"]), inner)
    ),
    max_leaves=6,
)


def is_of(value, shape):
    """What a shape means, by the table in document.py."""
    match shape:
        case None:
            return value is None
        case tuple():
            return any(is_of(value, each) for each in shape)
        case [each]:
            return type(value) is list and all(is_of(item, each) for item in value)
        case list():
            is_row = type(value) is list and len(value) == len(shape)
            return is_row and all(map(is_of, value, shape))
        case dict():
            return type(value) is dict and all(
                all(is_of(item, inner) for item in value.values())
                if name is str
                else is_of(value[name[0]], inner)
                if name[0] in value
                else name.endswith("?")
                for name, inner in shape.items()
            )
        case type():
            return type(value) is shape
    return shape(value)


def of_shape(shape):
    """Values of that shape, and with one member in seven, others."""
    match shape:
        case None:
            right = st.none()
        case tuple():
            right = st.one_of(*map(of_shape, shape))
        case [each]:
            right = st.lists(of_shape(each), max_size=3)
        case list():
            right = st.tuples(*map(of_shape, shape)).map(list)
        case dict() if str in shape:
            right = st.dictionaries(st.text(max_size=2), of_shape(shape[str]), max_size=3)
        case dict():
            right = st.fixed_dictionaries({name[0]: of_shape(each) for name, each in shape.items()})
        case type():
            right = {str: st.text(max_size=3), bool: st.booleans(), float: st.floats()}[shape]
        case _:
            hexadecimal = st.text("0123456789abcdefg\n", min_size=31, max_size=33)
            right = {
                natural: st.integers(-1, 3) | st.just(1 << 62),
                digest: hexadecimal | st.just("0" * 32),
                anything: JSON,
            }[shape]
    return st.integers(0, 6).flatmap(lambda drawn: right if drawn else JSON)


@settings(max_examples=examples(300))
@given(st.data())
def test_a_flaw_is_found_exactly_where_a_value_is_not_of_its_shape(data):
    shape = data.draw(SHAPES)
    value = data.draw(of_shape(shape))
    assert (find_flaw(value, shape) is None) == is_of(value, shape)


def test_a_flaw_is_told_with_its_place():
    shape = {"rows": [{"size": natural, "link?": (None, [str, natural])}]}
    rows = [{"size": 1}, {"size": 2, "link": ["x", True]}, {"size": -1}]
    assert find_flaw({"rows": rows}, shape) == ".rows[1].link[1] is True"
    assert find_flaw({"rows": rows[::2]}, shape) == ".rows[1].size is -1"
    assert find_flaw({"rows": [{}]}, shape) == ".rows[0].size is not there"
    assert find_flaw({"rows": rows[:1]}, shape) is None
