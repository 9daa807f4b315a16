"""Which boxes of a global tensor a rank holds, and in which memory."""

import torch

from everstep.format.boxes import Box


def shards_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], list[tuple[Box, torch.Tensor]]]:
    """The global shape, and for each box of it that lies here its memory: plain tensors. A plain
    tensor is all of itself."""
    shape = tuple(tensor.shape)
    return shape, [(Box.whole(shape), tensor)]
