"""Sealed JSON documents: JSON objects whose last member is the digest of all bytes before it.

    {"format":1, ... ,"digest":"0123456789abcdef0123456789abcdef"}\n
    └──── what the digest covers ───┘

Any JSON parser reads one; 46 bytes at the end prove that the rest is what was written. That it was
written by everstep nothing proves: so each kind of document has a shape, and is of that shape from
the first to the last member before anybody goes by it.
"""

import gc
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import wraps
from itertools import chain, repeat
from typing import Any, ParamSpec, TypeVar

import xxhash

from everstep.errors import Corrupt, Unsupported

FORMAT_VERSION = 1
P = ParamSpec("P")
T = TypeVar("T")

Shape = Any
"""What a JSON value has to be:

    str, bool, natural, ...     of that type, or what that function says yes to
    None                        null
    (shape, shape)              one of these
    [shape]                     a list of such
    [shape, shape, ...]         a list of as many members, each of its own shape
    {str: shape}                an object of such, under any names
    {"a": shape, "b?": shape}   an object with these members, of which "b" may be left out
"""

_DEPTH_MAX = 400  # four times that of the values that are encoded (state/objects.py)
_ABSENT = object()
_OBJECT: Shape = {}
_HEXADECIMAL = re.compile("[0-9a-f]*")

_MARK = b',"digest":"'
_TAIL_SIZE = len(_MARK) + 32 + len(b'"}\n')


def uncollected(work: Callable[P, T]) -> Callable[P, T]:
    """The same, without the garbage collector, which would go through a million new objects again
    and again: no document makes circles."""

    @wraps(work)
    def paused(*args: P.args, **keywords: P.kwargs) -> T:
        if not gc.isenabled():
            return work(*args, **keywords)
        gc.disable()
        try:
            return work(*args, **keywords)
        finally:
            gc.enable()

    return paused


def seal(value: dict[str, Any]) -> bytes:
    """Encode `value` as a sealed document, of this format: a dict of plain JSON, without "digest".
    A dataclass in it is an object of its members, but for those that are as by default."""
    assert "digest" not in value
    said, brief = {"format": FORMAT_VERSION, **value}, (",", ":")
    text = json.dumps(
        said, separators=brief, ensure_ascii=False, allow_nan=False, default=_as_object
    )
    body = text[:-1].encode()
    return body + _MARK + digest_of(body).encode() + b'"}\n'


def _as_object(value: Any) -> dict[str, Any]:
    rows = ((getattr(value, each.name), each) for each in fields(value))
    return {each.name: found for found, each in rows if found != each.default}


@uncollected
def unseal(data: bytes | memoryview, path: object, shape: Shape = _OBJECT) -> dict[str, Any]:
    """Decode a sealed document; `path` is for messages only.

    Raises Corrupt where a byte differs from what was sealed, or a member from `shape`; Unsupported
    for a format version that this library does not know.
    """
    data = bytes(data)
    body, tail = data[:-_TAIL_SIZE], data[-_TAIL_SIZE:]
    expected = _MARK + digest_of(body).encode() + b'"}\n'
    if tail != expected:
        raise Corrupt(
            f"reading {path}: its {len(data)} bytes do not match the digest at their end "
            f"(expected {_shown(expected)}, found {_shown(tail)}). The file was damaged or "
            f"cut short"
        )
    try:
        value: dict[str, Any] = json.loads(data, parse_constant=_refuse)
        version = value.get("format", FORMAT_VERSION)
    except (ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"reading {path}: its digest is right, but it is no JSON: {error}") from error
    if version != FORMAT_VERSION:
        raise Unsupported(
            f"reading {path}: it has format version {version!r}, this everstep reads version "
            f"{FORMAT_VERSION}. Install the everstep that wrote it, or a newer one"
        )
    if flaw := find_flaw(value, shape):
        raise malformed(path, flaw)
    return value


def malformed(path: object, flaw: object) -> Corrupt:
    """What to raise of a whole document whose content is not what the format says."""
    return Corrupt(
        f"reading {path}: its digest is right, but it is not what the format says: {flaw}"
    )


