"""The model of the zoo: a decoder whose sizes divide by no number of ranks, and its data."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 8
"""Sequences of a step, over all data-parallel ranks."""

LENGTH = 12
MICROBATCHES = 4
"""Of a pipeline, which has no more stages than this."""

VECTORS = ("norm.weight", "norm.bias", ".bias", "scale")

adamw = partial(torch.optim.AdamW, lr=0.01, eps=1e-4, foreach=True)
"""A large eps: gradients near zero, where the order of sums shows, are not made large."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained; how it lies on ranks is not said here."""

    layers: int = 2
    width: int = 30
    heads: int = 2
    hidden: int = 45
    vocabulary: int = 51
    tied: bool = False
    norm: Callable[[int], nn.Module] = nn.RMSNorm
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    grouped: bool = True
    """Whether vectors have a group of their own, without weight decay."""

    seed: int = 0


class Block(nn.Module):
    """Attention and MLP; `scale`, of one element, lies on one rank of any sharding."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width = recipe.width
        self.head_size = width // recipe.heads
        self.attention_norm = recipe.norm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.mlp_norm = recipe.norm(width)
        self.up = nn.Linear(width, recipe.hidden)
        self.down = nn.Linear(recipe.hidden, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2)) * self.scale
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """All of it, or a stage of a pipeline: then some layers, and the embedding or the head.

    The buffer `passed` says how many steps have passed, and the loss depends on it. One forward
    adds the share of the global batch that it sees: `share` of each sequence.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(recipe.vocabulary, recipe.width)
        self.blocks = nn.ModuleDict({str(n): Block(recipe) for n in range(recipe.layers)})
        self.norm: nn.Module | None = recipe.norm(recipe.width)
        self.head: nn.Linear | None = nn.Linear(recipe.width, recipe.vocabulary, bias=False)
        self.register_buffer("passed", torch.zeros(()))
        self.share = 1 / BATCH
        nn.init.normal_(self.embedding.weight, std=0.5)
        if recipe.tied:
            self.tie()

    def tie(self) -> None:
        """Again after what makes new parameters."""
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        passed = self.passed.floor()
        if self.training:
            self.passed += x.shape[0] * self.share
        return self.head(self.norm(x) * (1 + passed / 16)) if self.head is not None else x


def decoder(recipe: Recipe) -> Decoder:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        return Decoder(recipe)


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Its groups: by weight decay, and by mesh, since foreach takes no mixture of those."""
    if not recipe.grouped:
        return recipe.optimizer(model.parameters())
    groups: dict[object, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decayed = not name.endswith(VECTORS)  # FSDP1 has but vectors
        mesh = getattr(parameter, "device_mesh", None)
        groups.setdefault((decayed, mesh), []).append(parameter)
    return recipe.optimizer(
        [
            {"params": members, "weight_decay": 0.1 if decayed else 0.0}
            for (decayed, _), members in groups.items()
        ]
    )


def batch(recipe: Recipe, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of all ranks at `step`: counting, by a stride that is to be found."""
    random = torch.Generator().manual_seed(1000 * recipe.seed + step)
    begin = torch.randint(recipe.vocabulary, (BATCH, 1), generator=random)
    stride = torch.randint(1, 4, (BATCH, 1), generator=random)
    tokens = (begin + stride * torch.arange(LENGTH + 1)) % recipe.vocabulary
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(found.flatten(0, 1), targets.flatten())


def mean(values: Iterable[float]) -> float:
    """Whatever their order."""
    values = list(values)
    return math.fsum(values) / len(values)
