"""`python -m benchmarks.codecs.residual`: what top-k's residual is worth to a run that is killed.

A small GPT sends a hundredth of its gradients. Ten times, at random steps, it loses what it did not
send yet: it goes on from that of the last whole state, or from none; or it loses nothing. Means of
the last 50 losses, by seed.
"""

import random
import statistics
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import everstep
from benchmarks.losses import parsed, train_step
from everstep.cli.workload import GPT, Loader, Shape, load_text

SHAPE = Shape(layers=2, heads=4, width=96, sequence=64, batch=8, learning_rate=2e-3)
KILLS, LAST = 10, 50
WAYS = ("nothing lost", "base of 50 steps", "base of 200 steps", "none")
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=SHAPE.learning_rate),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def main(arguments: list[str] | None = None) -> None:
    args = parsed("benchmarks.codecs.residual", arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    table = Table("optimizer", "seed", *WAYS)
    for optimizer in OPTIMIZERS:
        for seed in range(1, args.seeds + 1):
            losses = [train(optimizer, seed, way, args.steps) for way in WAYS]
            table.add_row(optimizer, str(seed), *(f"{loss:.3f}" for loss in losses))
    dist.destroy_process_group()
    Console(width=100).print(table)


def begin(name: str, seed: int, residual: str = "bases") -> tuple[Any, ...]:
    """Model, what compresses its gradients, optimizer, loader."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(GPT(SHAPE, dropout=0.0))
    hook = everstep.compress(model, "topk", ratio=0.01, residual=residual)
    optimizer = OPTIMIZERS[name](model.parameters())
    loader = Loader(load_text(), batch=SHAPE.batch, sequence=SHAPE.sequence, seed=seed)
    return model, hook, optimizer, loader


def kills_of(seed: int, steps: int) -> set[int]:
    """The steps after which a run is killed."""
    return set(random.Random(seed).sample(range(2, steps), KILLS))


def train(name: str, seed: int, way: str, steps: int) -> float:
    """The loss in the end."""
    model, hook, optimizer, loader = begin(name, seed)
    kills = kills_of(seed, steps)
    every = int(way.split()[2]) if way.startswith("base") else steps
    losses, base = [], hook.state_dict()
    for step in range(1, steps + 1):
        losses.append(train_step(model, optimizer, loader))
        if step % every == 1:
            base = hook.state_dict()
        if step in kills and way != WAYS[0]:
            nothing = {**base, "tensors": {"residual": {}}}
            hook.load_state_dict(nothing if way == "none" else base)
    return statistics.mean(losses[-LAST:])


if __name__ == "__main__":
    main()
