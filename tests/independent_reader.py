"""A second reader of the format, written from docs/format.md alone: it must never import everstep.

python tests/independent_reader.py STORE [STEP]      verifies and lists a checkpoint
"""

import json
import math
import re
import struct
import sys
from pathlib import Path

import xxhash
from safetensors import safe_open

CHUNK = 4 << 20
PAGE = 4096
PLAIN = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16",
    "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1}
ITEM |= {f"{kind}{bits}": bits // 8 for kind in "IU" for bits in (8, 16, 32, 64)}
AS_BYTES = {
    "complex128": 16, "complex64": 8, "complex32": 4, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip


class Damaged(Exception):
    """The store is not what the format says."""


def need(condition: object, what: str) -> None:
    if not condition:
        raise Damaged(what)


def hexdigest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def document(path: Path) -> dict:
    data = path.read_bytes()
    body, tail = data[:-46], data[-46:]
    need(tail == b',"digest":"' + hexdigest(body).encode() + b'"}\n', f"{path}: seal")
    value = json.loads(data)
    need(value["format"] == 1, f"{path}: version {value['format']}")
    return value


def checkpoints(store: Path) -> dict[tuple[int, int], Path]:
    found = {}
    for path in store.glob("checkpoints/*/manifest.json"):
        if match := re.fullmatch(r"(\d+)-(\d+)", path.parent.name):
            found[int(match[1]), int(match[2])] = path
    return found


def lineage(store: Path) -> list[tuple[int, int]]:
    epochs = {int(path.stem): document(path) for path in store.glob("epochs/*.json")}
    limits, number, limit = {}, max(epochs, default=None), math.inf
    while number is not None:
        limits[number] = limit
        limit = min(limit, epochs[number]["fork"])
        number = epochs[number]["parent"]
    chosen: dict[int, int] = {}
    for step, epoch in checkpoints(store):
        if step <= limits.get(epoch, -1):
            chosen[step] = max(epoch, chosen.get(step, 0))
    return sorted(chosen.items())


def inside(store: Path, path: str) -> Path:
    need(re.fullmatch(r"[\w.-]+(/[\w.-]+)*", path) and ".." not in path, f"unsafe path {path!r}")
    return store / path


def read_part(store: Path, part: dict) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    link = part["table"]
    raw = inside(store, link["path"]).read_bytes()
    need((len(raw), hexdigest(raw)) == (link["size"], link["digest"]), f"{link['path']}: digest")
    table = document(store / link["path"])
    files = [inside(store, pack["path"]) for pack in part["packs"]]
    data = [path.read_bytes() for path in files]
    used: list[int] = []
    covered = [bytearray(len(raw)) for raw in data]

    def check(pack: int, at: int, size: int, index: int) -> None:
        need(at + size <= len(data[pack]), f"{files[pack]}: too short")
        found = hexdigest(data[pack][at : at + size])
        need(found == part["digests"][index], f"{files[pack]}: {size} bytes at {at}")
        need(not any(covered[pack][at : at + size]), f"{files[pack]}: overlap at {at}")
        covered[pack][at : at + size] = b"\1" * size
        used.append(index)

    for number, pack in enumerate(table["packs"]):
        need(len(data[number]) == pack["size"] == part["packs"][number]["size"], "pack size")
        need(pack["size"] % PAGE == 0 and pack["header"] % PAGE == 0, "pack alignment")
        check(number, 0, pack["header"], pack["digest"])
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for row in table["tensors"]:
        (piece,) = row["pieces"]  # version 1 as written today: every tensor whole
        need(piece["codec"] == "raw", "codec")
        need(not any(piece["offsets"]) and piece["lengths"] == row["shape"], "box")
        number, at, size = piece["pack"], piece["at"], piece["size"]
        for index, start in enumerate(range(0, max(size, 1), CHUNK)):
            check(number, at + start, min(CHUNK, size - start), piece["digest"] + index)
        item = AS_BYTES.get(row["dtype"]) or ITEM[PLAIN[row["dtype"]]]
        need(size == item * math.prod(row["shape"]), f"{row['name']}: size")
        need(at % (PAGE if size >= 1 << 20 else item) == 0, f"{row['name']}: alignment")
        for name in (row["name"], *row.get("aliases", ())):
            tensors[name] = (row["dtype"], tuple(row["shape"]), data[number][at : at + size])
    need(
        [row["name"] for row in table["tensors"]] == sorted(r["name"] for r in table["tensors"]),
        "order",
    )
    need(sorted(used) == list(range(len(part["digests"]))), "digests that cover nothing")
    for raw, seen, path in zip(data, covered, files, strict=True):
        need(
            not any(byte for byte, known in zip(raw, seen, strict=True) if not known),
            f"{path}: padding",
        )
        check_header(path, raw, table)
    return tensors


def check_header(path: Path, raw: bytes, table: dict) -> None:
    """The header says what the table says, to everybody who has only the safetensors library."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    with safe_open(path, "np") as file:
        need(set(file.keys()) == header.keys(), f"{path}: names")
    for row in table["tensors"]:
        (piece,) = row["pieces"]
        entry = header.get(row["name"])
        if entry is None:
            continue  # in another pack
        start = 8 + length + entry["data_offsets"][0]
        need(start == piece["at"], f"{path}: {row['name']} at {start}")
        plain = PLAIN.get(row["dtype"])
        expected = (plain, row["shape"]) if plain else ("U8", [piece["size"]])
        need((entry["dtype"], entry["shape"]) == expected, f"{path}: {row['name']}")


def read(store: Path, step: int | None = None) -> tuple[dict, dict]:
    """The manifest and the verified tensors (dtype, shape, bytes) of a step of the lineage."""
    document(store / "everstep.json")
    line = dict(lineage(store))
    step = max(line) if step is None else step
    manifest = document(checkpoints(store)[step, line[step]])
    need((manifest["step"], manifest["epoch"]) == (step, line[step]), "name")
    need(manifest["records"] == [], "records")
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for part in manifest["parts"]:
        tensors |= read_part(store, part)
    return manifest, tensors


if __name__ == "__main__":
    found, contents = read(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
    print(f"step {found['step']}, epoch {found['epoch']}: every byte is as it was written")
    for name, (dtype, shape, data) in sorted(contents.items()):
        print(f"  {name}  {dtype}{list(shape)}  {len(data)} bytes")
