"""Memory for one record after another: made once, because the first touch of new memory takes
longer than all else that is done with a gradient on the CPU.

In small pages: on a virtual machine whose host takes free memory back, huge ones cost five times as
much at their first touch (docs/results.md).
"""

import mmap
import sys
import threading
from collections.abc import Iterable

import torch

from everstep.format.packs import round_up
from everstep.format.tables import TensorEntry

_ALIGN = 64
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_UNUSED = 2
"""References to a slab that nobody uses: of the one who asks, and of getrefcount itself."""


class Slabs:
    """Regions in which CPU tensors are placed. Thread-safe."""

    def __init__(self) -> None:
        self._slabs: list[memoryview] = []
        self._lock = threading.Lock()

    def tensors(self, entries: Iterable[TensorEntry]) -> list[torch.Tensor]:
        """New tensors as those were, but for their elements; on the CPU.

        Their memory is used again when none of them, and nothing that shares memory with them, is
        left: each storage holds a reference to its slab (torch.frombuffer).
        """
        chosen = list(entries)
        starts, end = [], 0
        for entry in chosen:
            starts.append(end)
            end += round_up(entry.spec.size, _ALIGN)
        with self._lock:
            slab = self._slab(end)
            return [_place(entry, slab, start) for entry, start in zip(chosen, starts, strict=True)]

    def clear(self) -> None:
        """Let go of all that nobody uses."""
        with self._lock:
            self._slabs.clear()

    def _slab(self, size: int) -> memoryview:
        kept, self._slabs = self._slabs, []
        found = None
        while kept:
            slab = kept.pop()
            is_free = sys.getrefcount(slab) == _UNUSED
            if is_free and found is None and len(slab) >= size:
                found = slab
            if slab is found or not is_free:
                self._slabs.append(slab)
        if found is None:
            found = memoryview(mmap.mmap(-1, max(size, 1), flags=_PRIVATE))
            self._slabs.append(found)
        return found


def empty(entry: TensorEntry, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor as that one was, but for its elements."""
    return _shaped(torch.empty(entry.spec.size, dtype=torch.uint8, device=device), entry)


def _place(entry: TensorEntry, slab: memoryview, start: int) -> torch.Tensor:
    if not entry.spec.size:  # which frombuffer refuses
        return empty(entry)
    flat = torch.frombuffer(slab, dtype=torch.uint8, count=entry.spec.size, offset=start)
    return _shaped(flat, entry)


def _shaped(flat: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Bytes as the tensor's elements: torch warns where complex32 is asked for in new memory."""
    found = flat.view(getattr(torch, entry.spec.dtype))
    shape, strides = entry.spec.shape, entry.strides
    return found.view(shape) if strides is None else found.as_strided(shape, strides)
