"""The training run of `everstep demo` (and of benchmarks/): a GPT on the bytes of real text.

It is an ordinary run, written as its user would write it without any thought of checkpoints: AdamW,
a cosine for its rate, gradient clipping, dropout (so that the random state matters) and a loader
with a state of its own. Two runs built with the same arguments on one machine are equal bit for
bit.

Shapes: B batch, S sequence, D width, V vocabulary (the 256 bytes).
"""

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
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

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


class GPT(nn.Module):
    """A decoder-only transformer over bytes, its head tied to its embedding."""

    def __init__(self, shape: Shape, dropout: float = 0.1) -> None:
        super().__init__()
        width = shape.width
        self.drop = nn.Dropout(dropout)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(shape.sequence, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, shape.heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for each in (self.embed, self.place):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, bytes_bs: Tensor) -> Tensor:
        """Logits [B, S, V] of the byte that follows each position."""
        places = torch.arange(bytes_bs.shape[1], device=bytes_bs.device)
        x_bsd = self.drop(self.embed(bytes_bs) + self.place(places))
        later = places > places[:, None]
        for block in self.blocks:
            x_bsd = block(x_bsd, later, is_causal=True)
        logits: Tensor = self.head(self.norm(x_bsd))
        return logits


@dataclass(slots=True)
class Run:
    """A training run that stands after some number of steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
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
    rate = shape.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, fused=True)
    scheduler = CosineAnnealingLR(optimizer, steps, eta_min=0.1 * rate)
    loader = Loader(text, batch=shape.batch, sequence=shape.sequence, seed=seed)
    note = {"size": size, "seed": seed, "steps": steps, "text_bytes": len(text)}
    return Run(model, optimizer, scheduler, loader, note, torch.device("cpu"))
