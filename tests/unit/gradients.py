"""Gradients for the tests of clipping, and how they are compared with torch's."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from everstep.redo import clipping
from everstep.redo.clipping import Origin, Recording, clip_grad_norm_, scale_in_place

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INFINITY, NAN = float("inf"), float("nan")
FOREACH = pytest.mark.parametrize("foreach", [None, True, False])


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """As for a log that wants gradients from before clipping; afterwards none is left."""
    recording = Recording()
    recording.set(True, pre_clip=True)
    yield recording
    recording.set(False)
    assert not clipping._origins


def origin_of(parameter: Tensor) -> Origin | None:
    return clipping.origins([parameter]).get(id(parameter))


def raw_of(parameter: Tensor) -> Tensor | None:
    """The gradient from before clipping, where it is known."""
    origin = origin_of(parameter)
    return None if origin is None else origin.source


def with_gradient(gradient: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    shape = () if gradient is None else gradient.shape
    dtype = dtype or (torch.float32 if gradient is None else gradient.dtype)
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = gradient
    return parameter


def parameters_of(make: Callable[[], list[Tensor | None]]) -> list[Tensor]:
    gradients = make()
    gradients.reverse()  # popped, so that nobody else holds them
    return [with_gradient(gradients.pop()) for _ in range(len(gradients))]


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().reshape(-1).contiguous()
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def assert_same(found: Tensor | None, expected: Tensor | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    assert (found.dtype, found.shape, found.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    assert bits(found) == bits(expected)


def assert_as_torch(
    make: Callable[[], list[Tensor | None]],
    max_norm: float = 1.0,
    kept: bool = True,
    **options: object,
) -> list[Tensor]:
    """Clip two equal lists, torch's way and ours; the raw gradients scale to the same bytes."""
    expected, found = parameters_of(make), parameters_of(make)
    norm = nn.utils.clip_grad_norm_(expected, max_norm, **options)
    assert_same(clip_grad_norm_(found, max_norm, **options), norm)
    before = make()
    for mine, theirs, raw in zip(found, expected, before, strict=True):
        assert_same(mine.grad, theirs.grad)
        origin = origin_of(mine)
        assert (origin is not None) == (kept and raw is not None)
        if origin is not None:
            assert_same(origin.source, raw)
            assert origin.coefficient.dim() == 0
            assert origin.foreach == (options.get("foreach") is not False)
            again = origin.source.clone()
            scale_in_place([again], origin.coefficient, origin.foreach)
            assert_same(again, theirs.grad)
            assert_same(origin.source, raw)
    return found


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
