"""A simulated accelerator: what checkpoints cost where copies off the device are slow.

There is no device. Forward and backward are timed waits that use no processor, and a copy takes as
long as a channel of a given bandwidth would; all the rest is the real thing: torch's AdamW on the
CPU, everstep, its keeper, a disk. The throttle stands around `Batch.copy_from_cpu`, in this process
only; the library knows nothing of it. Times are in steps of training, per checkpoint.
"""

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import everstep
from benchmarks.contenders import checkpointer_of
from everstep.capture.copies import Batch

TENSORS, FLOATS = 64, 16384
WINDOW_S = 0.1
"""Of a step's forward and backward, in which copies cost nothing."""
EVERY = 16
WARM_CHECKPOINTS, CHECKPOINTS = 2, 3
COPY_STEPS = (0.5, 1, 2, 4, 7)
"""How long the copy of a state takes, in windows."""


def show(root: Path, console: Console, tell: Callable[[str], None]) -> None:
    """Measure and show all rows, beside what a copy from one step costs by itself (N − 1) and the
    model of GoCkpt, which spreads a copy over N steps."""
    torch.set_num_threads(1)  # two that spin would be in each other's way
    heads = ("copy of a state", "full", "spread", "copied over", "N − 1", "N (N − 1) / 14")
    table = Table(*heads, title="Steps of stall per checkpoint, simulated accelerator", box=None)
    for copy_steps in COPY_STEPS:
        tell(f"a copy takes {copy_steps:g} steps")
        full, _ = measure(root / f"full-{copy_steps}", "full", copy_steps)
        spread, steps = measure(root / f"spread-{copy_steps}", "spread", copy_steps)
        single = max(0.0, copy_steps - 1)
        models = (f"{value:.2f}" for value in (single, copy_steps * single / 14))
        table.add_row(f"{copy_steps:g}", f"{full:.2f}", f"{spread:.2f}", f"{steps}", *models)
    console.print(table)


class Training:
    """A model without a forward: its gradients are there when the wait is over."""

    def __init__(self) -> None:
        self.model = nn.ParameterList(nn.Parameter(torch.randn(FLOATS)) for _ in range(TENSORS))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._gradients = [torch.randn(FLOATS) for _ in range(TENSORS)]

    def update(self) -> float:
        """Forward and backward, which wait, and a real update; returns the seconds it took."""
        began = time.perf_counter()
        for parameter, gradient in zip(self.model, self._gradients, strict=True):
            parameter.grad = gradient.clone()
        time.sleep(max(0.0, WINDOW_S - (time.perf_counter() - began)))
        self.optimizer.step()
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        """Of a Checkpointer."""
        return {"model": self.model, "optimizer": self.optimizer}


def measure(store: Path, strategy: str, copy_steps: float) -> tuple[float, int]:
    """Stall per checkpoint in steps, and over how many steps the last one was copied. A period
    begins after the update that follows a due step: it waits for the last of that one's copies."""
    training = Training()
    plain_s = statistics.median(training.update() for _ in range(EVERY))
    size = 3 * TENSORS * FLOATS * 4  # the weights and their two moments
    last = EVERY * (WARM_CHECKPOINTS + CHECKPOINTS)
    ends = []
    with (
        throttled(size / (copy_steps * WINDOW_S)),
        checkpointer_of(training, store, EVERY, strategy) as checkpointer,
    ):
        for step in range(1, last + 2):
            training.update()
            if step % EVERY == 1 and step > EVERY * WARM_CHECKPOINTS:
                ends.append(time.perf_counter())
            if step <= last:
                checkpointer.step(step)
    periods = [end - began for began, end in itertools.pairwise(ends)]
    stall_s = statistics.median(periods) - EVERY * plain_s
    return stall_s / WINDOW_S, len(everstep.Store(store).manifest(last).parts)


@contextlib.contextmanager
def throttled(bytes_per_s: float) -> Iterator[None]:
    """Within, what this process copies has arrived when it came through a channel, in turn."""
    plain = Batch.copy_from_cpu
    lock = threading.Lock()
    free_at = 0.0

    def copy(batch: Batch, *args: Any, **kwargs: Any) -> None:
        nonlocal free_at
        size = sum(size for share in batch.shares for _, _, size in share)
        with lock:
            free_at = max(free_at, time.monotonic()) + size / bytes_per_s
            arrives_at = free_at
        plain(batch, *args, **kwargs)
        time.sleep(max(0.0, arrives_at - time.monotonic()))

    Batch.copy_from_cpu = copy
    try:
        yield
    finally:
        Batch.copy_from_cpu = plain
