"""Digests of all parameters at a base: made by a thread of its own while forward and backward run,
and again before the next update.

Samples may miss what wrote to a few elements; this does not, once for each base.
"""

import threading
from collections.abc import Iterable

import torch
import xxhash


class Hashes:
    """Of those among the tensors that are contiguous and on the CPU: others would take a copy, or a
    synchronisation. Until `changed` they are held. For the thread that trains."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """`tensors`: with their names."""
        self._tensors = [
            (name, tensor.detach())
            for name, tensor in tensors
            if tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        ]
        self._known: list[bytes] = []
        self._thread = threading.Thread(target=self._hash, name="everstep-hash", daemon=True)
        self._thread.start()

    def changed(self) -> list[str]:
        """The names of those that are not any more what they were. Waits for the thread."""
        self._thread.join()
        rows = zip(self._tensors, self._known, strict=True)
        return [name for (name, tensor), known in rows if _digest(tensor) != known]

    def _hash(self) -> None:
        self._known = [_digest(tensor) for _, tensor in self._tensors]


def _digest(tensor: torch.Tensor) -> bytes:
    """XXH3-128 of its bytes; releases the GIL."""
    return xxhash.xxh3_128_digest(tensor.reshape(-1).view(torch.uint8).numpy().data)
