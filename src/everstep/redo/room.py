"""Whether a device has memory to spare for what is kept of gradients: training comes first."""

from collections import Counter
from collections.abc import Iterable

import torch

_PART = 0.5
"""Of what is free, the most that may be taken."""


def has_room(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether copies of these may be made where they are. Host memory is not looked at. Asks the
    driver, and waits for no kernel."""
    sizes: Counter[torch.device] = Counter()
    for tensor in tensors:
        if tensor.is_cuda:
            sizes[tensor.device] += tensor.nbytes
    return all(size <= _PART * free_bytes(device) for device, size in sizes.items())


def free_bytes(device: torch.device) -> int:
    """Of a CUDA device: what nobody has, and what torch's allocator keeps for later."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + unused
