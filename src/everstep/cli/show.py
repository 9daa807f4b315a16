"""everstep show: one checkpoint, its tensors, packs, hyperparameters, objects and capture; of a
log also what it goes on from, and its optimizer calls.

All that is known is gathered as data, which `--json` prints as it is, and else as lines of text.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import chain
from textwrap import wrap
from typing import Any

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.chains import facts_of, state_beside
from everstep.cli.target import add_words, split_words, tags_of
from everstep.errors import EverstepError, Missing
from everstep.format.global_tensors import Described, whole_tensors
from everstep.format.manifest import CheckpointName, Encoded, Manifest, Part, Record, Stream
from everstep.format.packed import encoded_chunks
from everstep.format.packs import chunk_count
from everstep.format.tables import Table, TensorEntry, is_gradient, is_own
from everstep.store import catalog, names
from everstep.tiers.tier import Tier

Facts = Mapping[str, Any]

_TITLES = ("TENSOR", "DTYPE", "SHAPE", "SIZE", "STORED", "CODEC", "DIGEST")
_ELSEWHERE = ("optimizers", "selftest", "replayed", "attributes")
"""Of a topology: what other lines tell, or stores of before have, and says nothing any more."""
_DIGEST_DIGITS = 12
_LISTED_MAX = 64
_LABEL_WIDTH = 15
_WIDTH_MIN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "[STEP]", "the newest")
    parser.add_argument(
        "--names",
        default="",
        metavar="PATTERN",
        help="only tensors whose name holds PATTERN, or matches it if it has a *, ? or [",
    )


def run(args: argparse.Namespace) -> Answer:
    disk, steps = split_words(args.words, 1)
    facts = _facts(disk, catalog.find(disk, steps[0] if steps else None))
    pattern = args.names if any(each in args.names for each in "*?[") else f"*{args.names}*"
    chosen = [
        tensor
        for tensor in facts["tensors"]
        if any(fnmatchcase(name, pattern) for name in (tensor["name"], *tensor["aliases"]))
    ]
    if args.names and not chosen:
        raise Missing(
            f"{disk.root}: no tensor of step {facts['step']} has a name like {args.names!r}"
        )
    lines = chain(() if args.names else _summary(facts), _tensor_lines(chosen))
    return Answer({**facts, "tensors": chosen}, lines)


def _facts(disk: Tier, name: CheckpointName) -> dict[str, Any]:
    """All there is to say of a checkpoint but for pieces, which its tables have, maybe a million.
    Raises Missing, Corrupt, Unsupported."""
    manifest = catalog.read_manifest(disk, name)
    each_table = (catalog.read_table(disk, part) for part in manifest.all_parts)
    tables = list(each_table) if manifest.records else None  # else one after another
    chain, broken = [manifest], None
    try:
        chain = catalog.read_chain(disk, name) if manifest.records else chain
    except EverstepError as error:
        broken = str(error)
    kept = ("run", "parent", "topology", "capture", "classes", "hyperparameters", "objects")
    records = Described(manifest, tables).records if tables else []
    tensors = _tensor_facts(manifest, tables or each_table)
    return {
        "name": str(name),
        **facts_of(manifest, state_beside(disk, manifest)),
        **{key: getattr(manifest, key) for key in kept},
        "exact": manifest.exact and chain[0].exact,
        "tags": tags_of(disk).get(name, []),
        "base": asdict(base) if (base := manifest.behind) and not manifest.previous else None,
        "thinned": sorted({t["step"] for t in tensors}) if "thin" in manifest.capture else [],
        "chain": _chain_facts(chain) if manifest.previous and not broken else None,
        "broken": broken,
        "unproven": catalog.read_unproven(disk).get(name),
        "records": [_record_facts(*each) for each in records],
        "packs": [
            {"rank": part.rank, "path": pack.path, "size": pack.size}
            for part in manifest.all_parts
            for pack in part.packs
        ],
        "streams": {key: _stream_facts(each, name) for key, each in manifest.streams.items()},
        "tensors": tensors,
    }


def _chain_facts(chain: Sequence[Manifest]) -> dict[str, Any]:
    """Of a log's chain, the state first: what a restore reads, and how many records it replays. It
    is the state alone where the log was made whole."""
    base, *logs = chain
    return {
        "base": {"step": base.step, "epoch": base.epoch},
        "records": sum(len(manifest.records) for manifest in logs),
        "base_bytes": base.size,
        "record_bytes": sum(manifest.size for manifest in logs),
        "bytes": sum(manifest.size for manifest in chain),
    }


def _record_facts(record: Record, tables: Sequence[Table]) -> dict[str, Any]:
    """Of one record, and of how many gradients each call is. `bytes`: as stored."""
    gradients: dict[str, list[int]] = {}
    for name, entry in whole_tensors(tables).items():
        if is_gradient(name):
            at = name.partition(".")[0].rstrip("!")
            gradients.setdefault(at, []).append(entry.spec.size)
    calls = []
    for number, said in enumerate(record.calls):
        sizes = gradients.get(f"@{number}", ())
        calls.append({**said, "gradients": len(sizes), "gradient_bytes": sum(sizes)})
    return {
        "step": record.step,
        "bytes": record.size,
        "calls": calls,
        "derived": dict(record.derived),
    }


def _stream_facts(stream: Stream, name: CheckpointName) -> dict[str, Any]:
    """Of what an object has streamed; `referenced` as of tensors."""
    return {
        "size": sum(pack.size for pack in stream.packs),
        "referenced": sum(
            pack.size for pack in stream.packs if not names.is_new_in(pack.path, name)
        ),
        "packs": [{"path": pack.path, "size": pack.size} for pack in stream.packs],
    }


def _tensor_facts(manifest: Manifest, tables: Iterable[Table]) -> list[dict[str, Any]]:
    """Of each tensor, over all parts of a step. `stored`: bytes in files that were written for this
    checkpoint; `referenced`: in those of one before it; `digest`: of its first chunk, as it was
    saved where that is known, else as it is stored."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for part, table in zip(manifest.all_parts, tables, strict=True):
        encoded, own = encoded_chunks(part, table), CheckpointName(part.steps, manifest.epoch)
        is_new = [names.is_new_in(pack.path, own) for pack in part.packs]
        steps = names.pack_steps(table, part.packs, part.steps)
        for name, entry in table.tensors.items():
            facts = found.get((part.steps, name))
            if facts is None:
                facts = found[part.steps, name] = _new_facts(entry, part, steps, encoded)
            for piece in entry.pieces:
                numbers = range(piece.digest, piece.digest + chunk_count(piece.size))
                stored = sum(part.stored[n] for n in numbers) if part.stored else piece.size
                facts["size"] += piece.size
                facts["stored"] += stored if is_new[piece.pack] else 0
                facts["referenced"] += 0 if is_new[piece.pack] else piece.size
                facts["chunks"] += len(numbers)
                facts["codecs"] |= {encoded[n].codec for n in numbers if n in encoded}
                facts["in_packs"].add(part.packs[piece.pack].path)
    summed = ("codecs", "in_packs")
    return [{**each, **{key: sorted(each[key]) for key in summed}} for each in found.values()]


