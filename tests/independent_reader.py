"""A second reader of the format, written from docs/format.md alone: it must never import everstep.

python tests/independent_reader.py STORE [STEP]      verifies and lists a checkpoint

It cannot replay: of a log it checks the chain, and reads the records.
"""

import itertools
import json
import math
import operator
import re
import struct
import sys
from pathlib import Path

import numpy as np
import xxhash
import zstandard
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


Piece = tuple[str, dict, dict, bytes]  # name, row and piece of the table, raw bytes


def read_part(store: Path, part: dict) -> list[Piece]:
    link = part["table"]
    raw = inside(store, link["path"]).read_bytes()
    need((len(raw), hexdigest(raw)) == (link["size"], link["digest"]), f"{link['path']}: digest")
    table = document(store / link["path"])
    if "stored" in part:
        return read_packed(store, part, table)
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
    for _, number, at, size, index in chunks(table):
        check(number, at, size, index)
    pieces: list[Piece] = []
    for row in table["tensors"]:
        for piece in row["pieces"]:
            found = data[piece["pack"]][piece["at"] : piece["at"] + piece["size"]]
            pieces += [(name, row, piece, found) for name in (row["name"], *row.get("aliases", ()))]
    need(sorted(used) == list(range(len(part["digests"]))), "digests that cover nothing")
    for raw, seen, path in zip(data, covered, files, strict=True):
        need(
            not any(byte for byte, known in zip(raw, seen, strict=True) if not known),
            f"{path}: padding",
        )
        if "rest" not in table:  # else it has the names of another checkpoint
            check_header(path, raw, table)
    return pieces


