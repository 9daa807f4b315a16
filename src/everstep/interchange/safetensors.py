"""safetensors files: 8 bytes of length, a JSON header, the tensors' bytes without gaps.

https://github.com/huggingface/safetensors#format. The library writes a file from tensors that are
all in memory; here they come one after another.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from everstep.errors import Corrupt, Unsupported
from everstep.format.dtypes import CARRIED, ITEM_SIZES
from everstep.format.packs import Entries
from everstep.interchange.tensors import Found, Stretch, lengths, named, regular

INDEX = "*.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000
"""The library refuses longer ones."""

_KINDS = {name: kind for name, (kind, _) in CARRIED.items()} | {
    "complex64": "C64",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_DTYPES = {kind: name for name, kind in _KINDS.items()}


def header_of(shapes: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """The beginning of a file of tensors, whose dtypes and shapes are given, in this order. Raises
    Unsupported for what no such file can hold."""
    rows, start = dict[str, object]({"__metadata__": {"format": "pt"}}), 0
    for name, (dtype, shape) in shapes.items():
        if dtype not in _KINDS:
            raise Unsupported(f"exporting {name!r}: {dtype} is no dtype of safetensors files")
        end = start + ITEM_SIZES[dtype] * prod(shape)
        rows[name] = {"dtype": _KINDS[dtype], "shape": [*shape], "data_offsets": [start, end]}
        start = end
    header = Entries(rows).encode()
    if len(header) > HEADER_BYTES_MAX:
        raise Unsupported(f"exporting {len(shapes)} tensors to one file: choose smaller shards")
    return header


def is_any(path: Path) -> bool:
    """Whether it is such a file, or a folder of Hugging Face's with such ones."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return any(path.glob(INDEX)) or any(path.glob("*.safetensors"))


def read_weights(path: Path) -> dict[str, Found]:
    """The tensors of a file, or of a folder: of the shards that its index names, or of its only
    file. Raises Missing, Corrupt, Unsupported."""
    if path.is_file():
        return read_file(path)
    indices, files = sorted(path.glob(INDEX)), sorted(path.glob("*.safetensors"))
    if len(indices) > 1 or (not indices and len(files) != 1):
        raise Unsupported(
            f"reading {path}: it has {len(indices)} indices and {len(files)} safetensors files. "
            f"Name the file that is meant"
        )
    return _read_shards(path, indices[0]) if indices else read_file(files[0])


def _read_shards(folder: Path, index: Path) -> dict[str, Found]:
    shards: dict[str, list[str]] = {}
    for name, file in json.loads(regular(index).read_bytes())["weight_map"].items():
        shards.setdefault(file, []).append(name)
    found: dict[str, Found] = {}
    for file, names in shards.items():
        shard = read_file(named(folder, file, index))
        if absent := sorted(set(names) - shard.keys()):
            raise Corrupt(f"reading {folder / file}: it has no {absent[0]!r:.200}")
        found |= {name: shard[name] for name in names}
    return found


def read_file(path: Path) -> dict[str, Found]:
    """The tensors of a file, whose bytes are read later. Raises Corrupt, Unsupported, and what
    nonsense comes to (tensors.reading)."""
    size = regular(path).stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_BYTES_MAX):
            raise Corrupt(f"reading {path}: a header of {length} bytes in a file of {size}")
        text = file.read(length)
    rows = json.loads(text, object_pairs_hook=_pairs)
    said = rows.pop("__metadata__", None) or ()
    if "DCP_SHARDING_INFO" in said and path.name.startswith("shard-"):
        raise Unsupported(
            f"reading {path}: it has one rank's shards. torch makes whole files of all of them: "
            f"consolidate_safetensors_files()"
        )
    return {name: _found(path, name, row, 8 + length, size) for name, row in rows.items()}


def _found(path: Path, name: str, row: Any, start: int, size: int) -> Found:
    kind, shape, (begin, end) = row["dtype"], lengths(row["shape"]), lengths(row["data_offsets"])
    if kind not in _DTYPES:
        raise Unsupported(f"reading {path}: {name!r:.200} is of dtype {kind!r:.80}")
    if ITEM_SIZES[_DTYPES[kind]] * prod(shape) != end - begin or start + end > size:
        raise ValueError(f"{name!r} of shape {shape} in bytes {begin} to {end} of {size}")
    stretch = Stretch(path, start + begin, end - begin)
    return Found.whole(_DTYPES[kind], shape, stretch)


def _pairs(rows: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(rows)
    if len(found) < len(rows):
        raise ValueError("a name comes twice")
    return found
