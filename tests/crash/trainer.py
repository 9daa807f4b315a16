"""A real training run in a process of its own, to be killed: prints one JSON line for each event.

python trainer.py STORE STEPS EVERY [STRATEGY [BASE_EVERY]]
"""

import json
import sys

import torch
from torch import nn

import everstep


def build() -> dict[str, object]:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 64)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train_one_step(state: dict[str, object]) -> float:
    model, optimizer, scheduler = state["model"], state["optimizer"], state["scheduler"]
    data = torch.randn(16, 64)
    loss = (model(data) - data).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss.item()


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main(
    store: str, steps: int, every: int, strategy: str = "full", base_every: int | None = None
) -> None:
    state = build()
    keep = everstep.Keep(last=3)
    with everstep.Checkpointer(
        store,
        state,
        every=every,
        strategy=everstep.Log(base_every=base_every) if strategy == "log" else strategy,
        keep=keep,
    ) as checkpointer:
        start = checkpointer.restore()
        tell(restored=start, keeper=checkpointer._client.keeper_pid)
        for step in range(start + 1, steps + 1):
            loss = train_one_step(state)
            tell(trained=step, loss=loss.hex())  # before a kill may find it saved
            checkpointer.step(step)
            tell(step=step)
    tell(done=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5], *map(int, sys.argv[5:]))
