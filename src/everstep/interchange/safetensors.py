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
    if not indices:
        return read_file(files[0])
    told = json.loads(regular(indices[0]).read_bytes())["weight_map"]
    shards = {file: read_file(named(path, file, indices[0])) for file in set(told.values())}
    return {name: shards[file][name] for name, file in told.items()}


def read_file(path: Path) -> dict[str, Found]:
    """The tensors of a file, whose bytes are read later. Raises Corrupt, Unsupported, and what
    nonsense comes to (tensors.reading)."""
    lies = Stretch(path, 0, regular(path).stat().st_size)
    length = int.from_bytes(lies.part(0, 8).read(), "little")
    if length > HEADER_BYTES_MAX:
        raise Corrupt(f"reading {path}: a header of {length} bytes in a file of {lies.size}")
    rows = json.loads(lies.part(8, length).read(), object_pairs_hook=_pairs)
    said = rows.pop("__metadata__", None) or ()
    if "DCP_SHARDING_INFO" in said and path.name.startswith("shard-"):
        raise Unsupported(
            f"reading {path}: it has one rank's shards. torch makes whole files of all of them: "
            f"consolidate_safetensors_files()"
        )
    data, found = lies.part(8 + length, lies.size - 8 - length), dict[str, Found]()
    for name, row in rows.items():
        kind, shape = row["dtype"], lengths(row["shape"])
        start, end = lengths(row["data_offsets"])
        if kind not in _DTYPES:
            raise Unsupported(f"reading {path}: {name!r:.200} is of dtype {kind!r:.80}")
        found[name] = Found.whole(_DTYPES[kind], shape, data.part(start, end - start))
        if found[name].size != end - start:
            raise ValueError(f"{name!r} of shape {shape} in bytes {start} to {end}")
    return found


def _pairs(rows: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(rows)
    if len(found) < len(rows):
        raise ValueError("a name comes twice")
    return found
