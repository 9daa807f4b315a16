"""The one page of text: a table of each part, the aims beside what was measured, what went wrong.
A function of the results alone."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from everstep.cli.text import table

Results = dict[str, Any]
Row = dict[str, Any]
LOG_LINES = 25
STALL_S = 0.002
"""A stall of no more than that is none: steps differ by as much."""
FIGURES = ["", "a save", "step ms", "without", "slowdown", "call ms", "stall ms", "held s"]
FIGURES += ["durable s", "GPU GiB more", "host GiB", "saved", "left out"]


def text_of(results: Results) -> str:
    """The page."""
    sections: list[tuple[str, list[str]]] = [
        ("Machine", [_words(row) for row in _rows(results, "machine")] + _rates(results)),
        ("Tests", [_words(row["counts"]) for row in _rows(results, "counts")]),
        ("Kills", _listed(results, "lost", ["strategy", "restored", "lost", "equal", "wrong"])),
        ("Training with checkpoints", _table(FIGURES, list(_figures(results)))),
        ("Restores", _listed(results, "restore", ["restore", "seconds", "equal"])),
        ("Traces of a save", list(_traces(results))),
        ("Aims", _table(["size", "aim", "measured", "met"], list(_aims(results)))),
        ("What went wrong", problems(results)),
        ("Dropped", results["dropped"]),
    ]
    found = [f"everstep on a machine with a GPU: {results['seconds']:.0f} s"]
    for title, lines in sections:
        if lines:
            found += ["", title, "-" * len(title), *lines]
    return "\n".join(found) + "\n"


def problems(results: Results) -> list[str]:
    """What was not as it should be; the JSON has the whole of it."""
    found = []
    for name, part in results["parts"].items():
        if part["ended"] != "ok":
            found.append(f"{name}: {part['ended']}")
            found += [f"    | {line}" for line in part["log"].splitlines()[-LOG_LINES:]]
        for row in part["rows"]:
            found += [f"{name}: {test} failed" for test in row.get("failed", ())]
            if row.get("equal") is False:
                found.append(f"{name}: {_words(row)}")
    return found


def _rows(results: Results, key: str) -> list[Row]:
    return [row for part in results["parts"].values() for row in part["rows"] if key in row]


def _words(row: Row) -> str:
    return "; ".join(
        f"{key} {_words(value) if isinstance(value, dict) else value}" for key, value in row.items()
    )


def _rates(results: Results) -> list[str]:
    rows = results["parts"].get("machine", {"rows": []})["rows"]
    return [
        f"{name.removesuffix('_bytes_per_s').replace('_', ' ')}: {value / 1e9:.2f} GB/s"
        for row in rows
        for name, value in row.items()
        if name.endswith("_bytes_per_s")
    ]


def _listed(results: Results, key: str, columns: list[str]) -> list[str]:
    """The rows that have the key, as a table of these columns."""
    return _table(columns, [[row[name] for name in columns] for row in _rows(results, key)])


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Of no row, nothing."""
    return table(heads, [list(map(_shown, row)) for row in rows]) if rows else []


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))[:100]
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:100]


def _blocks(results: Results, name: str) -> dict[str, Row]:
    """The blocks of a part by what they are, each with its slowdown and its stall: what a save adds
    to the training, of host and device together."""
    rows = results["parts"].get(name, {"rows": []})["rows"]
    blocks = {row["block"]: dict(row) for row in rows if "block" in row}
    bases = [blocks[when]["wall_step_s"] for when in ("before", "after") if when in blocks]
    for row in blocks.values():
        base = row["base_s"] = statistics.mean(bases)
        row["slowdown"] = row["wall_step_s"] / base - 1
        more_s = (row["wall_step_s"] - base) * row["steps"]
        row["stall_s"] = more_s / row["saves"] if row["saves"] else None
    return blocks


