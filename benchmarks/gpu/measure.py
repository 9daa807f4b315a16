"""What the machine's links carry; and training with checkpoints beside it: one contender, at every
step and at every tenth.

Blocks of steps without checkpoints stand before and after. A block is timed by the host's clock up
to the device's last step, and each step by events on the device; within a block nothing waits for
the device but what the contender waits for.
"""

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import ALL
from benchmarks.contenders import KINDS, Directory, Everstep, Finish, Finished, state_bytes
from benchmarks.gpu import traces, training
from benchmarks.gpu.part import Settings
from benchmarks.gpu.training import synchronize
from benchmarks.machine import describe, filled_buffer, peak_memory, plain_write, processes
from everstep.errors import EverstepError

WARM_STEPS = 3
BLOCK_S = 20.0
"""After which a block ends that has not come to its number of steps."""
SKIPS = "everstep-full-skip"
"""What it leaves out is counted: so it shows what captures cost where a disk is too slow."""
BASELINE_STEPS = {"300m": 12, "2b": 5, "small": 4}
STEPS = {
    "300m": {1: 12, 10: 30},
    "2b": {10: 20, 1: 5},
    "small": {1: 4, 10: 20},
    f"300m {SKIPS}": {1: 12},
    "2b everstep-log": {1: 2},
}
"""By how often is saved; in this order. More records of 8 GB would fill a disk of 64 GB."""
BASE_EVERY = 12
"""Of a log that saves every tenth step, but records all."""
WARM_SAVES = {"300m": 2, "2b": 1, "small": 1}
KEPT = {"300m": 2, "2b": 1, "small": 2}
"""Checkpoints that stay on the disk, beside the one that is written."""
LINK_BYTES = 1 << 30


def machine(settings: Settings) -> None:
    """The machine in words, its link and its disks."""
    device = torch.device(settings.device)
    size = LINK_BYTES >> (8 if settings.small else 0)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU: the processor"
    settings.report(machine={"device": gpu, **describe(Path(settings.disk))})
    settings.report(**link(device, size))
    for name in ("fast", "disk"):
        path = Path(getattr(settings, name)) / "plain"
        settings.report(
            **{f"{name}_write_bytes_per_s": size / plain_write(path, filled_buffer(size))}
        )
        path.unlink()


def link(device: torch.device, size: int) -> dict[str, float]:
    """Bytes a second of plain copies off the device: the fastest of some."""
    on_device = torch.ones(size, dtype=torch.uint8, device=device)
    found = {}
    for name, is_pinned in (("pinned", device.type == "cuda"), ("pageable", False)):
        host = torch.ones(size, dtype=torch.uint8, pin_memory=is_pinned)
        times = []
        for _ in range(6):
            synchronize(device)
            began = time.perf_counter()
            host.copy_(on_device, non_blocking=is_pinned)
            synchronize(device)
            times.append(time.perf_counter() - began)
        found[f"{name}_to_host_bytes_per_s"] = size / min(times[1:])
    return found


def figures(settings: Settings) -> None:
    """Blocks without, with, and without checkpoints; and the trace of a save."""
    size = settings.size_of(settings.size)
    bench = _Bench(settings, training.build(size, settings.device, settings.seed))
    for _ in range(WARM_STEPS):
        bench.run.train_step()
    settings.report(state_bytes=state_bytes(bench.run))
    idle = Directory(bench.run, Path(), 1)
    settings.report(block="before", **bench.block(idle, 0, BASELINE_STEPS[size]))
    for every, steps in STEPS.get(f"{size} {settings.contender}", STEPS[size]).items():
        contender = bench.open(every)
        bench.lead(contender, every, WARM_SAVES[size])
        with peak_memory(processes([os.getpid()], str(contender.root))) as peak_bytes:
            row = bench.block(contender, every, steps)
        settings.report(block=f"every {every}", host_bytes=peak_bytes(), **row)
        if every == 1:
            bench.lead(contender, 1, 1)
            settings.report(
                trace=True, **traces.traced(lambda c=contender: bench.save(c), bench.device)
            )
            settings.report(**link(bench.device, LINK_BYTES >> (8 if settings.small else 0)))
            contender.settle()
        bench.clean()
    bench.close_everstep()  # it would watch every update
    settings.report(block="after", **bench.block(idle, 0, BASELINE_STEPS[size]))
    bench.close()


