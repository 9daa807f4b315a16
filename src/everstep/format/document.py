"""Sealed JSON documents: JSON objects whose last member is the digest of all bytes before it.

    {"format":1, ... ,"digest":"0123456789abcdef0123456789abcdef"}\n
    └──── what the digest covers ───┘

Any JSON parser reads one; 46 bytes at the end prove that the rest is what was written.
"""

import json
from typing import Any

import xxhash

from everstep.errors import Corrupt, Unsupported

FORMAT_VERSION = 1

_MARK = b',"digest":"'
_TAIL_SIZE = len(_MARK) + 32 + len(b'"}\n')


def seal(value: dict[str, Any]) -> bytes:
    """Encode `value` as a sealed document: a dict of plain JSON, not empty, without "digest"."""
    assert value
    assert "digest" not in value
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    body = text[:-1].encode()
    return body + _MARK + digest_of(body).encode() + b'"}\n'


def unseal(data: bytes | memoryview, path: object) -> dict[str, Any]:
    """Decode a sealed document; `path` is for messages only.

    Raises Corrupt where a byte differs from what was sealed, Unsupported for a format version that
    this library does not know.
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
        value: dict[str, Any] = json.loads(data)
        version = value.get("format", FORMAT_VERSION)
    except (ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"reading {path}: its digest is right, but it is no JSON: {error}") from error
    if version != FORMAT_VERSION:
        raise Unsupported(
            f"reading {path}: it has format version {version!r}, this everstep reads version "
            f"{FORMAT_VERSION}. Install the everstep that wrote it, or a newer one"
        )
    return value


def _shown(data: bytes) -> str:
    return data.decode(errors="backslashreplace").strip()


def digest_of(data: bytes | memoryview) -> str:
    """XXH3-128 of `data` as 32 hexadecimal digits. Releases the GIL for large buffers."""
    return xxhash.xxh3_128_hexdigest(data)
