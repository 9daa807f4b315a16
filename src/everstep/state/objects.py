"""Tagged JSON: Python values as JSON that comes back with equal types. No pickle, nothing to run.

None, bool, int (of 64 bits), str, finite floats, lists and dicts with string keys stand for
themselves. All else is {"$": kind, "v": value}; docs/format.md lists the kinds. What is not listed
is refused, with its path.
"""

import base64
import contextlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from everstep.errors import Corrupt, Unsupported

Json = Any
TensorSink = Callable[[str, torch.Tensor], str]
"""Takes a tensor and the path at which it was found; returns the name under which it is stored."""

_DEPTH_MAX = 100
_LOADER_ADVICE = ", or use torchdata's StatefulDataLoader, which has them"
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}
_EMPTY_ITEMS_MAX = 1 << 20
_NONSENSE = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError),
    *(RuntimeError, struct.error),
)
"""What comes of documents that say something else than what was encoded. torch raises RuntimeError
for shapes and names that it does not know, python a RecursionError, which is one."""
PASSING = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
"""What says nothing of documents, though it is a RuntimeError."""
_PLAIN = (bool, int, str, type(None))


class Foreign:
    """What stands for a value of another library's: its bytes are elsewhere, or it is not made."""

    __slots__ = ()

    def encode(self, path: str, sink: Callable[[str, Any], str]) -> Json:
        """As `encode` has it."""
        raise NotImplementedError


def encode(value: object, path: str, sink: TensorSink, depth: int = 0) -> Json:
    """`value` as tagged JSON; each tensor goes to `sink` and a reference stays in its place.

    Raises Unsupported, with the path, for a value that has no kind of its own: a subclass of
    a known type counts as one, because it would come back as another type.
    """
    kind = type(value)
    if kind in _PLAIN:
        return _encode_plain(value) if kind in (int, str) else value
    if depth > _DEPTH_MAX:
        raise Unsupported(
            f"encoding {path}: it is nested more than {_DEPTH_MAX} deep, or in itself"
        )
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, path, sink, depth + 1)
    if isinstance(value, torch.Tensor):
        return _tag("tensor", sink(path, value), device=place_of(value.device))
    if isinstance(value, Foreign):
        return value.encode(path, sink)
    if isinstance(value, np.generic):
        return _tag("numpy.scalar", _bytes(value.tobytes()), dtype=_dtype(value.dtype, path))
    raise Unsupported(
        f"encoding {path}: a {kind.__module__}.{kind.__qualname__} cannot be stored. Checkpoints "
        f"hold tensors, numbers, strings, bytes, lists, tuples, dicts, sets, numpy arrays, dtypes "
        f"and devices, and no pickle: give the object state_dict() and load_state_dict() methods "
        f"that use those"
        f"{_LOADER_ADVICE if isinstance(value, DataLoader) else ''}"
    )


def place_of(device: torch.device) -> str:
    """A device's name, without its number where it is the process's own GPU (the current one): of
    each rank it is another."""
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        return device.type
    return str(device)


def device_of(place: str | torch.device) -> torch.device:
    """The inverse: that device, or the CPU in the place of a GPU that is not here, and of "meta",
    which has no memory."""
    device = torch.device(place)
    is_gone = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    return torch.device("cpu") if is_gone or device.type == "meta" else device


def decode(value: Json, tensors: Callable[[str, str], torch.Tensor]) -> Any:
    """The inverse of `encode`; `tensors` returns the tensor of a stored name, for a device. Raises
    Corrupt for what `encode` never made."""
    with as_stored(f"decoding an object, {str(value)[:200]}"):
        return _decode(value, tensors)


