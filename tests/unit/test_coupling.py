"""Which optimizers may update some of their parameters without the others."""

import torch
from torch import nn

from everstep.redo.allowed import why_coupled
from everstep.state.optimizers import OptimizerState


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