class _Bench:
    """The run of this process, its contender, and the number of the last step."""

    def __init__(self, settings: Settings, run: training.DeviceRun) -> None:
        self.run, self.device = run, run.device
        self._settings = settings
        self._step = 0
        self._kept = KEPT[settings.size_of(settings.size)]
        self._contender: Directory | None = None
        self._saves: list[tuple[int, Finish]] = []
        self._janitor = ThreadPoolExecutor(1, "janitor")

    def open(self, every: int) -> Directory:
        """The contender with a new store. One of everstep is made anew, as its options are others;
        a peer's hooks stay on the optimizer, and so it stays, too."""
        root = Path(self._settings.fast if every == 1 else self._settings.disk) / f"every-{every}"
        root.mkdir(parents=True)
        self.close_everstep()
        self._step = 0
        if self._contender is None:
            name = self._settings.contender
            known = {one.name: one for one in ALL}[name.removesuffix("-skip")]
            options = dict(known.options)
            if known.is_everstep:
                options |= {"keep": self._kept, "when_full": "skip" if name == SKIPS else "wait"}
                options |= {"base_every": BASE_EVERY} if every > 1 else {}
            self._contender = KINDS[known.kind](self.run, root, every, **options)
            self._contender.open()
        self._contender.root, self._contender.every = root, every
        return self._contender

    def close_everstep(self) -> None:
        """Close it, where it is one."""
        if isinstance(self._contender, Everstep):
            self._contender.close()
            self._contender = None

    def close(self) -> None:
        """End what a peer has started."""
        self._janitor.shutdown()
        if self._contender:
            self._contender.close()

    def lead(self, contender: Directory, every: int, saves: int) -> None:
        """Untimed: saves that are waited for, and what is in flight at any moment of a long run."""
        for number in range(saves + 1):
            if number == saves:
                contender.begin_block()  # a log's base comes now
            self._step = self._step // every * every + every - 1
            _end(self._one(contender, every)[1])
        for _ in range(2 if every == 1 else 1):
            self._one(contender, every)

    def save(self, contender: Directory) -> None:
        """A step with its save, and another one, beside which copies run and whose update waits."""
        self._one(contender, 1)
        self.run.train_step()
        self._step += 1
        contender.step(self._step, False)

    def block(self, contender: Directory, every: int, steps: int) -> dict[str, Any]:
        """So many timed steps; `every`: 0 for none with a save."""
        is_cuda = self.device.type == "cuda"
        synchronize(self.device)
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        calls, marks = [], [self._mark()]
        began = time.perf_counter()
        while len(marks) <= steps and (len(marks) < 3 or time.perf_counter() < began + BLOCK_S):
            call = self._one(contender, every)
            marks.append(self._mark())
            calls += [call] if every and self._step % every == 0 else []
        synchronize(self.device)
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() if is_cuda else 0
        ends = [(at, _end(finish) if finish else Finished(at + s)) for at, finish, s in calls]
        saved = [(at, end) for at, end in ends if end]
        return {
            "steps": len(marks) - 1,
            "wall_step_s": seconds / (len(marks) - 1),
            "step_s": [_between(*pair) for pair in pairwise(marks)],
            "call_s": [call_s for _, _, call_s in calls],
            "held_s": [end.held_at - at for at, end in saved if end.held_at],
            "durable_s": [end.at - at for at, end in saved],
            "saves": len(saved),
            "skipped": len(ends) - len(saved),
            "device_bytes": peak,
        }

    def clean(self) -> None:
        """Delete what is left."""
        for step, finish in self._saves:
            self._delete(step, finish)
        self._saves.clear()
        self._janitor.submit(int).result()  # what came before is done

    def _one(self, contender: Directory, every: int) -> tuple[float, Finish | None, float]:
        """A step and its call: when that began, how to wait for its save, and how long it took."""
        self.run.train_step()
        self._step += 1
        is_due = bool(every) and self._step % every == 0
        began = time.perf_counter()
        finish = contender.step(self._step, is_due)
        took_s = time.perf_counter() - began
        if is_due:  # peers keep all: as many stay as with everstep, and a thread deletes the others
            self._saves.append((self._step, finish or int))  # type: ignore[arg-type]
            if len(self._saves) > self._kept:
                self._delete(*self._saves.pop(0))
        return began, finish, took_s

    def _delete(self, step: int, finish: Finish) -> None:
        contender = self._contender
        assert contender
        self._janitor.submit(lambda: (_end(finish), contender.discard([step])))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _end(finish: Finish | None) -> Any:
    """The end of a save; None where it was left out, or was over when its call was."""
    with contextlib.suppress(EverstepError):
        return finish() if finish else None


def _between(before: Any, after: Any) -> float:
    """Seconds; the device has passed both."""
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1e3