def _new_facts(
    entry: TensorEntry, part: Part, steps: Sequence[int], encoded: Mapping[int, Encoded]
) -> dict[str, Any]:
    sums = {"size": 0, "stored": 0, "referenced": 0, "chunks": 0}
    found: dict[str, Any] = {"codecs": set(), "in_packs": set()}
    first = entry.pieces[0].digest
    content = encoded[first].content if first in encoded else None
    digest = content or part.digests[first]
    step = steps[entry.pieces[0].pack]
    said = {"device": entry.device, "aliases": entry.aliases, "digest": digest, "step": step}
    return {**asdict(entry.spec), **said, **sums, **found}


def _summary(facts: Facts) -> Iterator[str]:
    words = [
        f" · epoch {facts['epoch']}",
        *map(text.clean, facts["tags"]),
        *([] if facts["exact"] else ["not exact"]),
        facts["name"],
    ]
    topology = {key: each for key, each in facts["topology"].items() if key not in _ELSEWHERE}
    packs = {pack["path"]: text.size(pack["size"]) for pack in facts["packs"][:_LISTED_MAX]}
    if more := len(facts["packs"]) - len(packs):
        packs["…"] = f"{more:,} more (--json lists them)"
    yield from [
        text.paint(f"step {facts['step']}", "title") + " · ".join(words),
        *_section("written", text.time(facts["created"])),
        *_origin_lines(facts),
        *_section("calls", _call_texts(facts["records"])),
        *_section("of steps", ", ".join(map(str, facts["thinned"]))),
        *_section("whole", _whole_text(facts["whole"])),
        *_section("unproven", text.clean(facts["unproven"] or "")),
        *_section("metrics", text.pairs(facts["metrics"])),
        *_section("holds", _holdings(facts)),
        *_setting_lines("capture", facts["capture"]),
        *_setting_lines("topology", topology),
        *_section("packs", packs),
        *_section("streams", _stream_texts(facts["streams"])),
        *_section("optimizers", _optimizer_texts(facts)),
        *_section(
            "objects", {key: text.brief(each, 200) for key, each in facts["objects"].items()}
        ),
        "",
    ]


