"""What old logs have in place of rolling digests: samples of a few bytes, and digests of all bytes,
of what an optimizer or a rule came to. They are compared, and no more made."""

from collections.abc import Mapping, Sequence
from operator import itemgetter

import torch
import xxhash

from everstep.sharding.layout import local_of
from everstep.sharding.leaves import bytes_of
from everstep.sharding.ranked import own_name, unowned
from everstep.state.optimizers import OptimizerState

_UPDATED = "@0!updated."
_DERIVED = "@0!derived."
"""Begin the names of samples of optimizers, and of derived parts."""

_SAMPLES_MAX = 32
_UPDATED_MAX = 8
_SAMPLE_BYTES = 64
_STRIDE = 0x9E3779B1  # Fibonacci hashing: each step looks elsewhere


def known_samples(tensors: Mapping[str, torch.Tensor], rank: int | None) -> dict[str, torch.Tensor]:
    """Of a record's tensors the samples that a rank (None: the only one) made, by optimizer or
    derived part."""
    found = [name for name in tensors if name.startswith((_UPDATED, _DERIVED))]
    return {
        unowned(name).partition(".")[2]: tensors[name]
        for name in found
        if name == (unowned(name) if rank is None else own_name(unowned(name), rank))
    }


def is_sample_of(sample: torch.Tensor, optimizer: OptimizerState, step: int) -> bool:
    """Whether it is what the optimizer has after this step."""
    here = optimizer.parameters_here(), optimizer.state_here()
    found = _sample([each for tensors in here for each in _chosen(tensors, step)], step).cpu()
    count = min(found.numel(), sample.numel())  # the first had none of the state; the rest is zero
    return found[:count].equal(sample.cpu()[:count])


def sample_of(tensors: Mapping[str, torch.Tensor], step: int) -> torch.Tensor:
    """That of a derived part (of this rank's part of it)."""
    rows = (local_of(tensors[name]) for name in sorted(tensors))
    found = [local for local in rows if local.numel()]
    return _sample(_chosen(found, step, _SAMPLES_MAX), step)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """XXH3-128 of all bytes of a derived part (on this rank), row-major, by name."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(bytes_of(tensors[name]).numpy().data)
    return digest.hexdigest()


def digest_of_state(optimizer: OptimizerState) -> str:
    """XXH3-128 of all bytes of an optimizer's parameters, each followed by its state, by name."""
    digest = xxhash.xxh3_128()
    for _, part in sorted(optimizer.here().items(), key=itemgetter(0)):
        digest.update(bytes_of(part).numpy().data)
    return digest.hexdigest()


def _chosen(
    tensors: Sequence[torch.Tensor], step: int, most: int = _UPDATED_MAX
) -> tuple[torch.Tensor, ...]:
    first = step * most % max(1, len(tensors))
    return (*tensors[first : first + most], *tensors[:first])[:most]


def _sample(chosen: Sequence[torch.Tensor], step: int) -> torch.Tensor:
    """Of plain tensors that have elements."""
    pieces = [
        _few(tensor.detach(), step * _STRIDE + number).contiguous().view(torch.uint8).cpu()
        for number, tensor in enumerate(chosen)
    ]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device="cpu")


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
