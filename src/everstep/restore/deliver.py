"""Verified chunks into the memory of tensors: whole ones, and boxes of them, also with gaps."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from everstep.errors import Mismatch
from everstep.format.boxes import Box
from everstep.format.packs import PAGE_BYTES, round_up
from everstep.format.tables import TensorEntry
from everstep.restore.plan import Target, blocks
from everstep.sharding.layout import LocalBox
from everstep.sharding.leaves import bytes_of

_ITEMS = {
    1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128,
}  # fmt: skip
_Place = tuple[slice, ...]
_libc = ctypes.CDLL(None)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; the mmap module has no name for it


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where chunks go. `items`: the destination's memory as numbers of its item size, which can be
    copied whatever the dtype."""

    box: Box
    items: torch.Tensor
    is_on_device: bool

    @classmethod
    def to(cls, destination: LocalBox) -> "Delivery":
        """Into memory that bytes can be copied to."""
        items = as_items(destination.tensor.detach())
        return cls(destination.box, items, items.is_cuda)

    def window(self, target: Target) -> memoryview | None:
        """The destination's own memory of a whole chunk; None where that is not one stretch on the
        host."""
        if self.is_on_device or target.box != self.box or not self.items.is_contiguous():
            return None
        found = self.items.numpy().reshape(-1).view(np.uint8)[target.start :][: target.raw]
        _populate(found.ctypes.data, found.nbytes)
        return found.data

    def put(self, target: Target, chunk: memoryview) -> None:
        """Copy what the chunk's raw bytes have of the box. A device may go on copying from them
        after this: who calls waits for its stream."""
        copy = self._send if self.is_on_device else self._copy
        for at, block in blocks(target, self.items.itemsize):
            if len(chunk) and (common := block.intersect(self.box)):
                there, here = common.slices_in(block), common.slices_in(self.box)
                copy(chunk[at:], block, there, here)

    def _copy(self, chunk: memoryview, block: Box, there: _Place, here: _Place) -> None:
        """In this thread: torch would start others for it, beside those that read. Without the GIL,
        where it is much."""
        array = self.items.numpy()
        items = np.frombuffer(chunk, array.dtype, block.count).reshape(block.lengths)
        source = items[there] if there else items  # () would make a scalar
        destination = array[here] if here else array
        is_much = source.nbytes >= PAGE_BYTES
        if is_much and source.flags.c_contiguous and destination.flags.c_contiguous:
            _populate(destination.ctypes.data, source.nbytes)
            ctypes.memmove(destination.ctypes.data, source.ctypes.data, source.nbytes)
        else:
            destination[...] = source

    def _send(self, chunk: memoryview, block: Box, there: _Place, here: _Place) -> None:
        """Ranges go over the bus; what has gaps is picked out on the device."""
        items = torch.frombuffer(chunk, dtype=self.items.dtype, count=block.count)
        items = items.view(block.lengths)
        source = items[there]
        if not source.is_contiguous():
            source = items.to(self.items.device, non_blocking=True)[there]
        with torch.inference_mode(self.items.is_inference()):
            self.items[here].copy_(source, non_blocking=True)


def as_items(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers of the same size: torch cannot copy all dtypes, and numpy does not
    know them all."""
    return tensor.view(_ITEMS[tensor.itemsize])


def _populate(to: int, size: int) -> None:
    """Memory that may be new is about to be filled: its first touch takes longer than a copy to it,
    and less where the kernel is asked for all pages at once. Where the last page is there it is
    not: to ask for all of them takes half as long as the copy."""
    start, end = round_up(to), (to + size) // PAGE_BYTES * PAGE_BYTES
    if end <= start:
        return
    is_there = ctypes.c_char()
    _libc.mincore(ctypes.c_void_p(end - PAGE_BYTES), ctypes.c_size_t(1), ctypes.byref(is_there))
    if is_there.value == b"\0":  # Linux before 5.14 cannot: then the copy touches them
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_WRITE)


def has_overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return True
            reach += stride * (length - 1)
    return False


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """The CUDA devices on which they lie."""
    return {tensor.device for tensor in tensors if tensor.is_cuda}


def address(view: memoryview) -> int:
    """Of memory that may be written to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write into any tensor: with gaps, of inference mode, or one whose elements share memory
    (expand): then they must agree. Else raises Mismatch."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor = tensor.detach()
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                first = values.narrow(dim, 0, 1)
                if not torch.equal(bytes_of(first.expand_as(values)), bytes_of(values)):
                    raise Mismatch(
                        f"restoring into an expanded tensor of shape {list(tensor.shape)}: its "
                        f"elements share memory along dim {dim}, but those in the checkpoint differ"
                    )
                tensor, values = tensor.narrow(dim, 0, 1), first
        tensor.copy_(values)


def empty(entry: TensorEntry, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor as that one was, but for its elements."""
    return shaped(torch.empty(entry.spec.size, dtype=torch.uint8, device=device), entry)


def shaped(flat: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Bytes as the tensor's elements: torch warns where complex32 is asked for in new memory."""
    found = flat.view(getattr(torch, entry.spec.dtype))
    shape, strides = entry.spec.shape, entry.strides
    return found.view(shape) if strides is None else found.as_strided(shape, strides)
