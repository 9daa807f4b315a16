"""What a log says of itself: what it goes on from, what a replay reads, what its optimizers did.

As data, for `--json` and for the lines of `everstep show`. Names in a record: docs/format.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from everstep.cli import wording
from everstep.format.global_tensors import whole_tensors
from everstep.format.manifest import Manifest, Record
from everstep.format.tables import Table, is_gradient


def chain_facts(chain: Sequence[Manifest]) -> dict[str, Any]:
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


def record_facts(record: Record, tables: Sequence[Table]) -> dict[str, Any]:
    """Of one record. `bytes`: as stored."""
    return {
        "step": record.step,
        "bytes": record.size,
        "calls": [_call_facts(f"@{n}", said, tables) for n, said in enumerate(record.calls)],
        "derived": dict(record.derived),
    }


def _call_facts(at: str, said: Mapping[str, Any], tables: Sequence[Table]) -> dict[str, Any]:
    gradients = [
        whole
        for name, whole in whole_tensors(tables).items()
        if is_gradient(name) and name.startswith((f"{at}.", f"{at}!."))
    ]
    pieces = (piece for whole in gradients for entry in whole.entries for piece in entry.pieces)
    clips = [
        {"gradients": len(clip["names"]), "foreach": bool(clip["foreach"])}
        for clip in said.get("clips", ())
    ]
    return {
        "optimizer": str(said["optimizer"]),
        "class": str(said["class"]),
        "gradients": len(gradients),
        "gradient_bytes": sum(piece.size for piece in pieces),
        "clips": clips,
        "compressed": [
            {"form": str(found["form"]), "gradients": len(found["names"])}
            for found in said.get("compressed", ())
        ],
        "strides": sum(whole.strides is not None for whole in gradients),
        "scaler": sorted(said.get("scaler", {})),
        "sets": [dict(values) for values in said["sets"]],
    }


def chain_text(facts: Mapping[str, Any], epoch: int) -> str:
    """As "step 120: 3 records to replay, 38.1 MiB, after a state of 286.1 MiB"."""
    base = facts["base"]
    if not facts["records"]:
        return f"nothing any more: made whole since, {wording.size(facts['base_bytes'])} beside it"
    branch = f" of epoch {base['epoch']}" if base["epoch"] != epoch else ""
    return (
        f"step {base['step']}{branch}: {wording.plural(facts['records'], 'record')} to replay, "
        f"{wording.size(facts['record_bytes'])}, after a state of "
        f"{wording.size(facts['base_bytes'])}; {wording.size(facts['bytes'])} in all"
    )


def call_pairs(facts: Mapping[str, Any], is_only: bool) -> list[tuple[str, str]]:
    """The optimizer calls of a record, each with the hyperparameters of its moment; then what the
    user's rules derived."""
    pairs = []
    for number, call in enumerate(facts["calls"]):
        at = f"@{number}" if is_only else f"{facts['step']} @{number}"
        pairs.append((f"{at} {call['optimizer']}", _call_text(call)))
        for index, values in enumerate(call["sets"]):
            chosen = {k: v for k, v in values.items() if v is not None and v is not False}
            pairs.append((f"{at} {call['optimizer']}.{index}", wording.pairs(chosen)))
    for part, said in facts["derived"].items():
        at = "then" if is_only else f"{facts['step']} then"
        how = "derived by a rule of the program" if said["rule"] else "changed by nobody"
        pairs.append((f"{at} {part}", how))
    return pairs


def _call_text(call: Mapping[str, Any]) -> str:
    words = [
        wording.clean(call["class"]),
        f"{wording.plural(call['gradients'], 'gradient')}, {wording.size(call['gradient_bytes'])}",
    ]
    if clipped := sum(clip["gradients"] for clip in call["clips"]):
        how = " and ".join(
            sorted({"foreach" if clip["foreach"] else "one by one" for clip in call["clips"]})
        )
        words.append(f"{clipped:,} from before clipping, clip coefficient kept ({how})")
    else:
        words.append("as consumed, no clip coefficient kept")
    words += [
        f"{found['gradients']:,} compressed ({wording.clean(found['form'])})"
        for found in call["compressed"]
    ]
    if call["strides"]:
        words.append(f"{call['strides']:,} not row-major in memory")
    if call["scaler"]:
        words.append(f"unscaled by the optimizer ({', '.join(map(wording.clean, call['scaler']))})")
    return " · ".join(words)
