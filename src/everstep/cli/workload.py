"""The training run of `everstep demo` (and of benchmarks/): a GPT on the bytes of real text.

It is an ordinary run, written as its user would write it without any thought of checkpoints: AdamW,
warm-up and cosine, gradient clipping, dropout (so that the random state matters) and a loader with
a state of its own. Two runs built with the same arguments on one machine are equal bit for bit.

Shapes: B batch, S sequence, D width, V vocabulary (the 256 bytes).
"""

import math
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

TEXT_BYTES_MAX = 4_000_000
VOCABULARY = 256
GRADIENT_NORM_MAX = 1.0

Size = Literal["25m", "tiny"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model and of its batches."""

    layers: int
    heads: int
    width: int
    sequence: int
    batch: int
    learning_rate: float


SHAPES: dict[Size, Shape] = {
    "25m": Shape(layers=8, heads=8, width=512, sequence=128, batch=4, learning_rate=3e-4),
    "tiny": Shape(layers=2, heads=2, width=32, sequence=16, batch=2, learning_rate=1e-3),
}


def load_text() -> bytes:
    """The sources of Python's own standard library, in the order of their names: the same text in
    every process of one machine."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(source.read_bytes() for source in sources)[:TEXT_BYTES_MAX]


class Loader:
    """Batches of random windows of a text, with a position that can be saved and set again."""

    def __init__(self, text: bytes, *, batch: int, sequence: int, seed: int) -> None:
        self._text_bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._batch = batch
        self._sequence = sequence
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch: inputs [B, S] and targets [B, S], the targets one byte further."""
        last = len(self._text_bytes) - self._sequence - 1
        starts = torch.randint(0, last + 1, (self._batch, 1), generator=self._generator)
        windows = self._text_bytes[starts + torch.arange(self._sequence + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch at which `state_dict()` was taken."""
        self._generator.set_state(state["generator"])


class Block(nn.Module):
    """One layer: causal self-attention and a perceptron, each on a normed residual stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.drop = nn.Dropout(dropout)
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x_bsd: Tensor) -> Tensor:
        """The stream after this layer."""
        x_bsd = x_bsd + self.drop(self.project(self._attend(self.norm_attention(x_bsd))))
        x_bsd = x_bsd + self.drop(self.mlp(self.norm_mlp(x_bsd)))
        return x_bsd

    def _attend(self, x_bsd: Tensor) -> Tensor:
        batch, sequence, width = x_bsd.shape
        split = self.query_key_value(x_bsd).view(batch, sequence, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.drop.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, None, dropout, is_causal=True
        )
        return mixed.transpose(1, 2).reshape(batch, sequence, width)


class GPT(nn.Module):
    """A decoder-only transformer over bytes, its head tied to its embedding."""

    def __init__(self, shape: Shape, dropout: float = 0.1) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.place = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_initialise)
        self.head.weight = self.embed.weight

    def forward(self, bytes_bs: Tensor) -> Tensor:
        """Logits [B, S, V] of the byte that follows each position."""
        places = torch.arange(bytes_bs.shape[1], device=bytes_bs.device)
        x_bsd = self.drop(self.embed(bytes_bs) + self.place(places))
        for block in self.blocks:
            x_bsd = block(x_bsd)
        logits: Tensor = self.head(self.norm(x_bsd))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@dataclass(slots=True)
class Run:
    """A training run that stands after some number of steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    loader: Loader
    note: dict[str, Any]
    device: torch.device
    clip: Callable[..., Tensor] = nn.utils.clip_grad_norm_
    """torch's, or everstep's, which does the same and lets a log record raw gradients."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint of this run holds: the `state` of a `Checkpointer`."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "note": self.note,
        }

    def train_step(self, mark: Callable[[str], object] = lambda phase: None) -> float:
        """Forward, backward, clip, update; returns the loss (and so waits for the device).

        `mark` is told the name of each phase when it is over.
        """
        inputs, targets = (batch.to(self.device) for batch in self.loader.next())
        logits = self.model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        mark("forward")
        loss.backward()
        self.clip(self.model.parameters(), GRADIENT_NORM_MAX)
        mark("backward")
        self.optimizer.step()
        mark("update")
        self.scheduler.step()
        return float(loss.detach())


def build(
    text: bytes,
    *,
    seed: int,
    steps: int,
    size: Size = "25m",
    shard: Callable[[nn.Module], object] = lambda model: None,
) -> Run:
    """A fresh run of `steps` steps; seeds the global generators of python, numpy and torch.

    `shard` spreads the model over ranks, in place.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    shape = SHAPES[size]
    model = GPT(shape).train()
    shard(model)
    optimizer = torch.optim.AdamW(_groups(model), lr=shape.learning_rate, fused=True)
    scheduler = LambdaLR(optimizer, lambda step: _rate(step, steps))
    loader = Loader(text, batch=shape.batch, sequence=shape.sequence, seed=seed)
    note = {"size": size, "seed": seed, "steps": steps, "text_bytes": len(text)}
    return Run(model, optimizer, scheduler, loader, note, torch.device("cpu"))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _rate(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of a run, then a cosine down to a tenth of the rate."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))
