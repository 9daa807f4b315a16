"""everstep show: one checkpoint, its tensors, packs, hyperparameters, objects and capture; of a
log also what it goes on from, and its optimizer calls."""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from textwrap import wrap
from typing import Any

from everstep.cli import wording
from everstep.cli.chains import Chains, Whole
from everstep.cli.records import call_pairs, chain_facts, chain_text, record_facts
from everstep.cli.render import Cell, Column, Screen, align
from everstep.cli.target import add_json, add_words, split_words, tags_of
from everstep.errors import EverstepError, Missing
from everstep.format.global_tensors import tables_of_records
from everstep.format.manifest import Manifest, Part
from everstep.format.packs import Piece, chunk_count
from everstep.format.tables import Table, TensorEntry, is_gradient, is_own
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
_ELSEWHERE = ("selftest", "replayed", "optimizers", "attributes")
"""Of a topology: what other lines tell, or stores of before have, and says nothing any more."""
_DIGEST_DIGITS = 12
_LABEL_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor in its part; `pack`: the number of the part's first pack, through all parts."""

    part: Part
    pack: int
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Shown:
    """A checkpoint. `chain`: of a log; `records`: likewise, and of a spread state; `broken`: why
    the chain cannot be followed; `whole`: the state that was made of it since."""

    name: CheckpointName
    manifest: Manifest
    tables: list[Table]
    tags: list[str]
    chain: dict[str, Any] | None = None
    records: tuple[dict[str, Any], ...] = ()
    broken: str | None = None
    whole: Whole | None = None
    exact: bool = True
    """Whether a restore brings it back bit for bit."""
    unproven: str = ""
    """What a replay of it has shown to be wrong."""

    @classmethod
    def of(cls, path: str, reference: str | None) -> "Shown":
        """Raises Missing, Corrupt, Unsupported."""
        store, disk = Store(path), Disk(path)
        name = catalog.find(disk, reference)
        manifest = store.manifest(str(name))
        tables = store.tables(manifest)
        tags = tags_of(disk).get(name, [])
        chains = Chains(disk)
        whole, exact = chains.whole(name), manifest.exact and chains.is_exact(name)
        by_record = tables_of_records(manifest, tables)
        records = tuple(record_facts(record, found) for record, found in by_record)
        chain, broken = None, None
        unproven = catalog.read_unproven(disk).get(name, "")
        try:
            chain = chain_facts(store.chain(str(name))) if manifest.previous else None
        except EverstepError as error:
            broken = str(error)
        facts = name, manifest, tables, tags, chain, records
        return cls(*facts, broken, whole, exact, unproven)

    def rows(self, pattern: str | None) -> list[Row]:
        """The tensors whose names are like `pattern`; all for None."""
        found, pack = [], 0
        for part, table in zip(self.manifest.all_parts, self.tables, strict=True):
            chosen = [e for e in table.tensors.values() if not pattern or _is_chosen(e, pattern)]
            found += [Row(part, pack, entry) for entry in chosen]
            pack += len(part.packs)
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_words(parser, "?", "the newest")
    parser.add_argument(
        "--names",
        metavar="PATTERN",
        help="only tensors whose name holds PATTERN, or matches it if it has a *, ? or [",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the checkpoint; returns the exit code."""
    path, steps = split_words(args.words, 1)
    shown = Shown.of(path, steps[0] if steps else None)
    rows = shown.rows(args.names)
    if args.names is not None and not rows:
        raise Missing(f"{path}: no tensor of step {shown.name.step} has a name like {args.names!r}")
    if args.json:
        print(json.dumps(_to_json(shown, rows), indent=2))
        return 0
    screen = Screen.of(sys.stdout)
    lines = [] if args.names else [*_summary(shown, screen), ""]
    print("\n".join([*lines, *_tensor_lines(rows, screen)]))
    return 0


def _is_chosen(entry: TensorEntry, pattern: str) -> bool:
    found = (entry.spec.name, *entry.aliases)
    if any(character in pattern for character in "*?["):
        return any(fnmatchcase(name, pattern) for name in found)
    return any(pattern in name for name in found)


def _summary(shown: Shown, screen: Screen) -> list[str]:
    manifest, parent = shown.manifest, shown.manifest.parent
    origin = f"after step {parent['step']} of epoch {parent['epoch']}" if parent else ""
    head = [
        Cell(f"step {manifest.step}", "title"),
        Cell(f" · epoch {manifest.epoch}"),
        Cell("".join(f" · {wording.clean(tag)}" for tag in shown.tags), "yellow"),
        Cell("" if shown.exact else " · not exact", "bad"),
        Cell(f" · {shown.name}", "dim"),
    ]
    topology = {key: each for key, each in manifest.topology.items() if key not in _ELSEWHERE}
    written = f"{wording.time(manifest.created)} ({wording.age(manifest.created)})"
    objects = [
        (key, wording.brief(value, 200).strip() or '""') for key, value in manifest.objects.items()
    ]
    return [
        screen.join(head),
        *_section("written", [("", written)], screen),
        *(_log_lines(shown, screen) or _section("follows", [("", origin)], screen)),
        *_section("whole", _whole_pairs(shown.whole), screen),
        *_section("unproven", [("", wording.clean(shown.unproven))], screen),
        *_section("metrics", [("", wording.pairs(manifest.metrics))], screen),
        *_section("holds", [("", _holdings(shown))], screen),
        *_setting_lines("capture", manifest.capture, screen),
        *_setting_lines("topology", topology, screen),
        *_section("packs", _pack_pairs(manifest), screen),
        *_section("optimizers", _optimizer_pairs(manifest, shown.tables), screen),
        *_section("objects", objects, screen),
    ]


def _log_lines(shown: Shown, screen: Screen) -> list[str]:
    """What a log goes on from, and the calls of its records; of a state those that bring its parts
    to one step, if any."""
    previous = shown.manifest.previous
    calls = [pair for facts in shown.records for pair in call_pairs(facts, len(shown.records) == 1)]
    if previous is None:
        if not shown.records:
            return []
        steps = f"steps {shown.records[0]['step']} to {shown.records[-1]['step']}"
        count = wording.plural(len(shown.records), "record")
        text = f"{count}, of {steps}: its parts were copied one step after another"
        return [*_section("replays", [("", text)], screen), *_section("calls", calls, screen)]
    goes = f"step {previous.step} of epoch {previous.epoch}, manifest {previous.digest[:12]}"
    if shown.chain:
        log = chain_text(shown.chain, shown.manifest.epoch)
    else:
        log = f"NOT RESTORABLE: {wording.clean(shown.broken)}"
    return [
        *_section("log of", [("", log)], screen),
        *_section("goes on", [("", f"from {goes}")], screen),
        *_section("calls", calls, screen),
    ]


def _whole_pairs(whole: Whole | None) -> list[tuple[str, str]]:
    """As "38.1 MiB since 12:00 (3 min ago), bit for bit"; nothing where it was not made whole. And
    why it is not exact."""
    if whole is None:
        return []
    made = f"{wording.size(whole.size)} since {wording.time(whole.created)}"
    how = "bit for bit"
    if not whole.exact:
        takes = "a restore takes it" if whole.ends_chain else "a restore goes on replaying"
        how = f"but for last bits: {takes}"
    why = [f"not exact: {'; '.join(whole.differs)}"] if whole.differs else []
    lines = [f"{made} ({wording.age(whole.created)}), {how}", *why]
    return [("", wording.clean(line)) for line in lines]


def _holdings(shown: Shown) -> str:
    """As "28 tensors, 124.0 KiB: model 9 (38.1 KiB) · optimizer 18 (81.0 KiB)", by first name."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in (entry for table in shown.tables for entry in table.tensors.values()):
        part = _kind_of(entry.spec.name)
        counts[part] += 1
        sizes[part] += sum(piece.size for piece in entry.pieces)
    each = [
        f"{wording.clean(part)} {counts[part]:,} ({wording.size(sizes[part])})" for part in counts
    ]
    whole = f"{wording.plural(counts.total(), 'tensor')}, {wording.size(shown.manifest.size)}"
    return f"{whole}: {' · '.join(each)}" if each else whole


def _kind_of(name: str) -> str:
    """The first name of a tensor; of a record's own ones, what they are."""
    first = name.partition(".")[0]
    if not is_own(name):
        return first
    if first.endswith(("!derived", "!updated", "!digest")):
        return "digests"
    if first.endswith("!clip"):
        return "clip coefficients"
    return "gradients" if is_gradient(name) else "hyperparameters"


def _section(label: str, pairs: list[tuple[str, str]], screen: Screen) -> list[str]:
    """Keys and texts below each other, the label before the first; long texts go on indented."""
    pairs = [
        (wording.clean(key) + "  " if key else "", text) for key, text in pairs if text.strip()
    ]
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
    lines = _section(label, [("", wording.settings(plain))], screen)
    for key, group in groups.items():
        lines += _section(wording.clean(key), [("", wording.settings(group))], screen)
    return lines


def _pack_pairs(manifest: Manifest) -> list[tuple[str, str]]:
    packs = [pack for part in manifest.all_parts for pack in part.packs]
    return [
        (str(i), f"{wording.clean(pack.path)}  {wording.size(pack.size)}")
        for i, pack in enumerate(packs)
    ]


def _optimizer_pairs(manifest: Manifest, tables: list[Table]) -> list[tuple[str, str]]:
    """Each optimizer's sets of hyperparameters, with how many parameters go by each."""
    pairs = []
    for optimizer, sets in manifest.hyperparameters.items():
        groups: dict[str, int] = {}  # several parts may say the same of a parameter
        for table in tables:
            groups |= table.optimizers.get(optimizer, {}).get("groups", {})
        members = Counter(groups.values())
        kind = manifest.classes.get(optimizer, "").rpartition(".")[2]
        for index, values in enumerate(sets):
            count = wording.plural(members[index], "parameter")
            chosen = {k: v for k, v in values.items() if v is not None and v is not False}
            parts = [kind, count, wording.pairs(chosen)] if kind else [count, wording.pairs(chosen)]
            pairs.append((f"{optimizer}.{index}", " · ".join(parts)))
    return pairs


def _tensor_lines(rows: list[Row], screen: Screen) -> list[str]:
    """The table of tensors. Names stay whole, so that they can be copied."""
    wide = Screen(screen.colour)
    return [wide.join(line) for line in align(_COLUMNS, [_tensor_cells(row) for row in rows])]


def _tensor_cells(row: Row) -> list[Cell]:
    entry, spec = row.entry, row.entry.spec
    name = wording.clean(" = ".join((spec.name, *entry.aliases)))
    packs = sorted({row.pack + piece.pack for piece in entry.pieces})
    return [
        Cell(name),
        Cell(spec.dtype, "cyan"),
        Cell(" × ".join(map(str, spec.shape)) or "scalar"),
        Cell(wording.size(sum(piece.size for piece in entry.pieces))),
        Cell(_digest_text(row.part, entry.pieces), "dim"),
        Cell(",".join(map(str, packs)), "dim"),
    ]


def _digest_text(part: Part, pieces: tuple[Piece, ...]) -> str:
    """The first chunk's digest, and how many more there are."""
    count = sum(chunk_count(piece.size) for piece in pieces)
    if not pieces:
        return ""
    first = part.digests[pieces[0].digest][:_DIGEST_DIGITS]
    return first if count == 1 else f"{first} +{count - 1}"


def _to_json(shown: Shown, rows: list[Row]) -> dict[str, Any]:
    manifest = shown.manifest
    whole = asdict(manifest)
    packs = [
        {"rank": part.rank, **pack.to_json()} for part in manifest.all_parts for pack in part.packs
    ]
    kept = ("step", "epoch", "run", "created", "parent", "metrics", "topology", "capture")
    return {
        "name": str(shown.name),
        "kind": "log" if manifest.previous else "state",
        **{key: whole[key] for key in kept},
        "exact": shown.exact,
        "tags": shown.tags,
        "size": manifest.size,
        "previous": whole["previous"],
        "chain": shown.chain,
        "broken": shown.broken,
        "whole": asdict(shown.whole) if shown.whole else None,
        "records": shown.records,
        "packs": packs,
        "hyperparameters": manifest.hyperparameters,
        "objects": manifest.objects,
        "tensors": [_tensor_to_json(row.part, row.entry) for row in rows],
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
