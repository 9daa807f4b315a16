"""Layouts: which boxes of a global tensor are in this rank's memory.

A plain tensor is whole; what a DTensor has here, its mesh and placements say.
"""

import sys
from typing import Any

import torch

from everstep.format.boxes import Box
from everstep.state.spread import Spread


def is_dtensor(tensor: object) -> bool:
    """Without an import of DTensor's package, which takes most of a second: where nobody else has
    imported it there are none."""
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
    from everstep.state import meshes  # see is_dtensor

    return shape, meshes.shards_of(tensor)  # type: ignore[arg-type]


def spread_of(tensor: torch.Tensor) -> Spread | None:
    """How a DTensor is spread over ranks; None for a plain tensor, which is whole."""
    if not is_dtensor(tensor):
        return None
    from everstep.state import meshes  # see is_dtensor

    return meshes.spread_of(tensor)  # type: ignore[arg-type]