def _figures(results: Results) -> Iterator[list[Any]]:
    for name in results["parts"]:
        blocks = _blocks(results, name)
        for when in ("every 1", "every 10"):
            if row := blocks.get(when):
                middle = {key: _median(row[key]) for key in ("call_s", "held_s", "durable_s")}
                more = (row["device_bytes"] - blocks["before"]["device_bytes"]) / 2**30
                yield [
                    *(name, when, row["wall_step_s"] * 1e3, row["base_s"] * 1e3),
                    f"{row['slowdown']:+.1%}",
                    *(_milli(middle["call_s"]), _milli(row["stall_s"])),
                    *(middle["held_s"], middle["durable_s"]),
                    *(more, row["host_bytes"] / 2**30, row["saves"], row["skipped"]),
                ]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _traces(results: Results) -> Iterator[str]:
    for name, part in results["parts"].items():
        for row in (row for row in part["rows"] if "trace" in row):
            count = sum(wait["count"] for wait in row["waits"])
            others = row["waits_of_other_threads"]
            yield f"{name}: {count} waits of the training thread, {others} of others"
            for wait in row["waits"]:
                where = " < ".join(wait["in"])
                yield f"    {wait['count']} {wait['call']}, {wait['ms']:.2f} ms, in {where}"
            for what in row["streams"]:
                amount = f"{what['count']} {what['what']}, {what['ms']:.1f} ms"
                yield f"    stream {what['stream']}: {amount}, {what['bytes'] / 1e6:.1f} MB"


def _aims(results: Results) -> Iterator[list[Any]]:
    """Each that can be judged: what was measured, and whether that meets it."""
    for size in ("300m", "2b"):
        ours, theirs, whole, log, skips = (
            _blocks(results, f"{size} {name}")
            for name in (
                *("everstep-full", "dcp-async", "torch.save", "everstep-log"),
                "everstep-full-skip",
            )
        )
        if row := skips.get("every 1"):
            yield _aim(size, "slowdown of full at every step ≤ 3%", row["slowdown"], most=0.03)
        if row := log.get("every 1"):
            yield _aim(size, "slowdown of log at every step ≤ 1%", row["slowdown"], most=0.01)
        for rate, plain in _links(results, f"{size} everstep-full"):
            yield _aim(size, "device to host / plain pinned ≥ 0.9", rate / plain, least=0.9)
        mine = ours.get("every 10", {}).get("stall_s")
        if mine is None:
            continue
        yield _aim(size, "stall, s, of full: 0 where it fits", mine, most=STALL_S)
        if stall := theirs.get("every 10", {}).get("stall_s"):
            less = 1 - mine / max(stall, 1e-4)
            yield _aim(size, "stall less than DCP async's by ≥ 86.7%", less, least=0.867)
        if stall := whole.get("every 10", {}).get("stall_s"):
            times = stall / max(mine, 1e-4)
            yield _aim(size, "blocked ≥ 48 times less than torch.save", times, least=48)
        if (row := theirs.get("every 1")) and "every 1" in log:
            more = row["wall_step_s"] / log["every 1"]["wall_step_s"] - 1
            yield _aim(size, "log's throughput over DCP async's ≥ 38.4%", more, least=0.384)


def _links(results: Results, name: str) -> Iterator[tuple[float, float]]:
    """Bytes a second of a traced save's copies, and of a plain pinned copy beside it."""
    rows = results["parts"].get(name, {"rows": []})["rows"]
    plain = [
        row["pinned_to_host_bytes_per_s"] for row in rows if "pinned_to_host_bytes_per_s" in row
    ]
    for row in (row for row in rows if "trace" in row):
        copies = [what for what in row["streams"] if "DtoH" in what["what"] and what["ms"]]
        seconds = sum(what["ms"] for what in copies) / 1e3
        if seconds and plain:
            yield sum(what["bytes"] for what in copies) / seconds, plain[-1]


def _aim(
    size: str, words: str, value: float, most: float | None = None, least: float | None = None
) -> list[Any]:
    is_met = (most is None or value <= most) and (least is None or value >= least)
    return [size, words, value, "yes" if is_met else "no"]
