"""Every LR scheduler of torch comes back: equal types in its state, equal rates from then on."""

import pytest
import torch
from runs import bits, check_same, checkpointer, freeze, round_trip
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

MORE = 20


class Decay:
    """A callable object with state: LambdaLR keeps its __dict__."""

    def __init__(self, rate):
        self.rate, self.calls = rate, [0]

    def __call__(self, epoch):
        self.calls[0] += 1
        return self.rate**epoch


def sequential(optimizer):
    parts = [
        schedulers.LinearLR(optimizer, 0.1, total_iters=4),
        schedulers.CosineAnnealingLR(optimizer, 9),
        schedulers.MultiStepLR(optimizer, [2, 2, 3]),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[5, 12])


def chained(optimizer):
    parts = [schedulers.ConstantLR(optimizer, 0.5, 6), schedulers.ExponentialLR(optimizer, 0.9)]
    return schedulers.ChainedScheduler(parts, optimizer=optimizer)


MAKERS = {
    "ChainedScheduler": [chained],
    "ConstantLR": [lambda o: schedulers.ConstantLR(o, 0.3, 4)],
    "CosineAnnealingLR": [lambda o: schedulers.CosineAnnealingLR(o, 9, 0.001)],
    "CosineAnnealingWarmRestarts": [lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4, 2)],
    "CyclicLR": [
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, mode="triangular2", cycle_momentum=False),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Decay(0.9)),
    ],
    "ExponentialLR": [lambda o: schedulers.ExponentialLR(o, 0.9)],
    "LambdaLR": [
        lambda o: schedulers.LambdaLR(o, lambda epoch: 0.95**epoch),
        lambda o: schedulers.LambdaLR(o, Decay(0.9)),
    ],
    "LinearLR": [lambda o: schedulers.LinearLR(o, 0.2, 1.0, 9)],
    "MultiStepLR": [lambda o: schedulers.MultiStepLR(o, [2, 2, 5, 9, 15], 0.5)],
    "MultiplicativeLR": [
        lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.95),
        lambda o: schedulers.MultiplicativeLR(o, Decay(0.99)),
    ],
    "OneCycleLR": [
        lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=40),
        lambda o: schedulers.OneCycleLR(o, 0.3, epochs=4, steps_per_epoch=10, three_phase=True),
    ],
    "PolynomialLR": [lambda o: schedulers.PolynomialLR(o, 9, 2.0)],
    "ReduceLROnPlateau": [
        lambda o: schedulers.ReduceLROnPlateau(o, patience=1, cooldown=1, min_lr=1e-4),
        lambda o: schedulers.ReduceLROnPlateau(o, "max", 0.5, 0, threshold_mode="abs"),
    ],
    "SequentialLR": [sequential],
    "StepLR": [lambda o: schedulers.StepLR(o, 3, 0.7)],
    "SWALR": [lambda o: SWALR(o, 0.01, 5)],
}
if torch.__version__ < "2.10":  # its state is a function there, which is refused
    del MAKERS["SWALR"]
VALUES = [1.0, 0.8, 0.8, 0.8, 0.7, 0.75, 0.74, 0.9, 0.6, float("nan"), 0.6, 0.6, 0.5]


def test_every_scheduler_of_torch_is_here():
    base = (schedulers.LRScheduler, schedulers._LRScheduler)
    found = {
        name
        for name, kind in vars(schedulers).items()
        if isinstance(kind, type) and issubclass(kind, schedulers.LRScheduler) and kind not in base
    }
    assert found <= MAKERS.keys(), "a new scheduler: add it above"


def build(seed, tensor_lr):
    """One optimizer for each scheduler, momentum in all of them, two groups."""
    torch.manual_seed(seed)
    optimizers, made = {}, {}
    for name, makers in MAKERS.items():
        if tensor_lr and name == "SequentialLR" and torch.__version__ < "2.10":
            continue  # rate, initial rate and base rates are one tensor there, until a restore
        for index, maker in enumerate(makers):
            key = f"{name}_{index}"
            rate = torch.tensor(0.1) if tensor_lr else 0.1
            groups = [{"params": [nn.Parameter(torch.randn(3))]} for _ in range(2)]
            groups[1] |= {"lr": rate / 2}
            optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9)
            optimizers[key], made[key] = optimizer, maker(optimizer)
    return {"optimizers": optimizers, "schedulers": made, "turn": 0}


def train(state):
    """One step of each."""
    state["turn"] += 1
    for name, optimizer in state["optimizers"].items():
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(3)
        optimizer.step()
        scheduler = state["schedulers"][name]
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(VALUES[state["turn"] % len(VALUES)])
        else:
            scheduler.step()


def rates(state):
    return {
        name: [bits(group["lr"]) for group in optimizer.param_groups]
        for name, optimizer in state["optimizers"].items()
    }


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_every_scheduler_goes_on(store, tensor_lr):
    state = round_trip(store, lambda seed: build(seed, tensor_lr), train, steps=6, more=0)
    reference = build(1, tensor_lr)
    for _ in range(6):
        train(reference)
    check_same(freeze(state["schedulers"]), freeze(reference["schedulers"]))
    for _ in range(MORE):
        train(state)
        train(reference)
        check_same(rates(state), rates(reference))
    check_same(freeze(state["schedulers"]), freeze(reference["schedulers"]))
    milestones = state["schedulers"]["MultiStepLR_0"].milestones
    assert type(milestones) is type(reference["schedulers"]["MultiStepLR_0"].milestones)


def test_at_any_point_of_a_composite_schedule(store):
    def build_one(seed):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1 * seed)
        return {"optimizer": optimizer, "scheduler": sequential(optimizer)}

    def turn(state):
        state["optimizer"].step()
        state["scheduler"].step()
        return state["optimizer"].param_groups[0]["lr"]

    state = build_one(1)
    with checkpointer(store, state) as saver:
        followed = []
        for step in range(1, 16):
            followed.append(turn(state))
            saver.step(step)
        rest = [turn(state) for _ in range(10)]
        expected = followed + rest
        fresh = build_one(3)
    with checkpointer(store, fresh) as restorer:
        for step in (4, 5, 6, 11, 12, 13, 15):
            assert restorer.restore(step) == step
            assert [turn(fresh) for _ in range(25 - step)] == expected[step:]
