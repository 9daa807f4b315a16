"""Pickles, read by Python's own machine, which may make nothing of what they name.

    opcodes ──▶ stack, memo ──▶ numbers, texts, lists, tuples, `Inert` ──▶ settled: all containers

A global is a name here, and never imported. What a few names make (containers, tensors) is made by
functions of ours, when all is read; all else stays an `Inert`, which keeps what it was given.

Hostile ones: memory stays within a budget that goes by the pickle's size; cycles, what is nested
deeply and what is shared a thousandfold are found when a value is settled, before it is hashed.
"""

import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from sys import getsizeof
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.storage import _dtype_to_storage_type_map

from everstep.errors import Corrupt, Unsupported
from everstep.format.dtypes import ITEM_SIZES
from everstep.interchange.tensors import BLOCK_BYTES, Found, Stretch, lengths
from everstep.sharding.leaves import bytes_of, dtype_name
from everstep.state.objects import Foreign, Json, encode

_BUDGET_BYTES, _BUDGET_MAX_BYTES, _BUDGET_PER_BYTE = 64 << 20, 5 << 30, 96
_COSTS = {"EMPTY_SET": 400, "FROZENSET": 400, "EMPTY_DICT": 400, "EMPTY_LIST": 150, "REDUCE": 250}
_COST = 100
_BYTES_MAX = 1 << 30
_DEPTH_MAX = 200
_PLAIN = (str, bytes, int, float, bool, complex, type(None))
_Unpickler: Any = pickle._Unpickler
_RANGE = "builtins.range"
"""Is not made: it says in few bytes that a set, or a shape, has any number of items."""


class Storage(NamedTuple):
    """What tensors are views of. `dtype`: None where it is bytes."""

    stretch: Stretch
    dtype: str | None


@dataclass(slots=True, eq=False)
class Inert(Foreign):
    """What somebody's class was to make: its name, what it was called with (None: it was not), its
    state, and its items, of a dict as pairs."""

    kind: str
    args: Any = None
    state: Any = None
    items: list[Any] = field(default_factory=list)

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

    # What Python's machine calls.

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        """Of a list or a set."""
        self.items.append(item)

    add = append


def read_pickle(lies: Stretch, beside: Mapping[str, Stretch]) -> Any:
    """The value of a pickle, settled: containers of its own, Found for tensors, arrays, dtypes;
    what else names make stays Inert. `beside`: where the storages of its tensors lie. Raises
    Corrupt, Unsupported, and what nonsense comes to (tensors.reading); nothing is executed."""
    if lies.size > _BYTES_MAX:
        raise Unsupported(f"reading {lies}: a pickle of {lies.size} bytes")
    machine = _Machine(lies, beside)
    try:
        value = machine.load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise Corrupt(f"reading {lies}: it is no whole pickle: {error}") from error
    return machine.settled(value, 0)


class _Machine(_Unpickler):  # type: ignore[misc]
    """Makes numbers, texts, lists, tuples and Inert, and nothing else."""

    def __init__(self, lies: Stretch, beside: Mapping[str, Stretch]) -> None:
        super().__init__(io.BytesIO(lies.read()), encoding="latin1")
        self._where, self._beside = lies, beside
        self._left = min(_BUDGET_MAX_BYTES, _BUDGET_BYTES + _BUDGET_PER_BYTE * lies.size)

    def spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise Unsupported(f"reading {self._where}: a pickle that takes too much memory")

    def refuse(self) -> None:
        """An opcode that none of them has to have."""
        raise Unsupported(f"reading {self._where}: a pickle of old, or of extensions")

    def find_class(self, module: str, name: str) -> Inert:
        """A name: as long as two texts that are there already."""
        self.spend(len(module) + len(name))
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return Inert(f"{module}.{name}".replace("numpy._core.", "numpy.core.", 1))

    def persistent_load(self, pid: Any) -> Storage:
        """A storage: of bytes, where tensors know what they are; or quantised, for tensors that
        stay Inert."""
        kind, storage, key, _, count = pid
        if kind != "storage" or type(key) is not str or type(count) is not int:
            raise ValueError("no storage")
        dtype = _STORAGES.get(storage.kind.rpartition(".")[2])
        stretch = self._beside[f"data/{key}"]
        if not 0 <= count * (ITEM_SIZES[dtype] if dtype else 1) <= stretch.size:
            raise ValueError(f"a storage of {count} items in {stretch.size} bytes")
        return Storage(stretch, dtype)

    def push(self, value: Any) -> None:
        """On the stack, whichever that is by now."""
        self.stack.append(value)

    def make(self, count: int) -> None:
        """What a class is called with, by a tuple, and (count: 3) by names: so it is noted."""
        function, arguments, *named = self.stack[-count:]
        if type(function) is not Inert or function.args is not None or type(arguments) is not tuple:
            raise TypeError(f"a call of a {type(function).__name__}")
        self.stack[-count:] = [Inert(function.kind, (*arguments, *named))]

    def settled(self, value: Any, depth: int) -> Any:
        """The same, made. Raises Unsupported for what is nested too deeply, or in itself, or says a
        thing so often in few bytes that it takes too much memory."""
        if depth > _DEPTH_MAX:
            raise Unsupported(f"reading {self._where}: it is nested too deeply")
        if type(value) in (list, tuple):
            made = type(value)(self._all_settled(value, depth))
        elif type(value) is Inert:
            args = value.args and tuple(self._all_settled(value.args, depth))
            state, *items = self._all_settled((value.state, *value.items), depth)
            made = _made(Inert(value.kind, args, state, items))
        else:
            return value
        self.spend(getsizeof(made))
        return made

    def _all_settled(self, values: Any, depth: int) -> list[Any]:
        return [v if type(v) in _PLAIN else self.settled(v, depth + 1) for v in values]


