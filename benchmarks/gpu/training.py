"""The runs that are trained here: the GPT of `everstep demo`, larger, in bf16 with fp32 weights.

Parameters and AdamW's moments are float32 (the master weights); autocast computes in bf16. No step
waits for the device: batches come from pinned memory, and nobody asks for a loss.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from everstep.cli import workload
from everstep.cli.workload import Shape

SIZES = {
    "300m": Shape(24, heads=16, width=1024, sequence=1024, batch=24, learning_rate=3e-4),
    "2b": Shape(26, heads=20, width=2560, sequence=1024, batch=16, learning_rate=1e-4),
    "killed": Shape(24, heads=16, width=1024, sequence=256, batch=8, learning_rate=3e-4),
    "small": Shape(2, heads=2, width=64, sequence=32, batch=4, learning_rate=1e-3),
}
"""The batches of the first two make steps that last as long as a copy of the state."""
RECOMPUTED = "2b"
"""Its activations are computed again in the backward: else they would not fit."""


@dataclass(slots=True)
class DeviceRun(workload.Run):
    """A run whose steps do not wait for the device."""

    def train_step(self, mark: Callable[[str], object] = lambda phase: None) -> Any:
        """One update; all of it is enqueued."""
        inputs, targets = self.batch()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(inputs)
        functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        self.clip(self.model.parameters(), workload.GRADIENT_NORM_MAX)
        self.optimizer.step()
        self.scheduler.step()

    def batch(self) -> tuple[Tensor, ...]:
        """Inputs and targets on the device."""
        drawn = self.loader.next()
        if self.device.type == "cuda":
            drawn = tuple(part.contiguous().pin_memory() for part in drawn)
        return tuple(part.to(self.device, non_blocking=True) for part in drawn)


def build(size: str, device: str, seed: int) -> DeviceRun:
    """A fresh run, built on the device; seeds torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    place, shape = torch.device(device), SIZES[size]
    with place:
        model = workload.GPT(shape).train()
    if size == RECOMPUTED:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.learning_rate, fused=True)
    text = workload.load_text()
    return DeviceRun(
        model,
        optimizer,
        LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
        workload.Loader(text, batch=shape.batch, sequence=shape.sequence, seed=seed),
        {"size": size, "seed": seed},
        place,
    )


def make_exact() -> None:
    """From here on equal runs are equal bit for bit: kernels whose sums have no order are not used.
    On CUDA the environment needs CUBLAS_WORKSPACE_CONFIG as well."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def synchronize(device: torch.device) -> None:
    """Wait for the device: the one place where it is meant."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
