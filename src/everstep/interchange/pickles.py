"""Pickles, read by a machine of our own that runs nothing of what they name.

    opcodes (by pickletools) ──▶ stack, memo ──▶ numbers, texts, containers; else `Inert`

A global is a name here, and never imported. What a few names make (containers, tensors) is made by
functions of ours; all else becomes an `Inert`, which keeps what it was given.

Hostile ones: memory stays within a budget that goes by the pickle's size; keys of dicts are plain,
as hashing what is nested deeply takes the process's stack; cycles and what is shared a thousandfold
are found when a value is settled.
"""

import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch.storage import _dtype_to_storage_type_map

from everstep.errors import Unsupported
from everstep.format.dtypes import ITEM_SIZES
from everstep.interchange.tensors import Storage, Stretch, view_of
from everstep.sharding.leaves import dtype_name
from everstep.state.objects import Foreign, Json, encode

_BUDGET_BYTES, _BUDGET_MAX_BYTES, _BUDGET_PER_BYTE = 64 << 20, 4 << 30, 32
_COSTS = {"EMPTY_SET": 300, "FROZENSET": 300, "EMPTY_DICT": 300, "EMPTY_LIST": 150}
_COST = 100
_DEPTH_MAX = 100
_NODES_MAX = 1 << 22
_PLAIN_KEYS = (str, bytes, int, float, bool, complex, type(None))
_RANGE = "builtins.range"
"""Is not made: it says in few bytes that a set, or a shape, has any number of items."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name, "module.name"."""

    name: str


@dataclass(slots=True, eq=False)
class Inert(Foreign):
    """What somebody's class was to make: its name, what it was called with, and its state."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def encode(self, path: str, sink: Callable[[str, Any], str]) -> Json:
        """See Foreign. Raises Unsupported."""
        if self.kind == _RANGE:
            return encode(range(*self.args), path, sink)
        raise Unsupported(
            f"importing {path[:200]}: it is a {self.kind[:200]}, which nobody here knows, and is "
            f"made by no import"
        )

    def get(self, name: str) -> Any:
        """An attribute, as far as it is known."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return next(
            (each[name] for each in states if isinstance(each, dict) and name in each), None
        )


def read_pickle(data: bytes, where: object, beside: Mapping[str, Stretch]) -> Any:
    """The value of a pickle, settled: containers of its own, Found for tensors, arrays, dtypes;
    what else names make stays Inert. `beside`: where the storages of its tensors lie. Raises
    Unsupported, and what nonsense comes to (tensors.reading); nothing is executed."""
    budget = min(_BUDGET_MAX_BYTES, _BUDGET_BYTES + _BUDGET_PER_BYTE * len(data))
    machine = _Machine(beside, budget)
    for opcode, argument, _ in pickletools.genops(data):
        machine.budget -= _COSTS.get(opcode.name, _COST)
        if machine.budget < 0:
            raise Unsupported(f"reading {where}: a pickle that takes too much memory")
        if opcode.name == "STOP":
            break
        if opcode.name not in _STEPS:
            raise Unsupported(f"reading {where}: a pickle of old, or of extensions")
        _STEPS[opcode.name](machine, argument)
    return _settled(machine.stack.pop(), where)


