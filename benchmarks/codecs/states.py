"""States to be saved: a small GPT on real text, in float32, in bfloat16 with float32 masters, and
with low-rank adapters on frozen weights."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from everstep.cli.workload import GPT, Loader, Shape, load_text

SHAPE = Shape(layers=4, heads=4, width=320, sequence=64, batch=2, learning_rate=1e-3)
RANK = 8


class Masters:
    """AdamW on float32 copies of bfloat16 parameters, which are rounded from them."""

    def __init__(self, rounded: Iterable[nn.Parameter], **options: Any) -> None:
        self._rounded = list(rounded)
        self.parameters = nn.ParameterList(p.detach().float() for p in self._rounded)
        self.optimizer = torch.optim.AdamW(self.parameters, **options)

    def step(self) -> None:
        for master, rounded in zip(self.parameters, self._rounded, strict=True):
            master.grad = rounded.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, rounded in zip(self.parameters, self._rounded, strict=True):
                rounded.copy_(master)
                rounded.grad = None


class LowRank(nn.Module):
    """A linear layer that is frozen, and an adapter beside it (Hu et al., LoRA, 2021)."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain = plain.requires_grad_(False)
        self.down = nn.Linear(plain.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, plain.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + self.up(self.down(x))


@dataclass
class Training:
    """A run: what is saved of it, and a step of it."""

    state: dict[str, Any]
    step: Callable[[], None]

    def set_rate(self, share: float) -> None:
        """The optimizer's rate as a share of what it began with."""
        for group in self.state["optimizer"].param_groups:
            group["lr"] = share * SHAPE.learning_rate


def build(kind: str, trained: dict[str, Tensor] | None = None) -> Training:
    """A run of that kind; from those weights, where they are given."""
    torch.manual_seed(1)
    model = GPT(SHAPE)
    if trained is not None:
        model.load_state_dict(trained)
    loader = Loader(load_text(), batch=SHAPE.batch, sequence=SHAPE.sequence, seed=1)
    if kind == "bf16":
        model.bfloat16()
        masters = Masters(model.parameters(), lr=SHAPE.learning_rate, fused=True)
        parts = {"masters": masters.parameters, "optimizer": masters.optimizer}
        return _training(model, loader, parts, masters.step)
    if kind == "lora":
        model.requires_grad_(False)
        for block in model.blocks:
            block.linear1 = LowRank(block.linear1)
            block.linear2 = LowRank(block.linear2)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=SHAPE.learning_rate, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _training(model, loader, {"optimizer": optimizer}, update)


def _training(
    model: GPT, loader: Loader, parts: dict[str, Any], update: Callable[[], None]
) -> Training:
    def step() -> None:
        inputs, targets = loader.next()
        logits = model(inputs).float()
        functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        update()

    return Training({"model": model, "loader": loader, **parts}, step)
