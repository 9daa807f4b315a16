"""Layouts: which boxes of a global tensor are in this rank's memory.

A plain tensor is whole; what a DTensor has here, its mesh and placements say.
"""

import sys
from typing import Any

import torch

from everstep.format.boxes import Box
from everstep.sharding.spec import ShardingSpec

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Of which most are: an isinstance() of DTensor takes ten times as long as to look here."""


def is_dtensor(tensor: object) -> bool:
    """Without an import of DTensor's package, which takes most of a second: where nobody else has
    imported it there are none."""
    if type(tensor) in _PLAIN:
        return False
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, getattr(package, "DTensor", ()))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's plain memory of it, as one tensor: the same object for as long as that stays."""
    dtensor: Any = tensor
    return dtensor._local_tensor if is_dtensor(tensor) else tensor


def shards_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], list[tuple[Box, torch.Tensor]]]:
    """The global shape, and the boxes that are here, each with its memory: views, perhaps strided.

    Raises Unsupported for a layout that is not known.
    """
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return shape, [(Box.whole(shape), tensor)]
    from everstep.sharding import meshes  # see is_dtensor

    return shape, meshes.shards_of(tensor)  # type: ignore[arg-type]


def shards_like(
    parameter: torch.Tensor, local: torch.Tensor
) -> tuple[tuple[int, ...], list[tuple[Box, torch.Tensor]]]:
    """The same of plain memory that belongs to a parameter (a gradient): cut as this rank's part of
    it is, where it has that part's shape, else whole."""
    if not is_dtensor(parameter) or local.shape != local_of(parameter).shape:
        shape = tuple(local.shape)
        return shape, [(Box.whole(shape), local)]
    from everstep.sharding import meshes  # see is_dtensor

    return tuple(parameter.shape), meshes.shards_of(parameter, local)  # type: ignore[arg-type]


def part_of(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """Of a gradient what belongs to this rank's part of the parameter; None where it is not here
    without communication."""
    if not is_dtensor(gradient) and not is_dtensor(parameter):
        return gradient
    from everstep.sharding import meshes  # see is_dtensor

    return meshes.part_of(gradient, parameter)


def wrapped_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Plain memory as a tensor of the parameter's kind, which has this rank's part of it."""
    if not is_dtensor(parameter):
        return local
    from everstep.sharding import meshes  # see is_dtensor

    return meshes.wrapped_like(parameter, local)  # type: ignore[arg-type]


def spread_of(tensor: torch.Tensor) -> ShardingSpec | None:
    """How a DTensor is spread over ranks; None for a plain tensor, which is whole."""
    if not is_dtensor(tensor):
        return None
    from everstep.sharding import meshes  # see is_dtensor

    return meshes.spread_of(tensor)  # type: ignore[arg-type]


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The same of other memory of the same form: a plain tensor is that memory."""
    if not is_dtensor(tensor):
        return local
    from everstep.sharding import meshes  # see is_dtensor

    return meshes.with_local(tensor, local)  # type: ignore[arg-type]


def replicated(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor that all ranks have; None of a DTensor of which each has a part."""
    if not is_dtensor(tensor):
        return tensor
    from everstep.sharding import meshes  # see is_dtensor

    return meshes.replicated(tensor)  # type: ignore[arg-type]


def has_known_placements(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor that says which elements are here, none of them to be reduced."""
    if not is_dtensor(tensor):
        return False
    from everstep.sharding import meshes  # see is_dtensor

    return meshes.has_known_placements(tensor)  # type: ignore[arg-type]