class _Machine:
    def __init__(self, beside: Mapping[str, Stretch], budget: int) -> None:
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.beside, self.budget = beside, budget

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def put(self, index: Any) -> None:
        self.memo[len(self.memo) if index is None else int(index)] = self.stack[-1]

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError("a global whose name is no text")
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.", 1)
        self.push(_DTYPES.get(full) or Global(full))

    def call(self, function: Any, arguments: Any, named: Any = None) -> None:
        """Make what it makes here: never by importing it."""
        if not isinstance(function, Global) or type(arguments) is not tuple:
            raise TypeError(f"a call of a {type(function).__name__}")
        # What is made may be a copy of what it is given, at each call another one.
        self.budget -= _BUDGET_PER_BYTE * sum(len(a) for a in arguments if isinstance(a, Sized))
        made = _MAKERS.get(function.name)
        given = (*arguments, named) if named else arguments
        self.push(Inert(function.name, given) if made is None else made(*given))

    def build(self, state: Any) -> None:
        made = self.stack[-1]
        if isinstance(made, Inert):
            made.state = state

    def extend(self, items: Sequence[Any]) -> None:
        made = self.stack[-1]
        if type(made) in (list, deque):
            made.extend(items)
        elif not isinstance(made, Inert):
            raise TypeError(f"items for a {type(made).__name__}")

    def update(self, items: Sequence[Any]) -> None:
        made = self.stack[-1]
        if isinstance(made, Inert):
            return
        if not isinstance(made, dict) or len(items) % 2:
            raise TypeError(f"entries for a {type(made).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            made[_key(key)] = value

    def add(self, items: list[Any]) -> None:
        self.stack[-1].update(map(_key, items))

    def find_storage(self, identity: Any) -> None:
        kind, storage, key, _, count = identity
        if kind != "storage" or type(count) is not int:
            raise ValueError(f"no storage: {identity!r:.200}")
        # Of bytes, where tensors know what they are; or quantised, for tensors that stay Inert.
        dtype = _STORAGES.get(storage.name.rpartition(".")[2])
        stretch = self.beside[f"data/{key}"]
        if not 0 <= count * (ITEM_SIZES[dtype] if dtype else 1) <= stretch.size:
            raise ValueError(f"a storage of {count} items in {stretch.size} bytes")
        self.push(Storage(stretch, dtype))


def _key(value: Any) -> Any:
    """Of a dict or a set: hashing what is nested deeply takes the process's stack."""
    if type(value) is tuple:
        if len(value) > _DEPTH_MAX or not all(type(each) in _PLAIN_KEYS for each in value):
            raise TypeError("a key that is nested")
    elif type(value) not in (*_PLAIN_KEYS, Inert, Global, torch.dtype):
        raise TypeError(f"a key that is a {type(value).__name__}")
    return value


def _last(machine: _Machine, count: int) -> tuple[Any, ...]:
    if len(machine.stack) < count:
        raise IndexError("the stack is empty")
    items = tuple(machine.stack[-count:])
    del machine.stack[-count:]
    return items


_Step = Callable[[_Machine, Any], None]


def _takes(count: int, act: Callable[..., None]) -> _Step:
    """A step that is given so many from the top of the stack."""
    return lambda machine, _: act(machine, *_last(machine, count))


_PUSHED = "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINSTRING SHORT_BINSTRING BINUNICODE "
_PUSHED += "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8"
_STEPS: dict[str, _Step] = {
    **dict.fromkeys(_PUSHED.split(), lambda m, a: m.push(a)),
    **dict.fromkeys(("PROTO", "FRAME"), lambda m, a: None),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), lambda m, a: m.put(a)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, a: m.push(m.memo[int(a)])),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _takes(2, _Machine.call)),
    "NEWOBJ_EX": _takes(3, _Machine.call),
    "GLOBAL": lambda m, a: m.find(*a.split(" ", 1)),
    "STACK_GLOBAL": _takes(2, _Machine.find),
    "BUILD": _takes(1, _Machine.build),
    "BINPERSID": _takes(1, _Machine.find_storage),
    "NONE": lambda m, a: m.push(None),
    "NEWTRUE": lambda m, a: m.push(True),
    "NEWFALSE": lambda m, a: m.push(False),
    "EMPTY_TUPLE": lambda m, a: m.push(()),
    "TUPLE": lambda m, a: m.push(tuple(m.pop_mark())),
    "TUPLE1": lambda m, a: m.push(_last(m, 1)),
    "TUPLE2": lambda m, a: m.push(_last(m, 2)),
    "TUPLE3": lambda m, a: m.push(_last(m, 3)),
    "EMPTY_LIST": lambda m, a: m.push([]),
    "APPEND": _takes(1, lambda m, *items: m.extend(items)),
    "APPENDS": lambda m, a: m.extend(m.pop_mark()),
    "EMPTY_DICT": lambda m, a: m.push({}),
    "SETITEM": _takes(2, lambda m, *items: m.update(items)),
    "SETITEMS": lambda m, a: m.update(m.pop_mark()),
    "EMPTY_SET": lambda m, a: m.push(set()),
    "ADDITEMS": lambda m, a: m.add(m.pop_mark()),
    "FROZENSET": lambda m, a: m.push(frozenset(map(_key, m.pop_mark()))),
    "BYTEARRAY8": lambda m, a: m.push(bytearray(a)),
    "MARK": lambda m, a: m.mark(),
}


# ---- what names make -------------------------------------------------------------------------


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, *beside: Any, dtype: str | None = None
) -> Any:
    """`beside`: whether it has a gradient, its hooks, and where torch has not yet conjugated or
    negated what is stored, that it is to be."""
    if any(beside[2:]):
        return Inert("tensor that is yet to be conjugated or negated", beside)
    return view_of(storage, offset, shape, strides, dtype)


def _tensor_of_bytes(*given: Any) -> Any:
    return _tensor(*given[:6], *given[7:], dtype=dtype_of(given[6]))


