"""Samples: a few bytes of what a replay has to come to, in the record, to be compared there."""

from collections.abc import Mapping, Sequence

import torch

from everstep.sharding.layout import local_of
from everstep.sharding.ranked import own_name

UPDATED = "@0!updated."
"""Begins the name of the sample of an optimizer's parameters in a record."""

_SAMPLES_MAX = 32
_UPDATED_MAX = 8
_SAMPLE_BYTES = 64
_STRIDE = 0x9E3779B1  # Fibonacci hashing: each step looks elsewhere


def sample_of(tensors: Mapping[str, torch.Tensor], step: int) -> torch.Tensor:
    """A few bytes of some of the tensors (of this rank's part of them), other ones at each step, as
    one tensor; does not synchronise. Equal for equal tensors and steps, wherever they lie."""
    rows = (local_of(tensors[name]) for name in sorted(tensors))
    found = [local for local in rows if local.numel()]
    return _sample(_chosen(found, step, _SAMPLES_MAX), step)


@torch.inference_mode(False)
def updated_of(
    parameters: Sequence[torch.Tensor], state: Sequence[torch.Tensor], step: int
) -> torch.Tensor:
    """That of an optimizer's parameters (its `parameters_here`), and behind it that of their state
    (`state_here`), after its last update in a step. Of one size: records whose tensors are alike
    share a plan and a table."""
    chosen = (*_chosen(parameters, step, _UPDATED_MAX), *_chosen(state, step, _UPDATED_MAX))
    found = _sample(chosen, step)
    return torch.cat([found, found.new_zeros(2 * _UPDATED_MAX * _SAMPLE_BYTES - found.numel())])


def _chosen(tensors: Sequence[torch.Tensor], step: int, most: int) -> tuple[torch.Tensor, ...]:
    first = step * most % max(1, len(tensors))
    return (*tensors[first : first + most], *tensors[:first])[:most]


@torch.inference_mode(False)  # what is made here is looked after by its version counter
def _sample(chosen: Sequence[torch.Tensor], step: int) -> torch.Tensor:
    """Of plain tensors that have elements."""
    if not chosen:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    pieces = [
        _few(tensor.detach(), step * _STRIDE + number) for number, tensor in enumerate(chosen)
    ]
    if len({(piece.dtype, piece.device) for piece in pieces}) > 1:
        device = next((piece.device for piece in pieces if piece.is_cuda), torch.device("cpu"))
        pieces = [
            piece.contiguous().view(torch.uint8).to(device, non_blocking=True) for piece in pieces
        ]
    return torch.cat(pieces).view(torch.uint8)


def updated_name(optimizer: str, rank: int | None) -> str:
    """What it is called in the record, of one process or of a rank among several."""
    name = f"{UPDATED}{optimizer}"
    return name if rank is None else own_name(name, rank)


def _few(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Some elements along the longest dim, of one dim; a view, of strided tensors, too."""
    shape, strides = tensor.shape or (1,), tensor.stride() or (1,)
    length = max(shape)
    longest = shape.index(length)
    at = tensor.storage_offset()
    for dim in reversed(range(len(shape))):
        if dim != longest:
            turn, index = divmod(turn, shape[dim])
            at += index * strides[dim]
    count = min(length, max(1, _SAMPLE_BYTES // tensor.element_size()))
    at += turn % (length - count + 1) * strides[longest]
    stride = strides[longest] if count > 1 else 1  # else bytes cannot be looked at
    return tensor.as_strided((count,), (stride,), at).resolve_conj().resolve_neg()
