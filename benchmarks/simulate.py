"""A simulated accelerator: what checkpoints cost where copies off the device are slow.

There is no device. Forward and backward are timed waits that use no processor, and a copy takes as
long as a channel of a given bandwidth would; all the rest is the real thing: torch's AdamW on the
CPU, everstep, its keeper, a disk. The throttle stands around `Batch.copy_from_cpu`, in this process
only; the library knows nothing of it. Times are in steps of training, per checkpoint.
"""

import contextlib
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

from benchmarks.contenders import checkpointer_of
from everstep.capture.copies import Batch

TENSORS, FLOATS = 64, 16384
WINDOW_S = 0.1
"""Of a step's forward and backward, in which copies cost nothing."""
EVERY = 16
WARM_CHECKPOINTS, CHECKPOINTS = 2, 3
COPY_STEPS = (0.5, 1, 2, 4, 7)
"""How long the copy of a state takes, in windows."""


def run(root: Path, console: Console, tell: Callable[[str], None]) -> int:
    """Measure and show all rows. Returns 1 where what was restored differs."""
    torch.set_num_threads(1)  # two that spin would be in each other's way
    heads = ("copy of a state", "full", "spread", "copied over", "N − 1", "GoCkpt's model")
    table = Table(*heads, title="Simulated accelerator: steps of stall per checkpoint", box=None)
    is_equal = True
    for copy_steps in COPY_STEPS:
        stalls: dict[str, float] = {}
        for strategy in ("full", "spread"):
            tell(f"{strategy}, a copy takes {copy_steps:g} steps")
            store = root / f"{strategy}-{copy_steps}"
            stalls[strategy], steps, equal = measure(store, strategy, copy_steps)
            is_equal &= equal
        table.add_row(
            f"{copy_steps:g} steps",
            *(f"{stalls[strategy]:.2f}" for strategy in ("full", "spread")),
            f"{steps} steps",
            f"{max(0.0, copy_steps - 1):.2f}",
            f"{max(0.0, copy_steps * (copy_steps - 1) / 14):.2f}",
        )
    console.print(table)
    console.print("" if is_equal else "what was restored DIFFERS from what was saved")
    return 0 if is_equal else 1


class Training:
    """A model without a forward: its gradients are there when the wait is over."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        draws = [torch.randn(FLOATS, generator=generator) for _ in range(2 * TENSORS)]
        self.model = nn.ParameterList(nn.Parameter(values) for values in draws[:TENSORS])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._gradients = draws[TENSORS:]

    def update(self) -> None:
        """Forward and backward, which wait, and a real update."""
        began = time.perf_counter()
        for parameter, gradient in zip(self.model, self._gradients, strict=True):
            parameter.grad = gradient.clone()
        time.sleep(max(0.0, WINDOW_S - (time.perf_counter() - began)))
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Of a Checkpointer."""
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """What must come back."""
        found = [parameter.detach() for parameter in self.model]
        for parameter in self.model:
            found += self.optimizer.state[parameter].values()
        return found


def measure(store: Path, strategy: str, copy_steps: float) -> tuple[float, int, bool]:
    """Stall per checkpoint in steps, over how many steps the last one was copied, and whether it
    comes back the same. A period begins after the update that follows a due step, in which the last
    of its copies are waited for."""
    import everstep

    training = Training(seed=1)
    training.update()
    size = sum(tensor.nbytes for tensor in training.tensors())
    plain_s = statistics.median(_seconds(training.update) for _ in range(EVERY))
    periods = []
    last = EVERY * (WARM_CHECKPOINTS + CHECKPOINTS)
    with (
        throttled(size / (copy_steps * WINDOW_S)),
        checkpointer_of(training, store, EVERY, strategy) as checkpointer,
    ):
        began = 0.0
        for step in range(1, last + 2):
            training.update()
            if step == last + 1 or (step % EVERY == 1 and step > EVERY * WARM_CHECKPOINTS):
                now = time.perf_counter()
                periods += [now - began] if began else []
                began = now
            if step == last:
                expected = [tensor.clone() for tensor in training.tensors()]
            if step <= last:
                checkpointer.step(step)
    parts = everstep.Store(store).manifest(last).parts
    other = Training(seed=2)
    with checkpointer_of(other, store, 1, "full") as checkpointer:
        checkpointer.restore(last)
    is_equal = all(map(torch.equal, expected, other.tensors()))
    stall_s = statistics.median(periods) - EVERY * plain_s
    return stall_s / WINDOW_S, len(parts), is_equal


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


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
