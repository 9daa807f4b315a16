"""A small character model, checkpointed at every step. Interrupt it and start it again.

python examples/train.py [--store runs/example] [--steps 300]
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import everstep


class Loader:
    """Random pieces of a text. Its generator is its state."""

    def __init__(self, text: bytes, length: int, batch: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length, self.batch = length, batch
        self.generator = torch.Generator().manual_seed(0)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(
            len(self.data) - self.length - 1, (self.batch,), generator=self.generator
        )
        pieces = torch.stack([self.data[start : start + self.length + 1] for start in starts])
        return pieces[:, :-1], pieces[:, 1:]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


class Model(nn.Module):
    """Embedding, two GRU layers with dropout, and a head."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.GRU(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(text))[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="runs/example")
    parser.add_argument("--steps", type=int, default=300)
    chosen = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps)
    loader = Loader(Path(argparse.__file__).read_bytes(), length=64, batch=16)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    with everstep.Checkpointer(chosen.store, state, keep=everstep.Keep(last=3)) as checkpointer:
        start = checkpointer.restore()
        print(f"starting after step {start}")
        for step in range(start + 1, chosen.steps + 1):
            text, following = (part.to(device) for part in loader.next())
            loss = functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            checkpointer.step(step)
            if step % 10 == 0:
                print(f"step {step:4d}   loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
