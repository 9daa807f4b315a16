"""Which optimizers may update some of their parameters without the others."""

import pytest
import torch
from torch import nn

from everstep.redo.coupling import why_not
from everstep.state.optimizers import OptimizerState


def refusal(*optimizers):
    states = [OptimizerState(str(index), each, index) for index, each in enumerate(optimizers)]
    return why_not(states)


def parameters(*dtypes):
    return [nn.Parameter(torch.randn(4, 4, dtype=dtype)) for dtype in dtypes or [torch.float32] * 2]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_torchs_own_treat_each_by_itself(kind):
    assert refusal(kind(parameters(), lr=0.1)) is None
    assert refusal(kind(parameters(), lr=0.1), kind(parameters(), lr=0.1)) is None


def test_adafactors_eps_is_of_the_first_parameters_dtype():
    mixed = parameters(torch.bfloat16, torch.float32)
    assert "several dtypes" in refusal(torch.optim.Adafactor(mixed))
    assert refusal(torch.optim.AdamW(mixed)) is None
    groups = [{"params": [each]} for each in mixed]
    assert refusal(torch.optim.Adafactor(groups)) is None


def test_memory_that_two_parameters_share():
    whole = torch.randn(8, 4)
    same = [nn.Parameter(whole), nn.Parameter(whole.detach())]
    assert "share memory" in refusal(torch.optim.AdamW(same))
    assert "share memory" in refusal(*(torch.optim.SGD([each]) for each in same))
    overlapping = [nn.Parameter(whole[:5]), nn.Parameter(whole[4:])]
    assert "share memory" in refusal(torch.optim.AdamW(overlapping))
    beside = [nn.Parameter(whole[:4]), nn.Parameter(whole[4:]), nn.Parameter(whole[:0])]
    assert refusal(torch.optim.AdamW(beside)) is None


def test_what_is_not_known_to_be_so():
    [one, other] = parameters()
    assert "no optimizer" in refusal()
    assert "LBFGS" in refusal(torch.optim.LBFGS([one]))
    assert "two optimizers" in refusal(torch.optim.SGD([one]), torch.optim.SGD([one, other]))
