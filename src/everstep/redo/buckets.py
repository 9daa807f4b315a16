"""A bucket of gradients on its way through a communication hook, and what may be done to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from everstep.format.tables import is_dense
from everstep.redo.forms import CompressedGradient

Future = torch.futures.Future[Tensor]


@dataclass(slots=True, eq=False)
class Bucket:
    """What DistributedDataParallel sends at once: its parameters' gradients, one behind the other.

    `source`: torch's GradBucket. `numbers`: of the parameters, in the model's order. `kept`:
    whatever `Compressor.reduce` leaves for `forms`.
    """

    source: Any
    index: int
    buffer: Tensor
    parameters: list[Tensor]
    numbers: tuple[int, ...]
    kept: Any = None

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Where each gradient begins and ends in the buffer."""
        ends = accumulate((parameter.numel() for parameter in self.parameters), initial=0)
        return list(pairwise(ends))

    @property
    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Each parameter's number and gradient: flat, in the order of memory, a view."""
        for number, (start, end) in zip(self.numbers, self.bounds, strict=True):
            yield number, self.buffer[start:end]

    def layout_of(self, position: int) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
        """Dtype, shape and strides of a gradient: its parameter's, where these have no gaps."""
        parameter = self.parameters[position]
        shape, strides = tuple(parameter.shape), parameter.stride()
        if not is_dense(shape, strides):
            strides = torch.empty(shape, device="meta").stride()
        return self.buffer.dtype, shape, strides


class Compressor(Protocol):
    """What is sent of a bucket, and what is kept from step to step. Methods are called in the
    thread of the backward pass."""

    def reduce(self, bucket: Bucket) -> Future:
        """Send it. The future has its buffer, with what came of it."""

    def forms(self, bucket: Bucket) -> Mapping[int, CompressedGradient]:
        """What `reduce` has made of it, by position of the parameter; its future is done."""

    def state(self) -> tuple[dict[str, Any], dict[str, dict[int, Tensor]]]:
        """Plain values, and flat tensors: by what they are, and by number of the parameter. All are
        for the caller to copy."""

    def size_of(self, what: str, parameter: Tensor) -> int:
        """Of elements in such a tensor."""

    def load(self, plain: Mapping[str, Any], tensors: Mapping[str, dict[int, Tensor]]) -> None:
        """Go on from that state; the tensors are ours now, on their parameters' devices."""
