"""Tensors of the state that share memory here, and perhaps did not when they were saved:
`best = model.state_dict()` at the begin of a run, a copy of it later."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from everstep.sharding.layout import local_of

Memory = tuple[torch.device, int]


def memory_of(tensor: Tensor) -> Memory | None:
    """The storage that a tensor lies in; None where it has none yet."""
    if is_lazy(tensor):
        return None
    local = local_of(tensor)
    if type(local) not in (Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
        return None
    start = local.untyped_storage().data_ptr()
    return (local.device, start) if start else None


def shared(tensors: Iterable[tuple[str | None, Tensor]]) -> dict[Memory, str | None]:
    """The storages in which several of these lie, and the name of the first in each."""
    different = {id(tensor): (name, tensor) for name, tensor in reversed(list(tensors))}
    rows = [(memory_of(tensor), name) for name, tensor in reversed(different.values())]
    counts = Counter(memory for memory, _ in rows)
    return {
        memory: name
        for memory, name in reversed(rows)  # the first stays
        if counts[memory] > 1 and memory is not None
    }
