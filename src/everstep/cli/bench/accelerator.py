"""The simulated accelerator: what checkpoints cost where copies off the device are slow.

There is no device. Forward and backward are timed waits that use no processor, and what leaves "the
device" goes through a `Channel` of a given bandwidth; all the rest is the real thing: torch's
optimizers on the CPU, everstep, its keeper, a disk. The throttle stands around
`Batch.copy_from_cpu`, in this process only; the library knows nothing of it.

Run as a program: settings as JSON in the first argument, a line of JSON for each row that is
measured.
"""

import json
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from everstep import Checkpointer, Keep, Store
from everstep.capture.copies import Batch
from everstep.capture.copy_speed import Pace, Piece, schedule
from everstep.cli.bench.machine import await_end_of
from everstep.keeper.arena import Arena

Kind = Literal["bf16", "fp32"]

TENSORS = 64
WARM_CHECKPOINTS = 2
"""A whole state, from which the copies' speed is learned; records that are copied eagerly."""
_PLAIN_STEPS = 12
_MEASURED = ("copy_bytes_per_s", "overlap_s", "call_s")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one run of the section. A step of training is `window_s` of waiting, and an update."""

    ratios: dict[Kind, Sequence[float]]
    """Of the time to copy a state over the window in which that costs nothing."""
    strategies: Sequence[Literal["full", "spread"]]
    window_s: float
    every: int
    checkpoints: int
    floats: int
    """Of each of the model's tensors."""


class Channel:
    """So many bytes a second, for whoever has some to send: one after the other. Thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def send(self, size: int) -> None:
        """Block until that many bytes would have come through."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._bytes_per_s
            arrives_at = self._free_at
        time.sleep(max(0.0, arrives_at - time.monotonic()))


@contextmanager
def throttled(channel: Channel) -> Iterator[None]:
    """Within, a unit that this process copies has arrived when it came through the channel."""
    plain = Batch.copy_from_cpu

    def copy(
        batch: Batch,
        arena: Arena,
        slot: int,
        movers: Executor | None = None,
        arrived: Callable[[int], None] = lambda start: None,
    ) -> None:
        sizes = {share[0][0]: sum(size for _, _, size in share) for share in batch.shares}
        sizes |= {offset: tensor.nbytes for offset, tensor in batch.strided}

        def arrives(start: int) -> None:
            channel.send(sizes[start])
            arrived(start)

        plain(batch, arena, slot, movers, arrives)

    Batch.copy_from_cpu = copy  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Batch.copy_from_cpu = plain  # type: ignore[method-assign]