_OWN: dict[str, Callable[[_Machine], Any]] = {
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda m: m.make(2)),
    "NEWOBJ_EX": lambda m: m.make(3),
    "EMPTY_DICT": lambda m: m.push(Inert("builtins.dict", ())),
    "EMPTY_SET": lambda m: m.push(Inert("builtins.set", ())),
    "FROZENSET": lambda m: m.push(Inert("builtins.frozenset", (m.pop_mark(),))),
    "BYTEARRAY8": lambda m: m.push(bytearray(m.read(int.from_bytes(m.read(8), "little")))),
}
_SAFE = "PROTO FRAME STOP MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL "
_SAFE += "BINPERSID BUILD NONE NEWTRUE NEWFALSE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
_SAFE += "APPEND APPENDS SETITEM SETITEMS ADDITEMS BININT BININT1 BININT2 LONG1 BINFLOAT "
_SAFE += "BINSTRING SHORT_BINSTRING BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES "
_SAFE += "SHORT_BINBYTES BINBYTES8"


def _step(name: str) -> Callable[[Any], None]:
    """That of an opcode, which costs something."""
    act = _OWN.get(name) or _Unpickler.dispatch[getattr(pickle, name)[0]]
    cost = _COSTS.get(name, _COST)

    def step(machine: _Machine) -> None:
        machine.spend(cost)
        act(machine)

    return step


_Machine.dispatch = dict.fromkeys(range(256), _Machine.refuse) | {
    getattr(pickle, name)[0]: _step(name) for name in (*_OWN, *_SAFE.split())
}


# ---- what names make -------------------------------------------------------------------------


def _tensor(
    items: Any, storage: Any, offset: Any, shape: Any, strides: Any, *beside: Any, dtype: Any = None
) -> Any:
    """Elements of a storage. `beside`: whether it has a gradient, its hooks, and where torch has
    not yet conjugated or negated what is stored, that it is to be; `dtype`: None: the storage's.
    Raises Corrupt where they are not in it; Unsupported where they are more than it has."""
    if any(beside[2:]):
        return Inert("tensor that is yet to be conjugated or negated", beside)
    dtype = dtype or storage.dtype
    (offset,), shape, strides = lengths((offset,)), lengths(shape), lengths(strides)
    item, count = ITEM_SIZES[dtype], prod(shape)  # a storage of bytes alone has no elements
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    lies = storage.stretch
    if count and (offset + reach) * item > lies.size:
        raise Corrupt(f"reading {lies}: a tensor is larger than its storage")
    if count * item > lies.size:
        raise Unsupported(f"reading {lies}: a tensor's elements share memory. Clone it, and save")
    if torch.empty_strided(shape, strides, device="meta").is_contiguous():
        own = lies.part(offset * item if count else 0, count * item)
        return Found.whole(dtype, shape, own)
    return Found.whole(dtype, shape, _Strided(lies, dtype, offset, shape, strides))


