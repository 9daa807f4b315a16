"""OffloadedOptimizer on CUDA parameters: the state is on the host, the bits are the CPU's."""

import functools

import pytest
import torch
from test_cuda import build, check_steps, saved, state_bytes, train

from everstep import Checkpointer, OffloadedOptimizer

DTYPES = [torch.float32, torch.bfloat16]


def offloaded(seed, dtype, **options):
    """A model on the GPU, whose optimizer is not."""
    state = build(seed, dtype=dtype)
    parameters = state["model"].parameters()
    return {**state, "optimizer": OffloadedOptimizer(torch.optim.AdamW, parameters, **options)}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_those_of_the_cpu(dtype, overlap):
    state = offloaded(0, dtype, lr=1e-3, overlap=overlap)
    parameters = list(state["model"].parameters())
    masters = [each.detach().float().cpu().requires_grad_() for each in parameters]
    reference = torch.optim.AdamW(masters, lr=1e-3)
    for _ in range(4):
        train(state)
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad.cpu().float()
        reference.step()
        for parameter, master in zip(parameters, masters, strict=True):
            assert torch.equal(parameter.detach().cpu(), master.detach().to(dtype))
            moments = state["optimizer"].state[parameter]
            assert moments["exp_avg"].device.type == "cpu"
            assert torch.equal(moments["exp_avg"], reference.state[master]["exp_avg"])
    state["optimizer"].close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_step_is_exact(tmp_path, dtype, overlap):
    make = functools.partial(offloaded, dtype=dtype, lr=1e-3, overlap=overlap)
    state = make(0)
    expected = saved(tmp_path, state, lambda: train(state), 5, strategy="full")
    check_steps(tmp_path, make(1), expected)
    late = make(2)
    with Checkpointer(tmp_path, late) as restorer:
        assert restorer.restore(3, first="model") == 3
        torch.cuda.synchronize()
        torch.manual_seed(5)
        train(late)
    other = make(3)
    with Checkpointer(tmp_path, other) as restorer:
        assert restorer.restore(3) == 3
        torch.manual_seed(5)
        train(other)
    assert state_bytes(late) == state_bytes(other)
