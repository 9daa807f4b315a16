"""Samples: the same few bytes, wherever and however a tensor lies."""

import pytest
import torch

from everstep.redo.old_samples import sample_of

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.bool]
SHAPES = [(), (1,), (2,), (7,), (3, 5), (1, 130), (64, 3), (2, 1, 40), (4, 3, 2, 5)]


def numbers(shape, dtype):
    count = torch.Size(shape).numel()
    found = torch.arange(1, count + 1).reshape(shape)
    return found.to(dtype) * (1 + 2j) if dtype.is_complex else found.to(dtype)


def lying_otherwise(tensor):
    """The same elements in other places."""
    yield tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.clone()
    wide = torch.stack([tensor, torch.zeros_like(tensor)], -1)
    yield wide[..., 0]
    if tensor.is_complex():
        yield tensor.conj().clone().conj()
    if tensor.dtype is torch.float32:
        negative = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
        assert negative.is_neg()
        yield negative


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_goes_by_elements(dtype, shape):
    tensor = numbers(shape, dtype)
    for step in (0, 1, 12345):
        expected = sample_of({"w": tensor}, step)
        assert expected.numel() in (64, tensor.nbytes, max(shape, default=1) * tensor.itemsize)
        for other in lying_otherwise(tensor):
            assert sample_of({"w": other}, step).equal(expected)


def test_each_element_has_its_turn():
    tensor = numbers((6, 40), torch.float32)
    seen = {
        value
        for step in range(400)
        for value in sample_of({"w": tensor}, step).view(torch.float32).tolist()
    }
    assert seen == set(tensor.flatten().tolist())


def test_several_kinds_in_one():
    tensors = {"a": numbers((3,), torch.float32), "b": numbers((40,), torch.bool)}
    tensors |= {"none": torch.zeros(0), "c": numbers((2,), torch.float32)[::2]}
    apart = [sample_of({name: tensor}, 0) for name, tensor in sorted(tensors.items())]
    assert sample_of(tensors, 0).equal(torch.cat(apart))
    assert sample_of({}, 0).numel() == 0
