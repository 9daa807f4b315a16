"""Objects come back with equal types and values; what cannot is refused with its path."""

import json
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from runs import bits, check_same, checkpointer, freeze, restore, round_trip, save

from everstep import Corrupt, Mismatch, Unsupported
from everstep.state.objects import decode, encode, plain_json, references
from examples import examples

NUMPY_DTYPES = (
    hnp.scalar_dtypes() | hnp.unicode_string_dtypes(max_len=5) | hnp.byte_string_dtypes(max_len=5)
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())  # lone surrogates too
    | st.binary()
    | st.binary().map(bytearray)
    | st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.device("cuda:1")])
    | st.lists(st.integers(0, 99), max_size=3).map(torch.Size)
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9))
    | NUMPY_DTYPES.flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))
    )
    | NUMPY_DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, ()).map(lambda array: array[()]))
)
KEYS = (
    st.text(st.characters(), max_size=5)
    | st.integers()
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False)
    | st.tuples(st.integers(), st.text(max_size=3))
    | st.just("$")
)
HASHABLE = st.integers() | st.text(max_size=3) | st.frozensets(st.integers(), max_size=3)


def nest(children):
    pairs = st.dictionaries(KEYS, children, max_size=4)
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | pairs
        | pairs.map(OrderedDict)
        | pairs.map(lambda value: defaultdict(list, value))
        | pairs.map(lambda value: defaultdict(None, value))
        | st.lists(children, max_size=4).map(lambda value: deque(value, maxlen=7))
        | st.lists(HASHABLE).map(Counter)
        | st.sets(HASHABLE, max_size=4)
        | st.frozensets(HASHABLE, max_size=4)
    )


def refuse(name, tensor):
    raise AssertionError(name)


def through_json(value):
    text = json.dumps(encode(value, "value", refuse), allow_nan=False, ensure_ascii=False)
    return decode(json.loads(text.encode()), refuse)


@settings(max_examples=examples(300))
@given(st.recursive(SCALARS, nest, max_leaves=12))
def test_any_value_comes_back_with_equal_types(value):
    assert bits(through_json(value)) == bits(value)


@pytest.mark.parametrize(
    "value",
    [10**5000, -(2**63), 2**64, True, 1e400, -0.0, "\ud800", {"\ud800": 1}, {"$": "float"}, {1: 2}],
    ids=[f"edge{index}" for index in range(10)],  # pytest cannot print some of them
)
def test_values_at_the_edge_of_json(value):
    assert bits(through_json(value)) == bits(value)


class Number(IntEnum):
    ONE = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": object()}]}, r"note\.a\.1\.b"),
        ({"a": Number.ONE}, r"note\.a: .*Number"),
        ([Point(1, 2)], r"note\.0: .*Point"),
        ((1, {2: lambda: 0}), r"note\.1\.2"),
        ({"a": {"b", Point}}, r"note\.a\."),
        ({"x": np.zeros(2, dtype=object)}, r"note\.x"),
        ({"x": np.zeros(2, dtype=[("a", "i4")])}, r"note\.x"),
        ({"x": np.ma.array([1])}, r"note\.x"),
        ({"x": defaultdict(lambda: 0)}, r"note\.x"),
        ({"x": type("Sub", (dict,), {})()}, r"note\.x: .*Sub"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(value, path):
    with pytest.raises(Unsupported, match=path):
        encode(value, "note", refuse)


def test_a_value_in_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(Unsupported, match="in itself"):
        encode(value, "note", refuse)


@pytest.mark.parametrize(
    "damaged",
    [
        {"$": "unknown", "v": 1},
        {"$": "float", "v": "zz"},
        {"$": "tuple"},
        {"$": "bytes", "v": "%"},
        {"$": "torch.dtype", "v": "nn"},
        {"$": "numpy.array", "v": "AA==", "dtype": "<f8", "shape": [1]},
        {"$": "dict", "v": [[1]]},
        {"$": "defaultdict", "v": [], "factory": "eval"},
        {"$": ["a"], "v": 1},
    ],
)
def test_what_is_no_tagged_json_is_corrupt(damaged):
    with pytest.raises(Corrupt):
        decode({"a": [damaged]}, refuse)


def test_metrics_are_plain_json(store):
    given = {"loss": torch.tensor(1.5), "n": np.int64(3), "bad": float("nan"), "list": (1, None)}
    expected = {"loss": 1.5, "n": 3, "bad": "nan", "list": [1, None]}
    assert plain_json(given, "metrics") == expected
    with checkpointer(store, {"x": 1}) as saver:
        saver.save(1, metrics=given).wait()
        with pytest.raises(ValueError, match=r"metrics\.a must be JSON"):
            saver.save(2, metrics={"a": {1}})


def test_generators_and_values_of_the_users_own(store):
    def build(seed):
        return {
            "torch": torch.Generator().manual_seed(seed),
            "generators": {
                "pcg": np.random.default_rng(seed),
                "philox": np.random.Generator(np.random.Philox(seed)),
                "mt": np.random.RandomState(seed),
                "python": random.Random(seed),
                "numbers": [],
            },
            "note": {"any": [1, (2, {3: float("inf")})], "count": seed, "array": np.zeros(3)},
            "best": float(seed),
            "history": deque(maxlen=3),
        }

    def train(state):
        parts = state["generators"]
        state["note"]["array"] += 1
        state["note"]["count"] += 1
        state["best"] = torch.rand(1, generator=state["torch"]).item() + torch.rand(1).item()
        state["history"].append(parts["python"].random() + random.random())
        drawn = [parts[name].normal() for name in ("pcg", "philox", "mt")]
        parts["numbers"].append([*drawn, np.random.normal()])

    fresh = build(2)
    note, array = fresh["note"], fresh["note"]["array"]
    round_trip(store, build, train, fresh=fresh)
    assert fresh["note"] is note, "containers keep their identity"
    assert fresh["note"]["array"] is array
    assert array.tolist() == [6.0, 6.0, 6.0]


def test_tensors_in_values_grow_and_vanish(store):
    state = {"replay": [], "named": {"a": torch.ones(2)}}
    frozen = []
    with checkpointer(store, state) as saver:
        for step in range(1, 4):
            state["replay"].append(torch.full((step,), float(step)))
            frozen.append(freeze(state))
            saver.step(step)
    for step in (1, 2, 3):
        fresh = {"replay": [], "named": {"a": torch.zeros(2)}}
        restore(store, fresh, f"{step}-1")
        check_same(freeze(fresh), frozen[step - 1])


def test_two_tensors_under_one_name_are_refused(store):
    with checkpointer(store, {"v": {1: torch.ones(1), "1": torch.zeros(1)}}) as saver:
        with pytest.raises(Unsupported, match=r"'v\.1': two tensors"):
            saver.save(1)
        saver.state["v"].popitem()
        saver.save(1)


def test_a_grad_scaler_that_is_enabled_no_more(store):
    """What it counts and draws: test_machine.py."""
    save(store, {"scaler": torch.amp.GradScaler("cpu")})
    with pytest.raises(Mismatch, match="'scaler' was enabled"):
        restore(store, {"scaler": torch.amp.GradScaler("cpu", enabled=False)})


@pytest.mark.parametrize(
    "value", [{"$": "tensor"}, {"$": "tensor", "v": {"a": []}, "device": "cpu"}]
)
def test_a_reference_that_is_no_name_is_corrupt(value):
    assert references([value]) == []
    with pytest.raises(Corrupt):
        decode(value, lambda name, device: {}[name])