@dataclass(frozen=True, slots=True)
class _Strided:
    """The `Blocks` of elements that do not lie in order."""

    stretch: Stretch
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __call__(self) -> Iterator[memoryview]:
        flat = torch.frombuffer(bytearray(self.stretch.read()), dtype=torch.uint8)
        item = ITEM_SIZES[self.dtype]
        elements = flat[: flat.numel() // item * item].view(getattr(torch, self.dtype))
        chosen = elements.as_strided(self.shape, self.strides, self.offset)
        view: memoryview = bytes_of(chosen).numpy().data
        yield from (view[at : at + BLOCK_BYTES] for at in range(0, len(view), BLOCK_BYTES))


def _subclass(items: Any, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    if isinstance(function, Inert) and _MAKERS.get(function.kind) is _tensor:
        return _tensor(items, *arguments)
    return Inert("torch.Tensor", (function, kind, arguments))


def dtype_of(found: Any) -> str:
    """A dtype's name. Raises Unsupported for one that nobody here knows."""
    if not isinstance(found, torch.dtype):
        name = found.kind if isinstance(found, Inert) else type(found).__name__
        raise Unsupported(f"reading a tensor of dtype {name:.80}")
    return dtype_name(found)


def _defaultdict(items: Any, factory: Any = None, *_: Any) -> dict[Any, Any]:
    known = {f"builtins.{kind.__name__}": kind for kind in (int, float, str, list, dict, set)}
    kind = known.get(factory.kind) if isinstance(factory, Inert) else None
    return defaultdict(kind, items)


def _all(items: Any, given: Any = ()) -> tuple[Any, ...]:
    """Never of a text, of which each character would be one."""
    if type(given) not in (list, tuple):
        raise TypeError("items of something else")
    return (*given, *items)


def _deque(items: Any, given: Any = (), length: Any = None) -> "deque[Any]":
    return deque(_all(items, given), length if type(length) is int else None)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 has bytes."""
    if type(text) is not str or encoding not in ("latin1", "utf-8", "utf8", "ascii"):
        raise TypeError("a text that is none")
    return text.encode(encoding)


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
    "torch._utils._rebuild_tensor_v3": lambda *a: _tensor(*a[:7], *a[8:], dtype=dtype_of(a[7])),
    "torch._utils._rebuild_parameter": lambda items, data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda items, data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch.device": lambda items, *a: torch.device(*a),
    "_codecs.encode": lambda items, *a: _encode(*a),
    "builtins.bytes": lambda items: b"",
    "builtins.bytearray": lambda items, x="", *_: bytearray(x if type(x) is bytes else _encode(x)),
    "builtins.complex": lambda items, *a: complex(*a),
    "builtins.dict": dict,
    "collections.OrderedDict": lambda *a: OrderedDict(_all(*a)),
    "collections.Counter": lambda items, own: Counter(own | dict(items)),
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    "builtins.set": lambda *a: set(_all(*a)),
    "builtins.frozenset": lambda *a: frozenset(_all(*a)),
    "torch.Size": _all,
}
"""Of their items, and what they were called with."""


def _made(said: Inert) -> Any:
    """What that is, if it is of a known kind; of numpy's arrays and scalars numbers and texts."""
    if said.args is None:
        return _DTYPES.get(said.kind, said)
    if make := _MAKERS.get(said.kind):
        return make(said.items, *said.args)
    order: Any = "C"
    match said.kind:
        case "numpy.core.multiarray._reconstruct":
            _, shape, dtype, is_fortran, data = said.state
            order = "F" if is_fortran else "C"
        case "numpy.core.multiarray.scalar":
            (dtype, data), shape = said.args, (1,)
        case "numpy.core.numeric._frombuffer":
            data, dtype, shape, order = said.args
        case _:
            return said
    kind = _numpy_dtype(dtype)
    if kind is None:
        return said
    if type(data) not in (bytes, bytearray) or order not in ("C", "F"):
        raise TypeError("an array without bytes")
    if kind.itemsize * prod(lengths(shape)) != len(data):
        raise ValueError(f"an array of shape {shape!r:.80} in {len(data)} bytes")
    made = np.frombuffer(data, kind).reshape(shape, order=order)
    return made[0] if said.kind.endswith("scalar") else made


def _numpy_dtype(said: Inert) -> "np.dtype[Any] | None":
    """None where it is of other things, such as objects, dates, or nothing."""
    code = said.args[0]
    if said.kind != "numpy.dtype" or type(code) is not str or len(code) > 8:
        return None
    found = np.dtype(code)
    if found.hasobject or found.kind not in "biufcSU" or not found.itemsize:
        return None
    order: Any = said.state[1] if said.state else "="
    return found.newbyteorder(order) if order in ("<", ">") else found
