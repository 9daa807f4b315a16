"""Compressed gradients on CUDA, sent by NCCL: every step of a log comes back byte for byte."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_cuda import saved
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep import Store

KINDS = {"fp16": {}, "bf16": {}, "topk": {"ratio": 0.05, "residual": "records"}}


@pytest.fixture(autouse=True)
def _group(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(kind, seed, is_view):
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(257, 257), nn.GELU())]
    model = DistributedDataParallel(
        nn.Sequential(*layers).cuda(), gradient_as_bucket_view=is_view, bucket_cap_mb=0.5
    )
    hook = everstep.compress(model, kind, **KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return {"model": model, "optimizer": optimizer, "compression": hook}


def train(state, clips):
    state["optimizer"].zero_grad()
    loss = state["model"](torch.randn(16, 257, device="cuda")).square().mean()
    loss.backward()
    if clips:
        everstep.clip_grad_norm_(state["model"].parameters(), 0.01)
    state["optimizer"].step()


def tensors_of(state):
    hook = state["compression"].state_dict()["tensors"]
    return [
        *(parameter.detach().clone() for parameter in state["model"].parameters()),
        *(v.clone() for entry in state["optimizer"].state.values() for v in entry.values()),
        *(found.clone() for what in hook for found in hook[what].values()),
    ]


def are_equal(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_every_step_comes_back(store, kind, is_view, clips):
    state, log = build(kind, 1, is_view), {"strategy": "log", "base_every": 100}
    expected = saved(store, state, partial(train, state, clips), 9, tensors_of, **log)
    assert Store(store).manifest(9).records[0].calls[0]["compressed"]
    fresh = build(kind, 2, is_view)
    with everstep.Checkpointer(store, fresh) as restorer:
        for step in range(9, 0, -1):
            assert restorer.restore(step) == step
            assert are_equal(tensors_of(fresh), expected[step]), step
        assert restorer.restore(6) == 6
        for step in range(7, 10):
            train(fresh, clips)
            assert are_equal(tensors_of(fresh), expected[step]), step
