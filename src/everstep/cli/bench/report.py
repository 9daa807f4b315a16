"""From what the bench measured to what it says: medians, ratios, spreads, and the aims. Pure."""

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from everstep.cli.bench.plan import BASELINE, CONTENDERS, FLOOR, LOG, OURS, PEERS

SCHEMA = 4
AIM_CALL_MS = 1.0
AIM_SLOWDOWN = 0.10
AIM_OF_BEST_PEER = 1 / 3
AIM_DURABLE = 1.2
AIM_RESTORE = 1.3
AIM_BOOKKEEPING_MS = 20.0
AIM_RECORD_BYTES = 0.37
AIM_LOG_SLOWDOWN = 0.5
AIM_RECOVERY = 1.0
_DRAWS = 1000


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    """The report: one entry per contender, and the aims. `raw` is what `bench.Bench` gathered."""
    entries = {}
    for name, facts in CONTENDERS.items():
        if name not in raw["versions"]:
            continue
        entries[name] = {
            "label": facts.label,
            "version": raw["versions"][name],
            "syncs": facts.syncs if name != BASELINE else None,
            "note": facts.note,
            "failed": raw["failed"].get(name),
            "every": {
                str(every): _training(raw, name, every)
                for every in ([0] if name == BASELINE else raw["settings"]["every"])
                if _blocks(raw, name, every)
            },
            "bases": _bases(raw, name),
            "alone": _alone(raw, name, facts.is_durable),
            "restore": _restore(raw, name),
        }
    report = {
        "schema": SCHEMA,
        "machine": raw["machine"],
        "settings": raw["settings"],
        "seconds": raw["seconds"],
        "state_bytes": raw.get("state_bytes"),
        "contenders": entries,
        "missing": {name: CONTENDERS[name].label for name in raw["missing"]},
        "tensors": raw.get("tensors"),
        "recovery": recovery_of(raw["recovery"]) if raw.get("recovery") else None,
        "spread_recovery": _spread_recovery(raw.get("spread_recovery")),
    }
    return {**report, "aims": _aims(report)}


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, smallest and largest; None for nothing."""
    if not values:
        return None
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is no less than `share` of them (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def slowdowns(
    blocks: Sequence[dict[str, Any]], name: str, every: int, bases: bool = False
) -> list[float]:
    """One per block: its time per step over that of the baselines before and after it, less one."""
    return [
        _step_s(block) / statistics.mean(map(_step_s, baselines)) - 1
        for block, baselines in _beside_baselines(blocks, name, every, bases)
    ]


def processor_more_ms(
    blocks: Sequence[dict[str, Any]], name: str, every: int, bases: bool = False
) -> list[float]:
    """One per block: its processor time per step, of all its processes and until its saves are
    finished (see `Worker.block`), less that of the baselines before and after it."""
    return [
        1000 * (_processor_s(block) - statistics.mean(map(_processor_s, baselines)))
        for block, baselines in _beside_baselines(blocks, name, every, bases)
    ]


def _beside_baselines(
    blocks: Sequence[dict[str, Any]], name: str, every: int, bases: bool
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The blocks asked for, each with the baselines before and after it."""
    for index, block in enumerate(blocks):
        if (block["name"], block["every"], block.get("bases", False)) == (name, every, bases):
            before = [b for b in blocks[:index] if b["name"] == BASELINE][-1:]
            after = [b for b in blocks[index + 1 :] if b["name"] == BASELINE][:1]
            yield block, before + after


def _step_s(block: dict[str, Any]) -> float:
    return float(block["seconds"] / block["steps"])


def _processor_s(block: dict[str, Any]) -> float:
    """Per step."""
    return float(sum(block["processor_s"].values()) / block["processor_steps"])


def _blocks(
    raw: dict[str, Any], name: str, every: int, bases: bool = False
) -> list[dict[str, Any]]:
    return [b for b in raw["blocks"] if (b["name"], b["every"], b["bases"]) == (name, every, bases)]


def _training(raw: dict[str, Any], name: str, every: int) -> dict[str, Any]:
    blocks = _blocks(raw, name, every)
    baseline = max(block["memory_bytes"] for block in _blocks(raw, BASELINE, 0))
    peak = max(block["memory_bytes"] for block in blocks)
    stalls = [1000 * value for block in blocks for value in block["stall_s"]]
    idle = [1000 * value for block in blocks for value in block["idle_call_s"]]
    stall = spread(stalls)
    is_baseline = name == BASELINE
    return {
        "step_s": spread([_step_s(block) for block in blocks]),
        "slowdown": None if is_baseline else spread(slowdowns(raw["blocks"], name, every)),
        "processor_ms": spread([1000 * _processor_s(block) for block in blocks]),
        "processor_more_ms": None
        if is_baseline
        else spread(processor_more_ms(raw["blocks"], name, every)),
        "stall_ms": stall and {**stall, "p99": percentile(stalls, 0.99)},
        "call_without_save_ms": spread(idle) if every > 1 else None,
        "finished_s": spread([value for block in blocks for value in block["finished_s"]]),
        "memory_bytes": peak,
        "memory_over_baseline_bytes": peak - baseline,
    }


