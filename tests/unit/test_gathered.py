"""Gradients of parameters that are boxes of other tensors, out of a record in memory."""

import pytest
import torch

from everstep import Shard
from everstep.redo import compression
from everstep.redo.replay import gradient_of
from everstep.sharding.mapped import Mapped

Q, K = (4, 3), (2, 3)
PADDING = 2


def fused():
    """Columns 1 and 2 of q, and all of k, column by column; and some padding."""
    parameter = torch.nn.Parameter(torch.zeros(14 + PADDING))
    memory = parameter.detach()
    shards = [
        Shard("model.q", Q, (0, 1), memory[:8].view(2, 4).t()),
        Shard("model.k", K, (0, 0), memory[8:14].view(3, 2).t()),
    ]
    mapped = Mapped(lambda name, tensor: shards)
    mapped.name_of("model.qk", parameter)
    return parameter, mapped


def of(tensors, said):
    parameter, mapped = fused()
    compressed = compression.by_parameter({"compressed": said})
    return gradient_of(tensors, "@0", "model.qk", parameter, mapped, compressed)


def form(kind, shape):
    generator = torch.Generator().manual_seed(len(kind))
    count = torch.Size(shape).numel()
    strides = (shape[1], 1)
    if kind == "cast":
        tensor, indices = torch.randn(shape, generator=generator).bfloat16(), None
    elif kind == "low rank":
        tensor, indices = torch.randn(sum(shape), generator=generator), None
    else:
        tensor = torch.randn(2, 3, generator=generator)
        indices = torch.stack([torch.randperm(count, generator=generator)[:3] for _ in range(2)])
    return compression.CompressedGradient(kind, tensor, indices, torch.float32, shape, strides)


@pytest.mark.parametrize("kind", ["cast", "low rank", "sparse"])
def test_compressed_ones_are_made_dense_and_cut(kind):
    q, k = form(kind, Q), form(kind, K)
    found = of(
        q.tensors("@0", "model.q") | k.tensors("@0", "model.k"),
        compression.describe({"model.q": q, "model.k": k}),
    )
    assert torch.equal(found[:8].view(2, 4).t(), q.expand()[:, 1:])
    assert torch.equal(found[8:14].view(3, 2).t(), k.expand())
    assert not found[14:].any()


def test_one_may_be_compressed_and_the_other_not():
    q, k = form("sparse", Q), torch.randn(K)
    found = of(q.tensors("@0", "model.q") | {"@0.model.k": k}, compression.describe({"model.q": q}))
    assert torch.equal(found[:8].view(2, 4).t(), q.expand()[:, 1:])
    assert torch.equal(found[8:14].view(3, 2).t(), k)


def test_none_has_none():
    assert of({"@1.model.q": torch.zeros(Q)}, []) is None


def test_a_part_of_them_is_nonsense():
    with pytest.raises(KeyError):
        of({"@0.model.q": torch.zeros(Q)}, [])
