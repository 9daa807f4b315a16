"""everstep show: one checkpoint, its tensors, packs, hyperparameters, objects and capture."""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from fnmatch import fnmatchcase
from textwrap import wrap
from typing import Any

from everstep.cli.render import (
    Cell,
    Column,
    Screen,
    age_text,
    align,
    brief,
    clean,
    pairs_text,
    plural,
    size_text,
    time_text,
)
from everstep.cli.target import add_json, add_words, split_words
from everstep.errors import Missing
from everstep.format.manifest import Manifest, Part, Table, TensorEntry
from everstep.format.packs import Piece, chunk_count
from everstep.store import catalog
from everstep.store.names import CheckpointName
from everstep.store.store import Store
from everstep.tiers.disk import Disk

_COLUMNS = (
    Column("TENSOR"),
    Column("DTYPE"),
    Column("SHAPE"),
    Column("SIZE", right=True),
    Column("DIGEST"),
    Column("PACK", right=True),
)
_DIGEST_DIGITS = 12
_LABEL_WIDTH = 12

Row = tuple[Part, TensorEntry]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_words(parser, "?")
    parser.add_argument(
        "--names",
        metavar="PATTERN",
        help="only tensors whose name holds PATTERN, or matches it if it has a *, ? or [",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the checkpoint; returns the exit code."""
    path, steps = split_words(args.words, 1)
    store, disk = Store(path), Disk(path)
    name = catalog.find(disk, steps[0] if steps else None)
    manifest = store.manifest(str(name))
    tables = store.tables(manifest)
    rows = [
        (part, entry)
        for part, table in zip(manifest.parts, tables, strict=True)
        for entry in table.tensors.values()
        if args.names is None or _is_chosen(entry, args.names)
    ]
    if args.names is not None and not rows:
        raise Missing(f"{path}: no tensor of step {name.step} has a name like {args.names!r}")
    tags = [tag for tag, tagged in catalog.read_tags(disk).items() if tagged == name]
    if args.json:
        print(json.dumps(_to_json(manifest, name, tags, rows), indent=2))
        return 0
    screen = Screen.of(sys.stdout)
    lines = [] if args.names else [*_summary(manifest, name, tags, tables, screen), ""]
    print("\n".join([*lines, *_tensor_lines(rows, screen)]))
    return 0


def _is_chosen(entry: TensorEntry, pattern: str) -> bool:
    found = (entry.spec.name, *entry.aliases)
    if any(character in pattern for character in "*?["):
        return any(fnmatchcase(name, pattern) for name in found)
    return any(pattern in name for name in found)


def _summary(
    manifest: Manifest, name: CheckpointName, tags: list[str], tables: list[Table], screen: Screen
) -> list[str]:
    parent = manifest.parent
    origin = f"after step {parent['step']} of epoch {parent['epoch']}" if parent else ""
    head = [
        Cell(f"step {manifest.step}", "title"),
        Cell(f" · epoch {manifest.epoch}"),
        Cell("".join(f" · {clean(tag)}" for tag in tags), "yellow"),
        Cell("" if manifest.exact else " · not exact", "bad"),
        Cell(f" · {name}", "dim"),
    ]
    written = f"{time_text(manifest.created)} ({age_text(manifest.created)})"
    objects = [(key, brief(value, 200).strip() or '""') for key, value in manifest.objects.items()]
    return [
        screen.join(head),
        *_section("written", [("", written)], screen),
        *_section("follows", [("", origin)], screen),
        *_section("metrics", [("", pairs_text(manifest.metrics))], screen),
        *_section("holds", [("", _holdings(manifest, tables))], screen),
        *_setting_lines("capture", manifest.capture, screen),
        *_setting_lines("topology", manifest.topology, screen),
        *_section("packs", _pack_pairs(manifest), screen),
        *_section("optimizers", _optimizer_pairs(manifest, tables), screen),
        *_section("objects", objects, screen),
    ]


def _holdings(manifest: Manifest, tables: list[Table]) -> str:
    """As "28 tensors, 124.0 KiB: model 9 (38.1 KiB) · optimizer 18 (81.0 KiB)", by first name."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in (entry for table in tables for entry in table.tensors.values()):
        part = entry.spec.name.partition(".")[0]
        counts[part] += 1
        sizes[part] += sum(piece.size for piece in entry.pieces)
    each = [f"{clean(part)} {counts[part]:,} ({size_text(sizes[part])})" for part in counts]
    whole = f"{plural(counts.total(), 'tensor')}, {size_text(manifest.size)}"
    return f"{whole}: {' · '.join(each)}" if each else whole


def _section(label: str, pairs: list[tuple[str, str]], screen: Screen) -> list[str]:
    """Keys and texts below each other, the label before the first; long texts go on indented."""
    pairs = [(clean(key) + "  " if key else "", text) for key, text in pairs if text.strip()]
    width = max((len(key) for key, _ in pairs), default=0)
    indent = 2 + _LABEL_WIDTH + width
    room = max(40, screen.width - indent) if screen.width else sys.maxsize
    lines = []
    for index, (key, text) in enumerate(pairs):
        first, *others = wrap(text, room, break_long_words=False, break_on_hyphens=False)
        title = Cell(f"  {'' if index else label:<{_LABEL_WIDTH}}", "dim")
        lines.append(screen.join([title, Cell(f"{key:<{width}}", "cyan"), Cell(first)]))
        lines += [" " * indent + other for other in others]
    return lines


def _setting_lines(label: str, values: dict[str, Any], screen: Screen) -> list[str]:
    """Settings on one line, and each group of them below on its own: "memory  slots 3 · …"."""
    groups = {key: value for key, value in values.items() if isinstance(value, dict)}
    plain = {key: value for key, value in values.items() if key not in groups}
    lines = _section(label, [("", _settings(plain))], screen)
    for key, group in groups.items():
        lines += _section(clean(key), [("", _settings(group))], screen)
    return lines


def _settings(values: dict[str, Any]) -> str:
    """As "slots 3 · budget 1.2 GiB" of {"slots": 3, "budget_bytes": …}."""
    return " · ".join(_setting(key, value) for key, value in values.items() if value is not None)


def _setting(key: str, value: Any) -> str:
    name = clean(key).removesuffix("_bytes")
    is_size = name != key and type(value) is int
    return f"{name.replace('_', ' ')} {size_text(value) if is_size else brief(value, 200)}"


def _pack_pairs(manifest: Manifest) -> list[tuple[str, str]]:
    packs = [pack for part in manifest.parts for pack in part.packs]
    return [(str(i), f"{clean(pack.path)}  {size_text(pack.size)}") for i, pack in enumerate(packs)]


def _optimizer_pairs(manifest: Manifest, tables: list[Table]) -> list[tuple[str, str]]:
    """Each optimizer's sets of hyperparameters, with how many parameters go by each."""
    pairs = []
    for optimizer, sets in manifest.hyperparameters.items():
        if not isinstance(sets, list):
            pairs.append((optimizer, brief(sets, 200)))
            continue
        members: Counter[int] = Counter()
        for table in tables:
            members.update(table.optimizers.get(optimizer, {}).get("groups", {}).values())
        for index, values in enumerate(sets):
            count = plural(members[index], "parameter")
            chosen = {k: v for k, v in values.items() if v is not None and v is not False}
            pairs.append((f"{optimizer}.{index}", f"{count} · {pairs_text(chosen)}"))
    return pairs


def _tensor_lines(rows: list[Row], screen: Screen) -> list[str]:
    """The table of tensors. Names stay whole, so that they can be copied."""
    first = _first_packs(rows)
    cells = [_tensor_cells(part, entry, first[part.rank]) for part, entry in rows]
    wide = Screen(screen.colour)
    return [wide.join(line) for line in align(_COLUMNS, cells)]


def _first_packs(rows: list[Row]) -> dict[int, int]:
    """The number of each part's first pack, counted through all parts as in the summary."""
    counts = {part.rank: len(part.packs) for part, _ in rows}
    first, total = {}, 0
    for rank in sorted(counts):
        first[rank], total = total, total + counts[rank]
    return first


def _tensor_cells(part: Part, entry: TensorEntry, first_pack: int) -> list[Cell]:
    spec = entry.spec
    name = clean(" = ".join((spec.name, *entry.aliases)))
    packs = sorted({first_pack + piece.pack for piece in entry.pieces})
    return [
        Cell(name),
        Cell(spec.dtype, "cyan"),
        Cell(" × ".join(map(str, spec.shape)) or "scalar"),
        Cell(size_text(sum(piece.size for piece in entry.pieces))),
        Cell(_digest_text(part, entry.pieces), "dim"),
        Cell(",".join(map(str, packs)), "dim"),
    ]


def _digest_text(part: Part, pieces: tuple[Piece, ...]) -> str:
    """The first chunk's digest, and how many more there are."""
    count = sum(chunk_count(piece.size) for piece in pieces)
    if not pieces:
        return ""
    first = part.digests[pieces[0].digest][:_DIGEST_DIGITS]
    return first if count == 1 else f"{first} +{count - 1}"


def _to_json(
    manifest: Manifest, name: CheckpointName, tags: list[str], rows: list[Row]
) -> dict[str, Any]:
    whole = asdict(manifest)
    packs = [
        {"rank": part.rank, **pack.to_json()} for part in manifest.parts for pack in part.packs
    ]
    kept = ("step", "epoch", "run", "created", "parent", "exact", "metrics", "topology", "capture")
    return {
        "name": str(name),
        **{key: whole[key] for key in kept},
        "tags": tags,
        "size": manifest.size,
        "packs": packs,
        "hyperparameters": manifest.hyperparameters,
        "objects": manifest.objects,
        "tensors": [_tensor_to_json(part, entry) for part, entry in rows],
    }


def _tensor_to_json(part: Part, entry: TensorEntry) -> dict[str, Any]:
    return {
        **asdict(entry.spec),
        "device": entry.device,
        "aliases": entry.aliases,
        "size": sum(piece.size for piece in entry.pieces),
        "pieces": [
            {
                "rank": part.rank,
                "offsets": piece.box.offsets,
                "lengths": piece.box.lengths,
                "pack": part.packs[piece.pack].path,
                "at": piece.offset,
                "size": piece.size,
                "codec": piece.codec,
                "digests": part.digests[piece.digest : piece.digest + chunk_count(piece.size)],
            }
            for piece in entry.pieces
        ],
    }
