"""The runs that are trained here: the GPT of `everstep demo`, larger, in bf16 with fp32 weights.

Parameters and AdamW's moments are float32 (the master weights); autocast computes in bf16. No step
waits for the device: batches come from pinned memory, and nobody asks for a loss.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import xxhash
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
    "case": Shape(4, heads=8, width=512, sequence=256, batch=8, learning_rate=1e-3),
    "small": Shape(2, heads=2, width=64, sequence=32, batch=4, learning_rate=1e-3),
}
"""The batches of the first two make steps that last as long as a copy of the state."""
RECOMPUTED = "2b"
"""Its activations are computed again in the backward: else they would not fit."""


@dataclass(slots=True)
class DeviceRun(workload.Run):
    """A run whose steps do not wait for the device."""

    forward: Callable[[Tensor], Tensor] = field(kw_only=True)
    """The model, or what was compiled of it."""
    scaler: Any = field(kw_only=True)
    dtype: torch.dtype = torch.bfloat16
    micro_batches: int = 1
    replay: Callable[..., None] | None = None
    """A CUDA graph of forward and backward; `is_updated`: and of the update."""
    is_updated: bool = False

    def state(self) -> dict[str, Any]:
        """As workload.Run's, and a scaler where there is one."""
        state = workload.Run.state(self)
        return {**state, "scaler": self.scaler} if self.scaler.is_enabled() else state

    def train_step(self, mark: Callable[[str], object] = lambda phase: None) -> Any:
        """One update."""
        if self.replay:
            self.replay(*self.batch())
            if not self.is_updated:
                self.update()
            return
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.micro_batches):
            self.backward(*self.batch())
        self.update()

    def batch(self) -> tuple[Tensor, ...]:
        """Inputs and targets on the device."""
        drawn = self.loader.next()
        if self.device.type == "cuda":
            drawn = tuple(part.contiguous().pin_memory() for part in drawn)
        return tuple(part.to(self.device, non_blocking=True) for part in drawn)

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        """Forward and backward."""
        with torch.autocast(self.device.type, self.dtype):
            logits = self.forward(inputs)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self.scaler.scale(loss / self.micro_batches).backward()

    def update(self) -> None:
        """Clip and step; all of it is enqueued."""
        self.scaler.unscale_(self.optimizer)
        self.clip(self.model.parameters(), workload.GRADIENT_NORM_MAX)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()


def build(size: str, device: str, seed: int, **options: Any) -> DeviceRun:
    """A fresh run, built on the device; seeds torch's generators. `options`: recompute, fp16,
    capturable, micro_batches."""
    random.seed(seed)
    torch.manual_seed(seed)
    place, shape = torch.device(device), SIZES[size]
    with place:
        model = workload.GPT(shape).train()
    if options.get("recompute", size == RECOMPUTED):
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    is_capturable, is_fp16 = options.get("capturable", False), options.get("fp16", False)
    rate = shape.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=is_capturable)
    scale = 2.0**40  # the first updates overflow and are skipped
    text = workload.load_text()
    return DeviceRun(
        model,
        optimizer,
        LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
        workload.Loader(text, batch=shape.batch, sequence=shape.sequence, seed=seed),
        {"size": size, "seed": seed},
        place,
        forward=model,
        scaler=torch.amp.GradScaler(device, init_scale=scale, enabled=is_fp16),
        dtype=torch.float16 if is_fp16 else torch.bfloat16,
        micro_batches=options.get("micro_batches", 1),
    )


def make_exact() -> None:
    """From here on equal runs are equal bit for bit: kernels whose sums have no order are not used.
    On CUDA the environment needs CUBLAS_WORKSPACE_CONFIG as well."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def digest(run: workload.Run) -> str:
    """Of every byte that must come back: model, optimizer, loader, generators, and the rate."""
    hasher = xxhash.xxh3_128(repr(run.scheduler.get_last_lr()).encode())
    tensors = {**run.model.state_dict(), "loader": run.loader.state_dict()["generator"]}
    tensors["rng"] = torch.get_rng_state()
    if run.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state()
    for index, held in run.optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{key}": value for key, value in sorted(held.items())}
    for name, tensor in tensors.items():
        hasher.update(name.encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        hasher.update(flat.view(torch.uint8).numpy())
    return hasher.hexdigest()


def synchronize(device: torch.device) -> None:
    """Wait for the device: the one place where it is meant."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