def _section(label: str, texts: str | Mapping[str, str]) -> list[str]:
    """A text, or several below each other by their keys, the label before the first; long ones go
    on indented, and empty ones are left out."""
    by_key = {"": texts} if isinstance(texts, str) else texts
    found = {text.clean(key): each for key, each in by_key.items() if each.strip()}
    width = max((len(key) + 2 for key in found if key), default=0)
    indent = 2 + _LABEL_WIDTH + width
    room = max(text.width() - indent, _WIDTH_MIN)
    lines = []
    for index, (key, each) in enumerate(found.items()):
        title = text.paint(f"  {'' if index else label:<{_LABEL_WIDTH}}{key:<{width}}", "dim")
        first, *others = wrap(each, room, break_long_words=False, break_on_hyphens=False)
        lines += [title + first, *(" " * indent + other for other in others)]
    return lines


def _setting_lines(label: str, values: Mapping[str, Any]) -> list[str]:
    """Settings on one line, and each group of them below on its own: "memory  slots 3 · …"."""
    groups = {key: value for key, value in values.items() if isinstance(value, dict)}
    plain = {key: value for key, value in values.items() if key not in groups}
    lines = _section(label, text.settings(plain))
    for key, group in groups.items():
        lines += _section(text.clean(key), text.settings(group))
    return lines


def _origin_lines(facts: Facts) -> list[str]:
    """What it follows, or what a restore of it replays."""
    parent, records = facts["parent"], facts["records"]
    if facts["broken"]:
        return _section("log of", f"NOT RESTORABLE: {text.clean(facts['broken'])}")
    if facts["chain"]:
        return _section("log of", _chain_text(facts["chain"], facts["epoch"]))
    if records:
        steps = f"of steps {records[0]['step']} to {records[-1]['step']}"
        count = text.plural(len(records), "record")
        return _section("replays", f"{count}, {steps}: its parts were copied one after another")
    if base := facts["base"]:
        return _section("follows", f"step {base['step']}, to which it has differences")
    if parent:
        return _section("follows", f"after step {parent['step']} of epoch {parent['epoch']}")
    return []


def _chain_text(chain: Facts, epoch: int) -> str:
    """As "step 120: 3 records to replay, 38.1 MiB, after a state of 286.1 MiB"."""
    base = chain["base"]
    if not chain["records"]:
        return f"nothing any more: made whole since, {text.size(chain['base_bytes'])} beside it"
    branch = f" of epoch {base['epoch']}" if base["epoch"] != epoch else ""
    return (
        f"step {base['step']}{branch}: {text.plural(chain['records'], 'record')} to replay, "
        f"{text.size(chain['record_bytes'])}, after a state of "
        f"{text.size(chain['base_bytes'])}; {text.size(chain['bytes'])} in all"
    )


def _call_texts(records: Sequence[Facts]) -> dict[str, str]:
    """The optimizer calls of each record; then what the user's rules derived."""
    found = {}
    for record in records:
        at = f"{record['step']} " if len(records) > 1 else ""
        for number, call in enumerate(record["calls"]):
            found[f"{at}@{number} {call['optimizer']}"] = _call_text(call)
        for part, said in record["derived"].items():
            how = "derived by a rule of the program" if said["rule"] else "changed by nobody"
            found[f"{at}then {part}"] = how
    return found