class Training:
    """A model without a forward: its gradients are there when the wait is over."""

    def __init__(self, kind: Kind, floats: int, window_s: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw: Callable[[], torch.Tensor] = lambda: torch.randn(floats, generator=generator)  # noqa: E731
        self.model = nn.ParameterList(nn.Parameter(draw()) for _ in range(TENSORS))
        self.optimizer: torch.optim.Optimizer
        if kind == "bf16":
            # The bytes of mixed precision, but for its bf16 weights, which are no state of their
            # own. torch's AdamW takes no bf16 gradient for a float32 weight; this one does.
            for parameter in self.model:
                parameter.grad_dtype = torch.bfloat16
            self.optimizer = torch.optim.RMSprop(self.model.parameters(), momentum=0.9, lr=1e-3)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        self._gradients = [draw().to(dtype) for _ in range(TENSORS)]
        self._window_s = window_s
        self._scale = 1.0
        self.optimizer.zero_grad()

    def update(self) -> None:
        """Forward and backward, which wait, and a real update."""
        self.optimizer.zero_grad()
        began = time.perf_counter()
        self._scale *= 0.99
        for parameter, gradient in zip(self.model, self._gradients, strict=True):
            parameter.grad = gradient * self._scale
        time.sleep(max(0.0, self._window_s - (time.perf_counter() - began)))
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

    def sizes(self) -> tuple[int, int]:
        """Bytes of the state, after the first update, and of its gradients."""
        return (
            sum(tensor.nbytes for tensor in self.tensors()),
            sum(gradient.nbytes for gradient in self._gradients),
        )


def measure(kind: Kind, ratio: float, strategy: str, settings: Settings, root: Path) -> Any:
    """One row: checkpoints of one strategy through one channel.

    A period begins after the update that follows a due step, in which the last of its copies were
    waited for, and has the cost of one checkpoint.
    """
    training = Training(kind, settings.floats, settings.window_s, seed=1)
    training.update()
    state_bytes, gradient_bytes = training.sizes()
    channel = Channel(state_bytes / (ratio * settings.window_s))
    plain_s = _plain_step(training)
    periods: list[dict[str, float]] = []
    every = settings.every
    with ExitStack() as stack:
        stack.enter_context(throttled(channel))
        saver = stack.enter_context(_checkpointer(root, training, strategy, every))
        saver.restore()
        before: tuple[float, float, float] | None = None
        last = every * (WARM_CHECKPOINTS + settings.checkpoints + 1)
        for step in range(1, last + 1):
            training.update()
            if step % every == 1 and step > every * WARM_CHECKPOINTS:
                now = time.perf_counter(), saver.metrics.hold_seconds, saver.metrics.stall_seconds
                if before:
                    periods.append(_period(before, now, every * plain_s))
                before = now
            saver.step(step)
        expected = [tensor.clone() for tensor in training.tensors()]
    await_end_of(str(root))
    manifest = Store(root).manifest(last)
    return {
        "kind": kind,
        "ratio": ratio,
        "strategy": strategy,
        "state_bytes": state_bytes,
        "gradient_bytes": gradient_bytes,
        "plain_step_s": plain_s,
        "window_s": settings.window_s,
        "periods": periods,
        "steps_spread_over": len(manifest.parts),
        "bytes": manifest.size,
        "predicted_s": _predicted(training, ratio, settings, strategy),
        "measured": {key: value for key, value in manifest.capture.items() if key in _MEASURED},
        **_restored(kind, settings, root, last, expected),
    }


def _predicted(training: Training, ratio: float, settings: Settings, strategy: str) -> float:
    """Seconds for which updates wait, by the library's own model of these times."""
    state_bytes, gradient_bytes = (size // TENSORS for size in training.sizes())
    pieces = [Piece(str(index), state_bytes, gradient_bytes) for index in range(TENSORS)]
    pace = Pace(TENSORS * state_bytes / (ratio * settings.window_s), settings.window_s)
    return schedule(pieces, 0, pace, settings.every if strategy == "spread" else 1).stall_s


def _period(
    before: tuple[float, float, float], now: tuple[float, float, float], plain_s: float
) -> dict[str, float]:
    seconds, held, stalled = (b - a for a, b in zip(before, now, strict=True))
    return {"loop_s": seconds - plain_s, "held_s": held, "call_s": stalled - held}


def _plain_step(training: Training) -> float:
    """A step without checkpoints: the median."""
    seconds = []
    for _ in range(_PLAIN_STEPS):
        began = time.perf_counter()
        training.update()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _checkpointer(root: Path, training: Training, strategy: Any, every: int) -> Checkpointer:
    return Checkpointer(
        root,
        training.state(),
        every=every,
        strategy=strategy,
        keep=Keep(last=2),
        under_pressure="wait",
    )


def _restored(
    kind: Kind, settings: Settings, root: Path, step: int, expected: list[torch.Tensor]
) -> dict[str, Any]:
    """The last checkpoint, in another run: how long that took, and whether it is the same."""
    other = Training(kind, settings.floats, settings.window_s, seed=2)
    with _checkpointer(root, other, "full", 1) as saver:
        began = time.perf_counter()
        saver.restore(step)
        seconds = time.perf_counter() - began
    found = other.tensors()
    equal = len(found) == len(expected) and all(
        torch.equal(one.view(torch.uint8), two.view(torch.uint8))
        for one, two in zip(
            (t.reshape(-1) for t in found), (t.reshape(-1) for t in expected), strict=True
        )
    )
    return {"restore_s": seconds, "equal": equal}


def main() -> None:
    """Measure all rows."""
    said: dict[str, Any] = json.loads(sys.argv[1])
    root = Path(said.pop("root"))
    settings = Settings(**said)
    torch.set_num_threads(1)  # two that spin would be in each other's way
    number = 0
    for kind, ratios in settings.ratios.items():
        for ratio in ratios:
            for strategy in settings.strategies:
                store = root / f"accelerator-{number}"
                print(json.dumps(measure(kind, ratio, strategy, settings, store)), flush=True)
                await_end_of(str(store))
                shutil.rmtree(store)
                number += 1


if __name__ == "__main__":
    main()