def _decode(value: Json, tensors: Callable[[str, str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    return _DECODERS[value["$"]](value, tensors)


@contextlib.contextmanager
def as_stored(doing: str) -> Iterator[None]:
    """Raises Corrupt where what is done within shows that documents say what no run has written."""
    try:
        yield
    except PASSING:
        raise
    except _NONSENSE as error:
        text = f"{type(error).__name__}: {error}"
        raise Corrupt(f"{doing}: it is not what such a thing is stored as ({text:.200})") from error


def plain_json(value: Any, path: str) -> Json:
    """`value` as plain JSON that people read: 0-d tensors and numpy scalars become numbers,
    infinities and nan strings. Raises ValueError, with the path, for what is no JSON."""
    if isinstance(value, (np.generic, torch.Tensor)) and value.ndim == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str) and _is_text(value):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain_json(item, f"{path}.{key}") for key, item in value.items()}
    raise ValueError(
        f"{path} must be JSON (numbers, strings, lists, dicts with string keys), not {value!r}"
    )


def _tag(kind: str, value: Json, **more: Json) -> Json:
    return {"$": kind, "v": value, **more}


def _bytes(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode()


def _dtype(dtype: "np.dtype[Any]", path: str) -> str:
    if dtype.hasobject or dtype.kind == "V":  # structures, and types of other packages (ml_dtypes)
        raise Unsupported(f"encoding {path}: numpy arrays of dtype {dtype} cannot be stored")
    return dtype.str


def _items(value: Any, path: str, sink: TensorSink, depth: int) -> Json:
    return [encode(item, f"{path}.{index}", sink, depth) for index, item in enumerate(value)]


def _pairs(value: Any, path: str, sink: TensorSink, depth: int) -> Json:
    return [
        [encode(key, f"{path}.<key>", sink, depth), encode(item, f"{path}.{key}", sink, depth)]
        for key, item in value.items()
    ]


def _encode_plain(value: Any) -> Json:
    """Strings that are no UTF-8 (os.fsdecode makes such) and integers that do not fit into 64
    bits."""
    if type(value) is str:
        if value.isascii() or _is_text(value):
            return value
        return _tag("str", _bytes(value.encode("utf-8", "surrogatepass")))
    return value if -(2**63) <= value < 2**64 else _tag("int", hex(value))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_dict(value: dict[Any, Any], path: str, sink: TensorSink, depth: int) -> Json:
    if all(type(key) is str and _is_text(key) for key in value) and "$" not in value:
        return {key: encode(item, f"{path}.{key}", sink, depth) for key, item in value.items()}
    return _tag("dict", _pairs(value, path, sink, depth))


def _encode_set(value: Any, path: str, sink: TensorSink, depth: int) -> Json:
    return _tag(type(value).__name__, _items(sorted(value, key=repr), path, sink, depth))


def _encode_float(value: float, path: str, sink: TensorSink, depth: int) -> Json:
    return value if isfinite(value) else _tag("float", struct.pack(">d", value).hex())


def _encode_defaultdict(value: Any, path: str, sink: TensorSink, depth: int) -> Json:
    factory = value.default_factory
    if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise Unsupported(
            f"encoding {path}: a defaultdict with factory {factory!r} cannot be stored"
        )
    name = factory.__name__ if factory else None
    return _tag("defaultdict", _pairs(value, path, sink, depth), factory=name)


def _encode_array(value: Any, path: str, sink: TensorSink, depth: int) -> Json:
    data = _bytes(np.ascontiguousarray(value).tobytes())
    return _tag("numpy.array", data, dtype=_dtype(value.dtype, path), shape=list(value.shape))


def _decode_array(tag: Json) -> "np.ndarray[Any, Any]":
    dtype = np.dtype(tag["dtype"])
    if dtype.str != tag["dtype"]:
        raise ValueError(f"{tag['dtype']!r} is no dtype of an array")
    if dtype.itemsize == 0:  # empty strings, each of which takes memory all the same
        if prod(tag["shape"]) > _EMPTY_ITEMS_MAX:
            raise ValueError(f"no array of empty strings has the shape {tag['shape']}")
        return np.zeros(tag["shape"], dtype)
    flat = np.frombuffer(base64.b64decode(tag["v"], validate=True), dtype=dtype)
    return flat.reshape(tag["shape"]).copy()


def _torch_attribute(name: str, kind: type) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise ValueError(f"torch.{name} is no {kind.__name__}")
    return value


_ENCODERS: dict[type, Callable[[Any, str, TensorSink, int], Json]] = {
    float: _encode_float,
    list: _items,
    dict: _encode_dict,
    set: _encode_set,
    frozenset: _encode_set,
    defaultdict: _encode_defaultdict,
    np.ndarray: _encode_array,
    tuple: lambda v, path, sink, depth: _tag("tuple", _items(v, path, sink, depth)),
    torch.Size: lambda v, path, sink, depth: _tag("torch.Size", list(v)),
    OrderedDict: lambda v, path, sink, depth: _tag("OrderedDict", _pairs(v, path, sink, depth)),
    Counter: lambda v, path, sink, depth: _tag("Counter", _pairs(v, path, sink, depth)),
    deque: lambda v, path, sink, depth: _tag(
        "deque", _items(v, path, sink, depth), maxlen=v.maxlen
    ),
    bytes: lambda v, path, sink, depth: _tag("bytes", _bytes(v)),
    bytearray: lambda v, path, sink, depth: _tag("bytearray", _bytes(v)),
    complex: lambda v, path, sink, depth: _tag("complex", struct.pack(">dd", v.real, v.imag).hex()),
    range: lambda v, path, sink, depth: _tag("range", [v.start, v.stop, v.step]),
    torch.dtype: lambda v, path, sink, depth: _tag("torch.dtype", str(v).removeprefix("torch.")),
    torch.device: lambda v, path, sink, depth: _tag("torch.device", str(v)),
}
_Tensors = Callable[[str, str], torch.Tensor]


def _decoded_pairs(tag: Json, tensors: _Tensors) -> list[tuple[Any, Any]]:
    return [(_decode(key, tensors), _decode(item, tensors)) for key, item in tag["v"]]


_DECODERS: dict[str, Callable[[Json, _Tensors], Any]] = {
    "int": lambda tag, tensors: int(tag["v"], 16),
    "str": lambda tag, tensors: base64.b64decode(tag["v"], validate=True).decode(
        "utf-8", "surrogatepass"
    ),
    "float": lambda tag, tensors: struct.unpack(">d", bytes.fromhex(tag["v"]))[0],
    "complex": lambda tag, tensors: complex(*struct.unpack(">dd", bytes.fromhex(tag["v"]))),
    "tuple": lambda tag, tensors: tuple(_decode(tag["v"], tensors)),
    "set": lambda tag, tensors: set(_decode(tag["v"], tensors)),
    "frozenset": lambda tag, tensors: frozenset(_decode(tag["v"], tensors)),
    "deque": lambda tag, tensors: deque(_decode(tag["v"], tensors), maxlen=tag["maxlen"]),
    "dict": lambda tag, tensors: dict(_decoded_pairs(tag, tensors)),
    "OrderedDict": lambda tag, tensors: OrderedDict(_decoded_pairs(tag, tensors)),
    "Counter": lambda tag, tensors: Counter(dict(_decoded_pairs(tag, tensors))),
    "defaultdict": lambda tag, tensors: defaultdict(
        _FACTORIES[tag["factory"]] if tag["factory"] else None, _decoded_pairs(tag, tensors)
    ),
    "bytes": lambda tag, tensors: base64.b64decode(tag["v"], validate=True),
    "bytearray": lambda tag, tensors: bytearray(base64.b64decode(tag["v"], validate=True)),
    "range": lambda tag, tensors: range(*tag["v"]),
    "numpy.array": lambda tag, tensors: _decode_array(tag),
    "numpy.scalar": lambda tag, tensors: _decode_array({**tag, "shape": [1]})[0],
    "torch.Size": lambda tag, tensors: torch.Size(tag["v"]),
    "torch.dtype": lambda tag, tensors: _torch_attribute(tag["v"], torch.dtype),
    "torch.device": lambda tag, tensors: torch.device(tag["v"]),
    "tensor": lambda tag, tensors: tensors(tag["v"], tag["device"]),
}


def tensors_in(objects: Callable[[TensorSink], object]) -> dict[str, torch.Tensor]:
    """What `objects` gives to a TensorSink, by the names under which it is stored."""
    found: dict[str, torch.Tensor] = {}

    def sink(name: str, tensor: torch.Tensor) -> str:
        found[name] = tensor
        return name

    objects(sink)
    return found


def without_tensors(value: Json) -> Json:
    """The same tagged JSON without members and items that are tensors."""
    if isinstance(value, list):
        return [without_tensors(item) for item in value if not _is_tensor(item)]
    if isinstance(value, dict):
        return {k: without_tensors(item) for k, item in value.items() if not _is_tensor(item)}
    return value


def _is_tensor(value: Json) -> bool:
    return isinstance(value, dict) and value.get("$") == "tensor"


def references(value: Json) -> list[str]:
    """The names of the tensors that tagged JSON refers to. What is no name is told by `decode`."""
    if not isinstance(value, (list, dict)):
        return []
    if isinstance(value, dict) and value.get("$") == "tensor" and isinstance(value.get("v"), str):
        return [value["v"]]
    items = value if isinstance(value, list) else value.values()
    return [name for item in items for name in references(item)]
