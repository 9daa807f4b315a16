"""Samples: a few bytes of what a replay has to come to, in the record, to be compared there."""

from collections.abc import Mapping

import torch

from everstep.state.layout import local_of
from everstep.state.ranked import own_name

UPDATED = "@0!updated."
"""Begins the name of the sample of an optimizer's parameters in a record."""

_SAMPLES_MAX = 32
_UPDATED_MAX = 8
_SAMPLE_BYTES = 64
_STRIDE = 0x9E3779B1  # Fibonacci hashing: each step looks elsewhere


@torch.inference_mode(False)  # what is made here is looked after by its version counter
def sample_of(
    tensors: Mapping[str, torch.Tensor], step: int, most: int = _SAMPLES_MAX
) -> torch.Tensor:
    """A few bytes of so many of the tensors (of this rank's part of them), other ones at each step,
    as one tensor; does not synchronise. Equal for equal tensors and steps, wherever they lie."""
    rows = [local for name in sorted(tensors) if (local := local_of(tensors[name])).numel()]
    first = step * most % max(1, len(rows))
    chosen = (*rows[first : first + most], *rows[:first])[:most]
    pieces = []
    for number, tensor in enumerate(chosen):
        pieces.append(_few_bytes(tensor.detach(), step * _STRIDE + number))
    devices = [piece.device for piece in pieces if piece.is_cuda]
    device = devices[0] if devices else torch.device("cpu")
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([empty, *(piece.to(device, non_blocking=True) for piece in pieces)])


def updated_of(parameters: Mapping[str, torch.Tensor], step: int) -> torch.Tensor:
    """That of an optimizer's parameters after its last update in a step."""
    return sample_of(parameters, step, _UPDATED_MAX)


def updated_name(optimizer: str, rank: int | None) -> str:
    """What it is called in the record, of one process or of a rank among several."""
    name = f"{UPDATED}{optimizer}"
    return name if rank is None else own_name(name, rank)


def _few_bytes(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Of some elements along the longest dim; of strided tensors, too, without a copy of more."""
    if not tensor.dim():
        tensor = tensor.view(1)
    longest = tensor.shape.index(max(tensor.shape))
    for dim in reversed(range(tensor.dim())):
        if dim != longest:
            turn, index = divmod(turn, tensor.shape[dim])
            tensor = tensor.select(dim, index)
    count = min(len(tensor), max(1, _SAMPLE_BYTES // tensor.element_size()))
    few = tensor.narrow(0, turn % (len(tensor) - count + 1), count)
    return few.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
