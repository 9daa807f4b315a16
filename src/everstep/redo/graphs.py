"""CUDA graphs: what is called while one is captured is not done then, but at each replay, which
writes to the same memory with no hook, and with nothing that counts a version."""

from collections.abc import Iterable

import torch

_COMMON_POOL = (0, 0)


def is_capturing() -> bool:
    """Whether the current stream is being captured, so that nothing that is called happens now, and
    no Python runs when it does."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Pools:
    """Whether some of torch's memory on a CUDA device is set apart, as that of graphs is. Whoever
    captured them, and when, nothing else tells: a graph of the forward and backward passes has
    gradients that look fresh at its first replay."""

    def __init__(self) -> None:
        self._reserved: dict[torch.device, int] = {}
        self._apart: set[torch.device] = set()

    def are_apart(self, devices: Iterable[torch.device]) -> bool:
        """On any of these; once it was, for good. Waits for no kernel. Where nothing was reserved
        since it was asked last, there is nothing new, and all segments need not be looked at."""
        for device in set(devices) - self._apart:
            reserved = self._reserved_on(device)
            if reserved is None or reserved == self._reserved.get(device):
                continue
            self._reserved[device] = reserved
            if any(_is_apart(segment, device) for segment in torch.cuda.memory_snapshot()):
                self._apart.add(device)
        return not self._apart.isdisjoint(devices)

    def _reserved_on(self, device: torch.device) -> int | None:
        """Bytes, ever. None where the allocator does not tell: then it may be anything."""
        if torch.cuda.get_allocator_backend() != "native":
            self._apart.add(device)
            return None
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return int(stats["reserved_bytes"]["all"]["allocated"])


def _is_apart(segment: dict[str, object], device: torch.device) -> bool:
    pool = segment["segment_pool_id"]
    return segment["device"] == device.index and pool != _COMMON_POOL