def _bases(raw: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Of a log: what a step with a base costs, and what that is when spread over many steps."""
    every, apart = raw["settings"]["every"][0], raw["settings"].get("base_every")
    blocks = _blocks(raw, name, every, bases=True)
    if not blocks:
        return None
    slowdown = spread(slowdowns(raw["blocks"], name, every, bases=True))
    records = spread(slowdowns(raw["blocks"], name, every))
    mean = None
    if slowdown and records:
        mean = (slowdown["median"] + (apart - 1) * records["median"]) / apart
    return {
        "slowdown": slowdown,
        "step_s": spread([_step_s(block) for block in blocks]),
        "processor_more_ms": spread(processor_more_ms(raw["blocks"], name, every, bases=True)),
        "finished_s": spread([value for block in blocks for value in block["finished_s"]]),
        "stall_ms": spread([1000 * value for block in blocks for value in block["stall_s"]]),
        "apart": apart,
        "slowdown_with_bases": mean,
    }


def recovery_of(measured: dict[str, Any]) -> dict[str, Any]:
    """Restores of a log beside what they should cost at most: the base, and for each record a read
    and an update, as measured by themselves. The first of a process take longer than those after
    them: memory is new then. `over_bytes`: beside a stricter bound, in which a read is that of the
    record's bytes, without its manifest and without what it takes to clip. `over_interval`: of 19
    in 20 such benches (a bootstrap of the rounds)."""
    bases = measured["base_s"]
    parts, strict_parts = (
        [bases, *_per_record(measured[reads], measured["update_s"])]
        for reads in ("record_s", "bytes_s")
    )
    rows = []
    for row in measured["restores"]:
        seconds, count = row["seconds"], row["records"]
        found, everything = statistics.median(seconds), range(len(seconds))
        at_most = _at_most(parts, count, everything)
        limits = [_at_most(parts, count, [number]) for number in everything]
        rows.append(
            {
                **row,
                "seconds": spread(seconds),
                "at_most_s": at_most,
                "over": found / at_most,
                "over_interval": _interval_over(seconds, parts, count),
                "over_bytes": found / _at_most(strict_parts, count, everything),
                "over_rounds": spread([a / b for a, b in zip(seconds, limits, strict=True)]),
            }
        )
    _, first, later = parts
    each = {"base_s": spread(bases), "first_record_s": spread(first), "record_s": spread(later)}
    kept = ("cache", "base_bytes", "record_bytes")
    return {**{key: measured[key] for key in kept}, **each, "restores": rows}


def _per_record(
    reads: Sequence[Sequence[float]], updates: Sequence[Sequence[float]]
) -> tuple[list[float], list[float]]:
    """Round by round, the seconds of a read and an update: of the first record, and of one after it
    (where there is none: of the first)."""
    rounds = list(zip(reads, updates, strict=True))
    first = [read[0] + update[0] for read, update in rounds]
    later = [sum(statistics.median(each[1:] or each) for each in pair) for pair in rounds]
    return first, later


def _at_most(parts: Sequence[Sequence[float]], count: int, rounds: Sequence[int]) -> float:
    """What a restore of so many records takes, by the medians of these rounds of its parts: the
    base, the first record, and one after it."""
    base, first, later = (statistics.median(part[n] for n in rounds) for part in parts)
    return base + first + (count - 1) * later


def _interval_over(
    seconds: Sequence[float], parts: Sequence[Sequence[float]], count: int
) -> list[float]:
    """Where median over bound lies for 95% of as many rounds, drawn from these with repetition (the
    percentile bootstrap; Efron, 1979)."""
    rounds, draw = range(len(seconds)), random.Random(0)
    found = []
    for _ in range(_DRAWS):
        drawn = draw.choices(rounds, k=len(rounds))
        middle = statistics.median(seconds[n] for n in drawn)
        found.append(middle / _at_most(parts, count, drawn))
    return [percentile(found, 0.025), percentile(found, 0.975)]


def _spread_recovery(measured: dict[str, Any] | None) -> dict[str, Any] | None:
    """Restores of spread checkpoints, beside that of the whole state which is the first."""
    if measured is None:
        return None
    whole = statistics.median(measured["restores"][0]["seconds"])
    rows = [
        {
            **row,
            "seconds": spread(row["seconds"]),
            "over": statistics.median(row["seconds"]) / whole,
        }
        for row in measured["restores"]
    ]
    return {"restores": rows}


def _alone(raw: dict[str, Any], name: str, is_durable: bool) -> dict[str, Any] | None:
    rows = [row for row in raw["alone"] if row["name"] == name]
    if not rows:
        return None
    return {
        "finished_s": spread([row["finished_s"] for row in rows]),
        "durable_s": spread(
            [row["finished_s"] + (0 if is_durable else row["extra_sync_s"]) for row in rows]
        ),
        "durable_by_itself": is_durable,
        "bytes": rows[-1]["bytes"],
        "files": rows[-1]["files"],
    }


def _restore(raw: dict[str, Any], name: str) -> dict[str, Any] | None:
    rows = [row for row in raw["restores"] if row["name"] == name]
    if not rows:
        return None
    return {
        "seconds": spread([row["seconds"] for row in rows]),
        "equal": all(row["equal"] for row in rows),
        "cache": rows[0]["cache"],
    }


def _aims(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Each aim of the project beside what was measured; only those that were measured."""
    ours = report["contenders"].get(OURS)
    floor = report["contenders"].get(FLOOR)
    aims: list[dict[str, Any]] = []

    def add(text: str, limit: float, measured: float | None, unit: str) -> None:
        if measured is not None:
            met = measured <= limit
            aim = {"aim": text, "limit": limit, "measured": measured, "unit": unit, "met": met}
            aims.append({**aim, "processor": None})

    if ours and "1" in ours["every"]:
        training = ours["every"]["1"]
        slowdown = training["slowdown"]["median"]
        add("the call returns (median, ms)", AIM_CALL_MS, training["stall_ms"]["median"], "ms")
        add("slowdown of the loop, every step", AIM_SLOWDOWN, slowdown, "share")
        best = best_peer(report)
        if best and best[1] > 0:
            text = f"slowdown of the loop / {best[0]}'s"
            add(text, AIM_OF_BEST_PEER, slowdown / best[1], "ratio")
    if ours and floor and ours["alone"] and floor["alone"]:
        add(
            "durable / plain write", AIM_DURABLE, _ratio(ours, floor, "alone", "durable_s"), "ratio"
        )
    if ours and floor and ours["restore"] and floor["restore"]:
        measured = _ratio(ours, floor, "restore", "seconds")
        add("verified restore / plain read", AIM_RESTORE, measured, "ratio")
    if tensors := report["tensors"]:
        text = f"manifest and bookkeeping, {tensors['tensors']:,} tensors (ms)"
        add(text, AIM_BOOKKEEPING_MS, 1000 * tensors["bookkeeping_s"], "ms")
    return aims + _log_aims(report)


def _log_aims(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the strategy `log`. `processor`: the same quotient of processor times, beside one of
    wall times whose differences may be no larger than their noise."""
    full, log = report["contenders"].get(OURS), report["contenders"].get(LOG)
    recovery = report["recovery"]
    found: list[tuple[str, float, float, float | None]] = []
    if full and log and full["alone"] and log["alone"]:
        share = log["alone"]["bytes"] / full["alone"]["bytes"]
        found.append(("bytes of a record / of a state, fp32", AIM_RECORD_BYTES, share, None))
    if full and log and "1" in full["every"] and "1" in log["every"]:
        slower, slow = (entry["every"]["1"]["slowdown"]["median"] for entry in (full, log))
        if slower > 0:
            text = "slowdown of the loop, a record / a state"
            busier, busy = (
                entry["every"]["1"]["processor_more_ms"]["median"] for entry in (full, log)
            )
            processor = busy / busier if busier > 0 else None
            found.append((text, AIM_LOG_SLOWDOWN, slow / slower, processor))
    if recovery:
        worst = max(row["over"] for row in recovery["restores"])
        found.append(("restore of a log / base, reads and updates", AIM_RECOVERY, worst, None))
    return [
        {
            "aim": text,
            "limit": limit,
            "measured": value,
            "unit": "ratio",
            "met": value <= limit,
            "processor": processor,
        }
        for text, limit, value, processor in found
    ]


def best_peer(report: dict[str, Any]) -> tuple[str, float] | None:
    """The peer that slows the loop least at every step: its label, and by how much."""
    found = [
        (entry["every"]["1"]["slowdown"]["median"], entry["label"])
        for name, entry in report["contenders"].items()
        if name in PEERS and "1" in entry["every"]
    ]
    return (min(found)[1], min(found)[0]) if found else None


def _ratio(ours: dict[str, Any], floor: dict[str, Any], section: str, field: str) -> float:
    return float(ours[section][field]["median"] / floor[section][field]["median"])