def find_flaw(value: Any, shape: Shape) -> str | None:
    """Where `value` is not of that shape, and what is there: ".parts[0].rank is -1"; or None."""
    if _fit([value], shape):
        return None
    if isinstance(shape, tuple):
        return max((str(find_flaw(value, each)) for each in shape), key=len)  # of what was nearest
    found = ((at, find_flaw(item, inner)) for at, item, inner in _members(value, shape))
    return next((f"{at}{flaw}" for at, flaw in found if flaw), f" is {_brief(value)}")


def _members(value: Any, shape: Shape) -> Iterable[tuple[str, Any, Shape]]:
    """What is in it, and of which shape each has to be; nothing where it is no such container."""
    if isinstance(shape, list) and type(value) is list and len(shape) in (1, len(value)):
        shapes = shape if len(shape) > 1 else repeat(shape[0])
        return ((f"[{at}]", *row) for at, row in enumerate(zip(value, shapes, strict=False)))
    if not isinstance(shape, dict) or type(value) is not dict:
        return ()
    if str in shape:
        return ((f".{key}", item, shape[str]) for key, item in value.items())
    rows = ((name, name.removesuffix("?"), inner) for name, inner in shape.items())
    return (
        (f".{key}", value.get(key, _ABSENT), inner)
        for name, key, inner in rows
        if key == name or key in value
    )


def _fit(values: Sequence[Any], shape: Shape) -> bool:
    """Whether each of `values` is of that shape. It takes a call for each member of the shape, not
    of the documents: equal members of all values are looked at together."""
    if not values:
        return True
    if isinstance(shape, tuple):
        return all([any(_fit([value], each) for each in shape) for value in values])
    if not isinstance(shape, (list, dict)):
        return _are_leaves(values, shape)
    if set(map(type, values)) != {type(shape)}:
        return False
    if isinstance(shape, dict):
        if str in shape:
            return _fit([item for value in values for item in value.values()], shape[str])
        return all(_fit(_column(values, name), inner) for name, inner in shape.items())
    if len(shape) == 1:
        return _fit(list(chain.from_iterable(values)), shape[0])
    are_rows = set(map(len, values)) == {len(shape)}
    return are_rows and all(map(_fit, zip(*values, strict=True), shape))


def _are_leaves(values: Sequence[Any], shape: Shape) -> bool:
    if shape is None:
        return values.count(None) == len(values)
    if isinstance(shape, type):
        return set(map(type, values)) == {shape}
    if shape is natural:
        return set(map(type, values)) == {int} and min(values) >= 0 and natural(max(values))
    if shape is digest:
        are_long = set(map(type, values)) == {str} and set(map(len, values)) == {32}
        return are_long and _HEXADECIMAL.fullmatch("".join(values)) is not None
    return all(map(shape, values))


def _column(values: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """That member of all values that have it; of those that must have it, _ABSENT is one as well,
    which is of no shape."""
    if name.endswith("?"):
        key = name.removesuffix("?")
        return [value[key] for value in values if key in value]
    return [value.get(name, _ABSENT) for value in values]


def natural(value: object) -> bool:
    """Whether it is a number of something: of bytes, a step, an index."""
    return type(value) is int and 0 <= value < 1 << 62


def digest(value: object) -> bool:
    """Whether it is one, of whatever bytes."""
    return _are_leaves([value], digest)


def anything(value: object, depth: int = 0) -> bool:
    """Any JSON that is not nested so deep that it takes a program's stack to look at it."""
    if type(value) is dict or type(value) is list:
        items = value.values() if type(value) is dict else value
        return depth < _DEPTH_MAX and all([anything(item, depth + 1) for item in items])
    return value is not _ABSENT


def _brief(value: object) -> str:
    if value is _ABSENT:
        return "not there"
    return f"{value!r:.80}" if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _shown(data: bytes) -> str:
    return data.decode(errors="backslashreplace").strip()


def digest_of(data: bytes | memoryview) -> str:
    """XXH3-128 of `data` as 32 hexadecimal digits. Releases the GIL for large buffers."""
    return xxhash.xxh3_128_hexdigest(data)