def _call_text(call: Facts) -> str:
    clipped = sum(len(clip["names"]) for clip in call.get("clips", ()))
    words = [
        text.clean(call["class"]),
        f"{text.plural(call['gradients'], 'gradient')}, {text.size(call['gradient_bytes'])}",
        f"{clipped:,} from before clipping, with its coefficient" if clipped else "",
        *(
            f"{len(each['names']):,} compressed ({each['form']})"
            for each in call.get("compressed", ())
        ),
    ]
    return " · ".join(text.clean(word) for word in words if word)


def _whole_text(whole: Facts | None) -> str:
    """As "38.1 MiB since 2026-11-26 12:00:00, bit for bit", or why it is not exact; nothing where
    it was not made whole."""
    if whole is None:
        return ""
    made = f"{text.size(whole['size'])} since {text.time(whole['created'])}"
    takes = "a restore takes it" if whole["ends_chain"] else "a restore goes on replaying"
    how = "bit for bit" if whole["exact"] else f"but for last bits: {takes}"
    if whole["differs"]:
        how += f"; not exact: {', '.join(whole['differs'])}"
    return text.clean(f"{made}, {how}")


def _holdings(facts: Facts) -> str:
    """As "28 tensors, 124.0 KiB: model 9 (38.1 KiB) · optimizer 18 (81.0 KiB)", by first name."""
    parts: dict[str, list[int]] = {}
    for tensor in facts["tensors"]:
        parts.setdefault(_kind_of(tensor["name"]), []).append(tensor["size"])
    each = [f"{text.clean(p)} {len(own):,} ({text.size(sum(own))})" for p, own in parts.items()]
    whole = f"{text.plural(len(facts['tensors']), 'tensor')}, {text.size(facts['size'])}"
    each_part = [*facts["tensors"], *facts["streams"].values()]
    if referenced := sum(part["referenced"] for part in each_part):
        whole += f", {text.size(referenced)} of them in files of earlier checkpoints"
    return f"{whole}: {' · '.join(each)}" if each else whole


def _stream_texts(streams: Facts) -> dict[str, str]:
    """As {"replay": "788.0 KiB in data/00000030-0001-5f0c7a11-0.safetensors"}."""
    found = {}
    for key, said in streams.items():
        paths = ", ".join(pack["path"] for pack in said["packs"])
        whence = ", of an earlier checkpoint" if said["referenced"] else ""
        found[text.clean(key)] = text.clean(f"{text.size(said['size'])} in {paths}{whence}")
    return found


def _kind_of(name: str) -> str:
    """The first name of a tensor; of a record's own ones, what docs/format.md calls them."""
    if is_gradient(name):
        return "gradients"
    first = name.partition(".")[0]
    return first.partition("!")[2] if is_own(name) else first


def _optimizer_texts(facts: Facts) -> dict[str, str]:
    """Each optimizer's class, and its sets of hyperparameters but for what is off."""
    found = {}
    for optimizer, sets in facts["hyperparameters"].items():
        found[optimizer] = text.brief(facts["classes"].get(optimizer, ""))
        for index, values in enumerate(sets):
            on = {
                key: each for key, each in values.items() if each is not None and each is not False
            }
            found[f"{optimizer}.{index}"] = text.pairs(on)
    return found


def _tensor_lines(tensors: Iterable[Facts]) -> Iterator[str]:
    """The table of tensors. Names stay whole, so that they can be copied."""
    titles, *lines = text.table(_TITLES, list(map(_tensor_cells, tensors)), ("SIZE", "STORED"))
    yield from [text.paint(titles, "dim"), *lines]


def _tensor_cells(tensor: Facts) -> list[str]:
    more = f" +{tensor['chunks'] - 1:,}" if tensor["chunks"] > 1 else ""
    how = [*tensor["codecs"], *(["referenced"] if tensor["referenced"] else [])]
    return [
        text.clean(" = ".join((tensor["name"], *tensor["aliases"]))),
        tensor["dtype"],
        " × ".join(map(str, tensor["shape"])) or "scalar",
        text.size(tensor["size"]),
        text.size(tensor["stored"]) if tensor["stored"] != tensor["size"] else "",
        " ".join(how),
        f"{tensor['digest'][:_DIGEST_DIGITS]}{more}",
    ]
