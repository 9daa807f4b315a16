"""What a restore of a log costs, by the number of records between it and its base; and that of a
spread checkpoint, by the steps of its window.

At most it should cost a restore of the base, and for each record a read of it and one update: the
three are measured here too, each by itself, and from a cold cache.
"""

import time
from pathlib import Path
from typing import Any

from everstep import Checkpointer, Store, clip_grad_norm_
from everstep.cli import workload
from everstep.cli.bench.checks import chill, digest
from everstep.cli.bench.machine import await_end_of
from everstep.cli.strategies import NO_BASE
from everstep.restore.choose import Candidate
from everstep.restore.load import Loader
from everstep.restore.records import empty
from everstep.state.placement import Destination
from everstep.store import catalog
from everstep.tiers.disk import Disk

_RUN_STEPS = 1000
_UPDATES = 7
_BASE = 1
"""The step of the base."""


def measure(
    root: Path, text: bytes, size: workload.Size, records: list[int], rounds: int
) -> dict[str, Any]:
    """Restore `rounds` times from the base alone, and at each of these numbers of records."""
    run = workload.build(text, seed=1, steps=_RUN_STEPS, size=size)
    expected = _write(run, root, records)
    seconds: dict[int, list[float]] = {count: [] for count in sorted({0, *records})}
    equal = dict.fromkeys(seconds, True)
    reads, cache = [], ""
    for _ in range(rounds):
        for count, found in seconds.items():
            fresh = workload.build(text, seed=2, steps=_RUN_STEPS, size=size)
            with Checkpointer(root, fresh.state()) as checkpointer:
                cache = chill(root)
                began = time.perf_counter()
                checkpointer.restore(_BASE + count)
                found.append(time.perf_counter() - began)
            equal[count] &= digest(fresh) == expected[count]
        chill(root)
        reads.append(_read_record(root, _BASE + max(records)))
    updates = _updates(workload.build(text, seed=1, steps=_RUN_STEPS, size=size))
    manifests = {count: Store(root).manifest(_BASE + count) for count in (0, max(records))}
    return {
        "cache": cache,
        "base_s": seconds.pop(0),
        "record_s": reads,
        "update_s": updates,
        "base_bytes": manifests[0].size,
        "record_bytes": manifests[max(records)].size,
        "restores": [
            {"records": count, "seconds": found, "equal": equal[count] and equal[0]}
            for count, found in seconds.items()
        ],
    }


def measure_spread(
    root: Path, text: bytes, size: workload.Size, windows: list[int], rounds: int
) -> dict[str, Any]:
    """Restore `rounds` times a checkpoint of each of these windows; of one step: a whole state."""
    rows = []
    for window in windows:
        store = root / f"window-{window}"
        run = workload.build(text, seed=1, steps=_RUN_STEPS, size=size)
        step, expected = _write_spread(run, store, window), digest(run)
        manifest = Store(store).manifest(step)
        row: dict[str, Any] = {"window": len(manifest.parts), "bytes": manifest.size}
        row |= {"seconds": [], "equal": True, "cache": ""}
        for _ in range(rounds):
            fresh = workload.build(text, seed=2, steps=_RUN_STEPS, size=size)
            with Checkpointer(store, fresh.state()) as checkpointer:
                row["cache"] = chill(store)
                began = time.perf_counter()
                checkpointer.restore(step)
                row["seconds"].append(time.perf_counter() - began)
            row["equal"] &= digest(fresh) == expected
        rows.append(row)
    return {"restores": rows}


def _write_spread(run: workload.Run, root: Path, window: int) -> int:
    """A checkpoint of such a window, after the whole state that comes first; its step."""
    run.clip = clip_grad_norm_
    every = max(2, window)
    with Checkpointer(
        root, run.state(), strategy="spread", every=every, window=window, under_pressure="wait"
    ) as checkpointer:
        for step in range(1, 2 * every + 1):
            run.train_step()
            checkpointer.step(step)
    await_end_of(str(root))
    return 2 * every


def _write(run: workload.Run, root: Path, records: list[int]) -> dict[int, str]:
    """A base and its records; what must come back, by the number of records."""
    run.clip = clip_grad_norm_
    expected = {}
    with Checkpointer(
        root, run.state(), strategy="log", base_every=NO_BASE, under_pressure="wait"
    ) as checkpointer:
        for step in range(_BASE, _BASE + max(records) + 1):
            run.train_step()
            checkpointer.step(step)
            if step - _BASE in (0, *records):
                expected[step - _BASE] = digest(run)
    await_end_of(str(root))  # no restore may be served from a keeper's memory
    return expected


def _read_record(root: Path, step: int) -> float:
    """The seconds to read one record into memory, as a restore does it: verified and decoded."""
    disk = Disk(root)
    name = catalog.find(disk, step)
    (record,) = catalog.read_manifest(disk, name).records
    table = catalog.read_table(disk, record.part)
    wanted = [(entry, [Destination.whole(empty(entry))]) for entry in table.tensors.values()]
    began = time.perf_counter()
    with Loader() as loader, Candidate(name, disk).sources(record.part) as sources:
        loader.load(record.part, sources, wanted, table)
    return time.perf_counter() - began


def _updates(run: workload.Run) -> list[float]:
    """The seconds of updates without anything hooked to them; the first, which makes the moments,
    apart."""
    seconds = []
    ends: dict[str, float] = {}
    for _ in range(_UPDATES + 1):
        run.train_step(lambda phase: ends.update({phase: time.perf_counter()}))
        seconds.append(ends["update"] - ends["backward"])
    return seconds[1:]
