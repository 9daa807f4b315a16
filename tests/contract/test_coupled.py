"""Updates of torch's own optimizers that couple parameters after all: replays make them at once."""

import pytest
import torch
from runs import check_steps, checkpointer, snapshot
from torch import nn

from everstep.redo.allowed import why_coupled
from everstep.state.optimizers import OptimizerState
from examples import slow


def refusal(*optimizers):
    states = [OptimizerState(str(index), each, index) for index, each in enumerate(optimizers)]
    return why_coupled(states)


def parameters(*dtypes):
    return [nn.Parameter(torch.randn(4, 4, dtype=dtype)) for dtype in dtypes or [torch.float32] * 2]


def test_memory_that_two_parameters_share():
    whole = torch.randn(8, 4)
    same = [nn.Parameter(whole), nn.Parameter(whole.detach())]
    assert "share memory" in refusal(torch.optim.AdamW(same))
    assert "share memory" in refusal(*(torch.optim.SGD([each]) for each in same))
    overlapping = [nn.Parameter(whole[:5]), nn.Parameter(whole[4:])]
    assert "share memory" in refusal(torch.optim.AdamW(overlapping))
    beside = [nn.Parameter(whole[:4]), nn.Parameter(whole[4:]), nn.Parameter(whole[:0])]
    assert refusal(torch.optim.AdamW(beside)) is None


class Several(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        for index, kind in enumerate(kinds):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(40, 40).to(kind)))


class Shared(nn.Module):
    """Two parameters of the same elements, the first by name being the second that is updated."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(40, 40)
        self.b = nn.Parameter(weight)
        self.a = nn.Parameter(weight.detach())


def mixed(foreach):
    model = Several([torch.bfloat16, torch.float32, torch.float32])
    return model, torch.optim.Adafactor(model.parameters(), lr=0.01, foreach=foreach)


def shared(foreach):
    model = Shared()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)


LOG, SPREAD = {"strategy": "log", "base_every": 5}, {"strategy": "spread"}


@pytest.mark.parametrize(
    ("make", "foreach", "options"),
    [
        (mixed, True, LOG),
        (mixed, False, SPREAD),
        (shared, True, LOG),
        (shared, False, SPREAD),
        *slow((mixed, False, LOG), (mixed, True, SPREAD), (shared, False, LOG)),
        *slow((shared, True, SPREAD)),
    ],
)
def test_every_checkpoint_comes_back(store, make, foreach, options):
    def build(seed):
        torch.manual_seed(seed)
        model, optimizer = make(foreach)
        return {"model": model, "optimizer": optimizer}

    state, frozen = build(1), {}
    every = 4 if options["strategy"] == "spread" else 1
    with checkpointer(store, state, every=every, window=3, **options) as saver:
        for step in range(1, 13):
            for parameter in state["model"].parameters():
                parameter.grad = (torch.randn(40, 40) * 1e-3).to(parameter.dtype)
            state["optimizer"].step()
            saver.step(step)
            frozen[step] = snapshot(state)
    assert check_steps(store, build(2), frozen)
