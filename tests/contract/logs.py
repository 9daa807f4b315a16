"""Little runs for the tests of strategy="log", and the check that they share.

A log may save more than it has to, and must tell; but no step that the store offers is ever
restored to anything else than what the run had.
"""

import torch
from runs import check_steps, kinds, run_logged, supervised
from torch import nn


def build(seed, kind=torch.optim.AdamW, width=40, **options):
    """A small state; BatchNorm has buffers, which no optimizer changes."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 6))
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.01, **options)}


def backward(state):
    """Gradients of random data, added to those that are there; the loss."""
    loss = state["model"](torch.randn(8, 6)).square().mean()
    loss.backward()
    return loss.item()


def train(state, step=0):
    """One update, with gradients of its own."""
    supervised(state)


def train_in_closure(state, step=0):
    """The same, but the optimizer is given a closure."""

    def closure():
        state["optimizer"].zero_grad()
        return backward(state)

    state["optimizer"].step(closure)


class Plain(torch.optim.Optimizer):
    """SGD, to be changed in subclasses."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.update()

    @torch.no_grad()
    def update(self, scale=1.0):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] * scale)


WRITES = {
    "in place": lambda weight: weight.mul_(0.5),
    "data": lambda weight: weight.data.mul_(0.5),
    "numpy": lambda weight: weight.detach().numpy().__imul__(0.5),
    "swap": lambda weight: setattr(weight, "data", weight.data * 0.5),
}


def write(state, how):
    """Change a weight behind the optimizer's back, in one of the WRITES."""
    with torch.no_grad():
        WRITES[how](state["model"][0].weight)


def durable(handle):
    """For run_logged and check_run: wait for each save."""
    handle.wait("local")


def check_run(store, make, train, saved=None, **options):
    """A run of `make(1)`, every step of which is restored into `make(2)`, byte for byte.

    `train(state, step)` makes a step of it; `saved`: what kinds() of the store must be. Options are
    run_logged's.
    """
    frozen = run_logged(store, make(1), train, **options)
    if saved is not None:
        assert kinds(store) == saved
    check_steps(store, make(2), frozen)
