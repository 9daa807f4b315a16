"""Gradients of parameters that are boxes of other tensors: one each, of the local shape, made of
what a record has of these tensors."""

from collections.abc import Mapping
from typing import Any

import torch

from everstep.format.boxes import Box
from everstep.redo import compression
from everstep.sharding.layout import is_dtensor, local_of, shards_like, wrapped_like
from everstep.sharding.mapped import Mapped


def gradient_of(
    tensors: Mapping[str, torch.Tensor],
    at: str,
    name: str,
    parameter: torch.Tensor,
    mapped: Mapped,
    compressed: Mapping[str, Mapping[str, Any]],
) -> torch.Tensor | None:
    """What a call consumed of this parameter, which is called `name` here; None where it had no
    gradient. `compressed`: of `compression.by_parameter`. Raises KeyError where one is missing."""
    pieces = mapped.split(parameter)
    if pieces is None:
        shape, device = tuple(parameter.shape), parameter.device
        local = compression.gradient_of(tensors, at, name, shape, device, compressed)
        if local is not None and name in compressed and not compression.has_shape(compressed[name]):
            local = _part_of(parameter, local)
        return None if local is None else wrapped_like(parameter, local)
    own = local_of(parameter)
    shapes = {piece.name: piece.shape for piece in pieces if piece.box.count}
    parts = {
        each: compression.gradient_of(tensors, at, each, shape, own.device, compressed)
        for each, shape in shapes.items()
    }
    if all(part is None for part in parts.values()):
        return None
    found = {each: part for each, part in parts.items() if part is not None}
    dtype = next(iter(found.values())).dtype
    local = torch.zeros_like(own, dtype=dtype, requires_grad=False)
    for piece in pieces:
        if piece.box.count:
            inside = piece.box.slices_in(Box.whole(piece.shape))
            piece.of(local).copy_(found[piece.name][inside])
    return wrapped_like(parameter, local)


def _part_of(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank has of a gradient that was read whole."""
    if not is_dtensor(parameter):
        return whole
    local = torch.empty_like(local_of(parameter), dtype=whole.dtype, requires_grad=False)
    for box, memory in shards_like(parameter, local)[1]:
        memory.copy_(whole[box.slices_in(Box.whole(tuple(whole.shape)))])
    return local
