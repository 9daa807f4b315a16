"""Runs whose gradients a communication hook compresses, and what their records say."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import alone
import everstep
from everstep import Store
from everstep.redo import clipping, rolling_digest
from everstep.store import catalog
from everstep.tiers.disk import Disk

KINDS = {
    "fp16": {},
    "bf16": {},
    "int8": {"seed": 3},
    "topk": {"ratio": 0.05, "residual": "records"},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
two_kinds = pytest.mark.parametrize("kind", ["fp16", "topk"])  # bf16: test_machine.py
SHARE = {"fp16": 0.501, "bf16": 0.501, "int8": 0.27, "topk": 0.12}
"""Of the gradients' bytes that their forms take here, at most."""


@contextlib.contextmanager
def one_rank(folder):
    """A process group of this process alone; afterwards no gradient is kept for anybody."""
    with alone.one_rank(folder):
        yield
    assert not clipping.is_recording()
    assert not clipping._origins


class Net(nn.Module):
    """A convolution in channels last, an embedding of which few rows are used, and matrices."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 18)
        self.conv = nn.Conv2d(2, 24, 3, padding=1).to(memory_format=torch.channels_last)
        self.first, self.norm = nn.Linear(24, 60), nn.BatchNorm1d(60)
        self.second = nn.Linear(60, 60)
        self.sometimes = nn.Linear(60, 60)
        self.frozen = nn.Linear(60, 18).requires_grad_(False)

    def forward(self, rows, step=1):
        images = self.embed(rows).view(-1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
        hidden = torch.tanh(self.norm(self.first(self.conv(images).mean((2, 3)))))
        hidden = self.second(hidden)
        if step % 2:
            hidden = hidden + self.sometimes(hidden)
        return self.frozen(hidden)


def build(kind, seed=1, optimizer=torch.optim.AdamW, options=None, rate=0.01, **wrapped):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Net(), **wrapped)
    hook = everstep.compress(model, kind, **(KINDS[kind] if options is None else options))
    trained = [p for p in model.parameters() if p.requires_grad]
    chosen = optimizer(trained, lr=rate) if callable(optimizer) else optimizer
    return {"model": model, "optimizer": chosen, "compression": hook}


def backward(state, step=1, scale=1.0):
    loss = state["model"](torch.randint(0, 50, (8,)), step).square().mean()
    (loss * scale).backward()
    return loss.item()


def train(state, step=1):
    state["optimizer"].zero_grad()
    loss = backward(state)
    state["optimizer"].step()
    return loss.hex()


def said(store, step):
    """What the record of a step says of compressed gradients: names by form."""
    manifest = Store(store).manifest(step)
    if not manifest.records:
        return None
    groups = [g for call in manifest.records[0].calls for g in call.get("compressed", ())]
    return {group["form"]: group["names"] for group in groups}


def sent(store, step):
    """The parameters whose gradients the record of a step holds compressed."""
    return [name for names in said(store, step).values() for name in names]


def gradient_bytes(store, step):
    """What the gradients of a record take, before they are packed."""
    part = Store(store).manifest(step).records[0].part
    table = catalog.read_table(Disk(store), part)
    return sum(
        piece.size
        for name, entry in table.tensors.items()
        if name.startswith("@") and not name.startswith(rolling_digest.PREFIX)
        for piece in entry.pieces
    )