def _subclass(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    if isinstance(function, Global) and _MAKERS.get(function.name) is _tensor:
        return _tensor(*arguments)
    return Inert("torch.Tensor", (function, kind, arguments))


def dtype_of(found: Any) -> str:
    """A dtype's name. Raises Unsupported for one that nobody here knows."""
    if not isinstance(found, torch.dtype):
        name = found.name if isinstance(found, Global) else repr(found)
        raise Unsupported(f"reading a tensor of dtype {name:.80}")
    return dtype_name(found)


def _filled(made: dict[Any, Any], items: Iterable[Any] = ()) -> dict[Any, Any]:
    for key, value in items:
        made[_key(key)] = value
    return made


def _defaultdict(factory: Any = None, *_: Any) -> "defaultdict[Any, Any]":
    known = {f"builtins.{kind.__name__}": kind for kind in (int, float, str, list, dict, set)}
    return defaultdict(known.get(factory.name) if isinstance(factory, Global) else None)


def _deque(items: Iterable[Any] = (), length: Any = None) -> "deque[Any]":
    return deque(items, length if type(length) is int else None)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 has bytes."""
    if type(text) is not str or encoding not in ("latin1", "utf-8", "utf8", "ascii"):
        raise TypeError("a text that is none")
    return text.encode(encoding)


def _bytes(made: Callable[[Any], Any], *given: Any) -> Any:
    """Never of a number, which says how many to take."""
    if not given:
        return made(b"")
    if type(given[0]) not in (bytes, bytearray, str, list):
        raise TypeError("bytes of something else")
    return made(given[0].encode("latin1") if type(given[0]) is str else given[0])


_DTYPES = {f"torch.{name}": getattr(torch, name) for name in ITEM_SIZES}
STORAGES: dict[str, Any] = {
    dtype_name(dtype): getattr(torch, kind)
    for dtype, kind in _dtype_to_storage_type_map().items()
    if dtype_name(dtype) in ITEM_SIZES
}
"""What a pickle calls the storage of a dtype; of others there are bytes alone."""
_STORAGES = {kind.__name__: dtype for dtype, kind in STORAGES.items()}
_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch.Size": lambda items=(): tuple(items),
    "torch.device": torch.device,
    "collections.OrderedDict": lambda *a: _filled(OrderedDict(), *a),
    "collections.Counter": lambda *a: _filled(Counter(), *(each.items() for each in a)),
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    "_codecs.encode": _encode,
    "builtins.set": lambda items=(): set(map(_key, items)),
    "builtins.frozenset": lambda items=(): frozenset(map(_key, items)),
    "builtins.bytes": lambda *a: _bytes(bytes, *a),
    "builtins.bytearray": lambda *a: _bytes(bytearray, *a),
    "builtins.complex": complex,
}


# ---- a value as a tree -------------------------------------------------------------------------


def _settled(value: Any, where: object) -> Any:
    """The same in containers of its own, with numpy's arrays. Raises Unsupported for what is nested
    too deeply, or in itself, or says a thing so often in few bytes that there are too many nodes.
    """
    left = _NODES_MAX

    def settle(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if depth > _DEPTH_MAX or left < 0:
            raise Unsupported(f"reading {where}: it is nested too deeply, or often")
        if type(value) in (*_PLAIN_KEYS, bytearray):
            return value
        if isinstance(value, dict):
            factory = (value.default_factory,) if isinstance(value, defaultdict) else ()
            made = type(value)(*factory)
            for key, item in value.items():
                made[key] = settle(item, depth + 1)
            return made
        if type(value) in (list, tuple, deque):
            items = [settle(each, depth + 1) for each in value]
            return deque(items, value.maxlen) if type(value) is deque else type(value)(items)
        return _resolved(value)

    return settle(value, 0)


def _resolved(leaf: Any) -> Any:
    """numpy's arrays and scalars as they are, of numbers or texts."""
    order: Any = "C"
    match leaf.kind if isinstance(leaf, Inert) else None:
        case "numpy.core.multiarray._reconstruct":
            _, shape, dtype, is_fortran, data = leaf.state
            order = "F" if is_fortran else "C"
        case "numpy.core.multiarray.scalar":
            (dtype, data), shape = leaf.args, (1,)
        case "numpy.core.numeric._frombuffer":
            data, dtype, shape, order = leaf.args
        case _:
            return leaf
    kind = _numpy_dtype(dtype)
    if kind is None:
        return leaf
    if type(data) not in (bytes, bytearray) or order not in ("C", "F"):
        raise TypeError("an array without bytes")
    if kind.itemsize * prod(shape) != len(data) or not kind.itemsize:
        raise ValueError(f"an array of shape {shape!r:.80} in {len(data)} bytes")
    made = np.frombuffer(data, kind).reshape(shape, order=order)
    return made[0] if leaf.kind.endswith("scalar") else made


def _numpy_dtype(said: Inert) -> "np.dtype[Any] | None":
    """None where it is of other things, such as objects or dates."""
    code = said.args[0]
    if said.kind != "numpy.dtype" or type(code) is not str or len(code) > 8:
        raise TypeError("no dtype of numbers")
    found = np.dtype(code)
    if found.hasobject or found.kind not in "biufcSU":
        return None
    order: Any = said.state[1] if said.state else "="
    return found.newbyteorder(order) if order in ("<", ">") else found
