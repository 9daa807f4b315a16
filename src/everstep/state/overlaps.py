"""Different tensors of the state in the same memory: what is written to one is seen in the other,
as with `best = model.state_dict()`, which was meant to be a copy."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from everstep.sharding.layout import local_of
from everstep.sharding.leaves import bytes_of
from everstep.sharding.mapped import reach

T = TypeVar("T")
Memory = tuple[torch.device, int]


class Overlap(NamedTuple):
    """A tensor in a value that lies in the memory of another one, which is in a value, too, or a
    model's or optimizer's."""

    name: str
    tensor: Tensor
    other_name: str
    other: Tensor
    is_of_values: bool


def memory_of(tensor: Tensor) -> Memory | None:
    """The storage that a tensor lies in; None where it has none yet."""
    if is_lazy(tensor):
        return None
    local = local_of(tensor)
    if type(local) not in (Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
        return None
    start = local.untyped_storage().data_ptr()
    return (local.device, start) if start else None


def overlapping(tensors: Iterable[tuple[T, Tensor]]) -> Iterator[tuple[T, T]]:
    """Of tensors that lie in each other's memory, or between each other's elements, each with one
    that begins before it."""
    rows = [
        (str(local.device), local.data_ptr(), local.data_ptr() + reach(local) * local.itemsize, key)
        for key, tensor in tensors
        if memory_of(tensor)
        for local in [local_of(tensor)]
        if local.numel()
    ]
    widest = None
    for row in sorted(rows, key=lambda row: row[:3]):
        device, start, end, key = row
        if widest and widest[0] == device and start < widest[2]:
            yield widest[3], key
        if not widest or widest[0] != device or end > widest[2]:
            widest = row


def settle(overlap: Overlap, restored: Tensor) -> None:
    """Give the tensor what was restored for it: in its place, where both are values and the other
    one stays as it is, else in memory of its own."""
    tensor, other = overlap.tensor, overlap.other
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if overlap.is_of_values and torch.equal(bytes_of(tensor), bytes_of(restored)):
            return
        if overlap.is_of_values and reach(local_of(tensor)) >= tensor.numel():
            before, known = tensor.clone(), other.clone()
            tensor.copy_(restored)
            if torch.equal(bytes_of(other), bytes_of(known)):
                return
            tensor.copy_(before)
        tensor.data = restored