def assemble(pieces: list[Piece]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The tensors (dtype, shape, bytes) whose pieces these are: each of their bytes in one."""
    found: dict[str, tuple[str, tuple[int, ...], bytearray, list[int]]] = {}
    for name, row, piece, raw in pieces:
        dtype, shape = row["dtype"], tuple(row["shape"])
        item = AS_BYTES.get(dtype) or ITEM[PLAIN[dtype]]
        size = item * math.prod(shape)
        if name not in found:
            found[name] = (dtype, shape, bytearray(size), bytearray(size))
        need(found[name][:2] == (dtype, shape), f"{name}: parts differ")
        data, covered = found[name][2:]
        strides = [item * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        *outer, last = piece["lengths"] or [1]
        run = last * item  # the elements of the last dim lie side by side
        base = sum(map(operator.mul, piece["offsets"], strides))
        for number, index in enumerate(itertools.product(*map(range, outer))):
            at = base + sum(map(operator.mul, index, strides))
            need(not any(covered[at : at + run]), f"{name}: overlap")
            data[at : at + run] = raw[number * run : (number + 1) * run]
            covered[at : at + run] = b"\1" * run
    for name, (_, _, _, covered) in found.items():
        need(all(covered), f"{name}: covered")
    return {name: (dtype, shape, bytes(data)) for name, (dtype, shape, data, _) in found.items()}


def chunks(table: dict) -> list[tuple[str, int, int, int, int]]:
    """Of each piece: tensor, pack, offset, size, index of the digest; in the order of the file."""
    found = []
    names = [row["name"] for row in table["tensors"]]
    need(names == sorted(names), "order")
    for row in [*table["tensors"], *table.get("rest", ())]:
        for piece in row["pieces"]:
            need(piece["codec"] == "raw", "codec")
            box = list(zip(piece["offsets"], piece["lengths"], row["shape"], strict=True))
            need(all(0 <= o <= o + n <= size for o, n, size in box), f"{row['name']}: box")
            at, size = piece["at"], piece["size"]
            item = AS_BYTES.get(row["dtype"]) or ITEM[PLAIN[row["dtype"]]]
            need(size == item * math.prod(piece["lengths"]), f"{row['name']}: size")
            need(at % (PAGE if size >= 1 << 20 else item) == 0, f"{row['name']}: alignment")
            for index, start in enumerate(range(0, max(size, 1), CHUNK), piece["digest"]):
                chunk = (row["name"], piece["pack"], at + start, min(CHUNK, size - start), index)
                found.append(chunk)
    return sorted(found, key=lambda chunk: (chunk[1], chunk[2], chunk[3]))


def read_packed(store: Path, part: dict, table: dict) -> list[Piece]:
    found = all_chunks(store, part, table)
    return [
        (name, row, piece, b"".join(found[index] for index in digests_of(piece)))
        for row in table["tensors"]
        for piece in row["pieces"]
        for name in (row["name"], *row.get("aliases", ()))
    ]


def all_chunks(store: Path, part: dict, table: dict, depth: int = 0) -> dict[int, bytes]:
    """The raw bytes of each chunk, by its digest."""
    need(len(part["packs"]) == len(table["packs"]), "packs")
    need(depth <= 8, "too many differences")
    found: dict[int, bytes] = {}
    for number, (pack, raw_pack) in enumerate(zip(part["packs"], table["packs"], strict=True)):
        here = [chunk for chunk in chunks(table) if chunk[1] == number]
        is_raw = raw_pack.get("still", False) or "stored" not in part
        found |= (raw_chunks if is_raw else packed_chunks)(store, part, pack, raw_pack, here)
    headers = {pack["digest"] for pack in table["packs"]}
    need(sorted(found.keys() | headers) == list(range(len(part["digests"]))), "unused digests")
    add_differences(store, part, table, found, depth)
    round_copies(part, table, found)
    return found


def add_differences(
    store: Path, part: dict, table: dict, found: dict[int, bytes], depth: int
) -> None:
    """To the chunks of the part with the same table, of an earlier checkpoint."""
    rows = [row for row in part.get("encoded", ()) if row[1] == "difference"]
    need(bool(rows) <= ("base" in part), "differences to nothing")
    if not rows:
        return
    said = part["base"]
    path = checkpoints(store)[said["step"], said["epoch"]]
    need(hexdigest(path.read_bytes()) == said["digest"], f"{path}: not what differences are to")
    (base,) = (each for each in document(path)["parts"] if each["table"] == part["table"])
    before = all_chunks(store, base, table, depth + 1)
    items = {
        index: AS_BYTES.get(row["dtype"]) or ITEM[PLAIN[row["dtype"]]]
        for row in table["tensors"]
        for piece in row["pieces"]
        for index in digests_of(piece)
    }
    for index, _, content in rows:
        dtype = np.dtype(f"<u{min(8, items[index])}")
        zigzag, old = np.frombuffer(found[index], dtype), np.frombuffer(before[index], dtype)
        halves = zigzag >> np.ones_like(zigzag)
        found[index] = (old + np.where(zigzag & np.ones_like(zigzag), ~halves, halves)).tobytes()
        need(content == hexdigest(found[index]), f"difference {index}: content")


def round_copies(part: dict, table: dict, found: dict[int, bytes]) -> None:
    """Chunks of which nothing is stored, as they are rounded from others."""
    masters = {row["name"]: row for row in table["tensors"]}
    rows = {
        index: row for row in table["tensors"] for p in row["pieces"] for index in digests_of(p)
    }
    copies = {row[0]: row for row in part.get("encoded", ()) if row[1].startswith("rounded:")}
    known = {index: data for index, data in found.items() if index not in copies}
    for index, codec, content in copies.values():
        (piece,) = (p for p in rows[index]["pieces"] if index in digests_of(p))
        master = masters[codec.partition(":")[2]]
        same = [
            p for p in master["pieces"] if all(p[k] == piece[k] for k in ("offsets", "lengths"))
        ]
        need(len(same) == 1 and master["dtype"] == "float32", f"{codec}: there is no such box")
        first = 2 * (index - piece["digest"])
        raw = b"".join(known[at] for at in digests_of(same[0])[first : first + 2])
        bits = np.frombuffer(raw, "<u4")
        if rows[index]["dtype"] == "bfloat16":
            rest, kept = bits & 0xFFFF, (bits >> 16).astype("<u2")
            data = kept + ((rest > 0x8000) | ((rest == 0x8000) & (kept % 2 == 1))).astype("<u2")
        else:
            need(rows[index]["dtype"] == "float16", f"{codec}: dtype")
            data = bits.view("<f4").astype("<f2")
            need(not np.isnan(data).any(), f"{codec}: not a number")
        found[index] = data.tobytes()
        at = CHUNK * (index - piece["digest"])
        need(len(found[index]) == min(CHUNK, piece["size"] - at), f"{codec}: size")
        need(hexdigest(found[index]) == content, f"{codec}: content")


def raw_chunks(store: Path, part: dict, pack: dict, raw_pack: dict, here: list) -> dict[int, bytes]:
    """Those of a still pack."""
    raw = inside(store, pack["path"]).read_bytes()
    need(len(raw) == pack["size"] == raw_pack["size"], "pack size")
    need(hexdigest(raw[: raw_pack["header"]]) == part["digests"][raw_pack["digest"]], "header")
    found = {index: raw[at : at + size] for _, _, at, size, index in here}
    need(all(hexdigest(data) == part["digests"][index] for index, data in found.items()), "digest")
    return found


def packed_chunks(
    store: Path, part: dict, pack: dict, raw_pack: dict, here: list
) -> dict[int, bytes]:
    raw = inside(store, pack["path"]).read_bytes()
    need(len(raw) == pack["size"] and len(raw) % PAGE == 0, "pack size")
    need(part["stored"][raw_pack["digest"]] == PAGE, "packed header")
    need(hexdigest(raw[:PAGE]) == part["digests"][raw_pack["digest"]], "packed header")
    with safe_open(inside(store, pack["path"]), "np") as file:
        need(list(file.keys()) == ["__packed__"], "packed entry")
    encoded = {row[0]: row[1:] for row in part.get("encoded", ())}
    found: dict[int, bytes] = {}
    at = PAGE
    for name, _, _, size, index in here:
        stored = part["stored"][index]
        need(at + stored <= len(raw), f"{name}: too short")
        chunk = raw[at : at + stored]
        need(hexdigest(chunk) == part["digests"][index], f"{name}: {stored} bytes at {at}")
        codec, content = encoded.get(index, ("planes", None))
        need("encoded" not in part or (index in encoded) == (stored < size), f"{name}: encoded")
        if stored < size and codec.startswith("rounded:"):
            need(stored == 0, f"{name}: rounded")
            chunk = bytes(size)  # round_copies
        elif stored < size:
            need(codec in ("planes", "zstd", "difference"), f"{name}: codec {codec}")
            decompressor = zstandard.ZstdDecompressor()
            is_frame = codec == "zstd"
            chunk = decompressor.decompress(chunk) if is_frame else from_planes(chunk, size)
            is_last = codec != "difference"  # add_differences
            need(not is_last or content in (None, hexdigest(chunk)), f"{name}: content")
        need(len(chunk) == size, f"{name}: size")
        found[index] = chunk
        at += stored
    need(not any(raw[at:]) and len(raw) - at < PAGE, "packed padding")
    return found


def digests_of(piece: dict) -> range:
    return range(piece["digest"], piece["digest"] + max(1, -(-piece["size"] // CHUNK)))


def from_planes(chunk: bytes, size: int) -> bytes:
    magic, item, zero, raw_size = struct.unpack("<2sBBI", chunk[:8])
    need((magic, zero, raw_size) == (b"P1", 0, size), "header of byte planes")
    count, at = size // item, 8 + 4 * item
    found = bytearray(size)
    for plane, stored in enumerate(struct.unpack(f"<{item}I", chunk[8:at])):
        data = chunk[at : at + stored]
        if stored not in (0, count):
            data = zstandard.ZstdDecompressor().decompress(data)
        need(len(data) == (count if stored else 0), f"plane {plane}")
        found[plane : item * count : item] = data or bytes(count)
        at += stored
    found[item * count :] = chunk[at:]
    need(len(found) == size, "tail of byte planes")
    return bytes(found)


def check_header(path: Path, raw: bytes, table: dict) -> None:
    """The header says what the table says, to everybody who has only the safetensors library."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    with safe_open(path, "np") as file:
        need(set(file.keys()) == header.keys(), f"{path}: names")
    pieces = [(row, piece) for row in table["tensors"] for piece in row["pieces"]]
    for row, piece in pieces:
        pairs = zip(piece["offsets"], piece["lengths"], strict=True)
        box = ",".join(f"{offset}:{offset + length}" for offset, length in pairs)
        name = row["name"] if piece["lengths"] == row["shape"] else f"{row['name']}[{box}]"
        entry = header.get(name)
        if entry is None:
            continue  # in another pack
        start = 8 + length + entry["data_offsets"][0]
        need(start == piece["at"], f"{path}: {name} at {start}")
        plain = PLAIN.get(row["dtype"])
        expected = (plain, piece["lengths"]) if plain else ("U8", [piece["size"]])
        need((entry["dtype"], entry["shape"]) == expected, f"{path}: {name}")


def read(store: Path, step: int | None = None) -> tuple[dict, dict]:
    """The manifest and the verified tensors (dtype, shape, bytes) of a step of the lineage."""
    document(store / "everstep.json")
    line = dict(lineage(store))
    step = max(line) if step is None else step
    manifest = document(checkpoints(store)[step, line[step]])
    need((manifest["step"], manifest["epoch"]) == (step, line[step]), "name")
    need(manifest["records"] == [], "records")
    return manifest, read_parts(store, manifest["parts"])


def read_parts(store: Path, parts: list[dict]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Those of one step have a tensor together; of several steps, the latest counts."""
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for step in sorted({part["steps"] for part in parts}):
        here = [part for part in parts if part["steps"] == step]
        tensors |= assemble([piece for part in here for piece in read_part(store, part)])
    return tensors


def read_log(store: Path, step: int | None = None) -> list[tuple[dict, dict]]:
    """What a step is rebuilt from: (manifest, verified tensors) of the state, then of each log. A
    record's are its gradients, and what no optimizer owns."""
    line = dict(lineage(store))
    step = max(line) if step is None else step
    found: list[tuple[dict, dict]] = []
    path, digest = checkpoints(store)[step, line[step]], None
    while path:
        need(digest in (None, hexdigest(path.read_bytes())), f"{path}: not what the log follows")
        manifest = document(path)
        previous, records = manifest.get("previous"), manifest["records"]
        need(bool(previous) == bool(records) != bool(manifest["parts"]), f"{path}: kind")
        parts = manifest["parts"] or [
            part for record in records for part in record.get("parts") or [record["part"]]
        ]
        found.append((manifest, read_parts(store, parts)))
        path = previous and checkpoints(store)[previous["step"], previous["epoch"]]
        digest = previous and previous["digest"]
        need(not previous or previous["step"] < records[0]["step"] <= manifest["step"], "steps")
    return found[::-1]


if __name__ == "__main__":
    *_, (found, contents) = read_log(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
    print(f"step {found['step']}, epoch {found['epoch']}: every byte is as it was written")
    for name, (dtype, shape, data) in sorted(contents.items()):
        print(f"  {name}  {dtype}{list(shape)}  {len(data)} bytes")
