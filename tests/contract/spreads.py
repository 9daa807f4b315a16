"""A little run whose state is spread over the steps of a window."""

import itertools

import torch
from runs import check_same, checkpointer, restore, snapshot
from torch import nn

import everstep

SPREAD = {"strategy": "spread", "every": 4, "window": 3}


class Net(nn.Module):
    """Six matrices of different sizes, and a buffer that forward mutates."""

    def __init__(self):
        super().__init__()
        widths = (12, 40, 8, 64, 6, 32, 4)
        pairs = itertools.pairwise(widths)
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairs))
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x):
        return self.layers(self.norm(x))


def make(seed, kind=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = Net()
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.01, **options)}


def train(state):
    state["optimizer"].zero_grad()
    state["model"](torch.randn(5, 12)).square().mean().backward()
    everstep.clip_grad_norm_(state["model"].parameters(), 0.5)
    state["optimizer"].step()


def run(saver, state, steps, frozen=None):
    """Train and save; the snapshot of each step that was due."""
    frozen = {} if frozen is None else frozen
    for step in steps:
        train(state)
        if saver.step(step):
            frozen[step] = snapshot(state)
    return frozen


def run_saved(store, last, **options):
    """The same up to that step, by a Checkpointer of its own."""
    state = make(1)
    with checkpointer(store, state, **options) as saver:
        return run(saver, state, range(1, last + 1))


def check_newest(store, fresh, frozen, step):
    """The newest checkpoint is of that step, and is restored as it was."""
    assert restore(store, fresh) == step
    check_same(snapshot(fresh), frozen[step])
