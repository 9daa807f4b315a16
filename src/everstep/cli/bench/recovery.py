"""What a restore of a log costs, by the number of records between it and its base; and that of a
spread checkpoint, by the steps of its window.

At most it should cost a restore of the base, and for each record a read of it and one update. Those
are measured here too, each by itself and under the same conditions: in a process that was started
for it (`probe`), with the store's files not in the page cache, in turn with the restores.

All this in a process of its own, when those of the contenders have ended, as after a crash: a
restore is slower while others hold much memory (docs/results.md).
"""

from pathlib import Path
from typing import Any

from everstep import Checkpointer, Store, clip_grad_norm_
from everstep.cli import workload
from everstep.cli.bench import probe
from everstep.cli.bench.checks import digest
from everstep.cli.bench.machine import await_end_of
from everstep.cli.bench.plan import rotated
from everstep.cli.bench.worker import serve
from everstep.cli.strategies import NO_BASE

_RUN_STEPS = 1000
_BASE = 1
"""The step of the base."""


class Recovery:
    """What the parent asks for; each in a store of its own."""

    def __init__(self, root: Path, text: bytes, size: workload.Size) -> None:
        self._root = root
        self._text = text
        self._size = size

    def log(self, records: list[int], rounds: int) -> dict[str, Any]:
        """`rounds` times, in an order that turns: a restore of the base, one at each of these
        numbers of records, and the parts of the longest by themselves."""
        root = self._root / "log"
        run = self._run()
        expected = _write(run, root, records)
        final = probe.weights(run)
        del run
        last = _BASE + max(records)
        counts = sorted({0, *records})
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        equal = dict.fromkeys(counts, True)
        parts: list[dict[str, Any]] = []
        cache = ""
        for number in range(rounds):
            for count in rotated([*counts, None], number):
                if count is None:
                    reply = self._ask("apart", root, base=_BASE, last=last)
                    equal[counts[-1]] &= reply["digest"] == final
                    parts.append(reply)
                else:
                    reply = self._ask("restore", root, step=_BASE + count)
                    equal[count] &= reply["digest"] == expected[count]
                    seconds[count].append(reply["seconds"])
                    cache = reply["cache"]
        manifests = {count: Store(root).manifest(_BASE + count) for count in (0, max(records))}
        return {
            "cache": cache,
            "base_s": seconds.pop(0),
            "record_s": [part["record_s"] for part in parts],
            "bytes_s": [part["bytes_s"] for part in parts],
            "update_s": [part["update_s"] for part in parts],
            "base_bytes": manifests[0].size,
            "record_bytes": manifests[max(records)].size,
            "restores": [
                {"records": count, "seconds": found, "equal": equal[count] and equal[0]}
                for count, found in seconds.items()
            ],
        }

    def spread(self, windows: list[int], rounds: int) -> dict[str, Any]:
        """Restore `rounds` times a checkpoint of each of these windows, in turn; of one step: a
        whole state."""
        rows: list[dict[str, Any]] = []
        written = []
        for window in windows:
            root = self._root / "spread" / f"window-{window}"
            run = self._run()
            step = _write_spread(run, root, window)
            written.append((root, step, digest(run)))
            manifest = Store(root).manifest(step)
            row: dict[str, Any] = {"window": len(manifest.parts), "bytes": manifest.size}
            rows.append(row | {"seconds": [], "equal": True, "cache": ""})
        del run
        for number in range(rounds):
            turn = rotated(list(zip(rows, written, strict=True)), number)
            for row, (root, step, expected) in turn:
                reply = self._ask("restore", root, step=step)
                row["cache"] = reply["cache"]
                row["seconds"].append(reply["seconds"])
                row["equal"] &= reply["digest"] == expected
        return {"restores": rows}

    def close(self) -> dict[str, Any]:
        """Nothing is left open."""
        return {}

    def _run(self) -> workload.Run:
        return workload.build(self._text, seed=1, steps=_RUN_STEPS, size=self._size)

    def _ask(self, do: str, root: Path, **request: Any) -> dict[str, Any]:
        return probe.ask(do, root, self._size, self._text, **request)


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


if __name__ == "__main__":
    serve(Recovery)
