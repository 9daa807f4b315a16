"""Copying tensors into a slot's image, on the CPU and off CUDA devices.

A `Batch` is what one owner's tensors need: plain memory moves for contiguous CPU tensors, torch
copies for the rest. Copies off a device run on a side stream of it, into pinned memory, and are
ordered after what the training stream had enqueued at the call.
"""

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field

import torch

from everstep.capture.plan import Plan
from everstep.keeper.arena import Arena
from everstep.state.leaves import Leaf

log = logging.getLogger("everstep")

MOVERS = min(4, len(os.sched_getaffinity(0)))
"""Threads that share large copies on the CPU."""

_SHARED_FROM_BYTES = 16 << 20
_SMALL_BYTES = 64 << 10
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
# Both are memmove(3). The one releases the GIL, which costs a hand-over each time; the other does
# not.
_move_large = ctypes.CDLL(None).memmove
_move_small = ctypes.PyDLL(None).memmove
for _move in (_move_large, _move_small):
    _move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _move.restype = ctypes.c_void_p


@dataclass(slots=True)
class Batch:
    """The copies of one owner: (offset in the image, source address, bytes) and (offset,
    tensor)."""

    moves: list[tuple[int, int, int]] = field(default_factory=list)
    strided: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    on_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    sources: list[torch.Tensor] = field(default_factory=list)
    """Keeps the memory behind the addresses alive: `parameter.data = ...` would free it."""

    @classmethod
    def of(cls, leaves: Iterable[Leaf], plan: Plan) -> "Batch":
        """Sort the leaves by the way in which they are copied."""
        batch = cls()
        for leaf in leaves:
            tensor, offset = leaf.tensor.detach(), plan.offsets[leaf.name]
            size = tensor.numel() * tensor.element_size()
            if size == 0:
                continue
            if tensor.device.type == "cuda":
                batch.on_device.setdefault(tensor.device, []).append((offset, tensor))
            elif tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
                batch.moves.append((offset, tensor.data_ptr(), size))
                batch.sources.append(tensor)
            else:
                batch.strided.append((offset, tensor))
        return batch

    def copy_from_cpu(self, arena: Arena, slot: int, movers: Executor | None = None) -> None:
        """Make the CPU copies; blocks until they are done.

        With `movers`, large amounts are shared between their threads. Training that uses all cores
        waits in each parallel region for its slowest thread: what is taken evenly from all cores
        costs half of what is taken from one.
        """
        base = arena.image_address(slot)
        if movers is None or sum(size for _, _, size in self.moves) < _SHARED_FROM_BYTES:
            _move_all(base, self.moves)
        else:
            shares = _shares(self.moves, MOVERS)
            try:
                list(movers.map(_move_all, [base] * len(shares), shares))
            except RuntimeError:  # the program is ending, and with it all pools
                _move_all(base, self.moves)
        if self.strided:
            image = image_tensor(arena, slot)
            for offset, tensor in self.strided:
                place(image, offset, tensor).copy_(tensor)

    def enqueue_from(self, device: torch.device, arena: Arena, slot: int) -> None:
        """Enqueue the copies off one device on the current stream; does not block where the arena
        is pinned.

        The caller keeps the sources alive until the stream has passed them.
        """
        image = image_tensor(arena, slot)
        for offset, tensor in self.on_device.get(device, ()):
            plain = tensor.resolve_conj().resolve_neg()  # a new one only where a bit is set
            place(image, offset, plain).copy_(plain, non_blocking=True)


def _move_all(base: int, moves: list[tuple[int, int, int]]) -> None:
    for offset, source, size in moves:
        (_move_small if size < _SMALL_BYTES else _move_large)(base + offset, source, size)


def _shares(moves: list[tuple[int, int, int]], count: int) -> list[list[tuple[int, int, int]]]:
    """The moves in `count` shares of about equal bytes; a move may be cut in two."""
    share_size = -(-sum(size for _, _, size in moves) // count)
    shares: list[list[tuple[int, int, int]]] = [[]]
    left = share_size
    for offset, source, size in moves:
        while size > 0:
            part = min(size, left)
            shares[-1].append((offset, source, part))
            offset, source, size, left = offset + part, source + part, size - part, left - part
            if left == 0:
                shares.append([])
                left = share_size
    return [share for share in shares if share]


def image_tensor(arena: Arena, slot: int) -> torch.Tensor:
    """The slot's image as a tensor of bytes on the same memory."""
    return torch.frombuffer(arena.image(slot), dtype=torch.uint8)


def place(image: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The part of an image at which that tensor lies, with its dtype and shape, contiguous."""
    size = like.numel() * like.element_size()
    return image[offset : offset + size].view(like.dtype).view(like.shape)


class Devices:
    """The side streams of the CUDA devices, and the pinning of arenas."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[int, tuple[Arena, torch.device]] = {}

    def pin(self, arena: Arena, device: torch.device) -> None:
        """Register the arena with CUDA, once, for all devices; `device` is one in use. Takes
        seconds for many GB, so it is done before its first copy.

        Where it fails, copies go through the driver's own staging: slower, and just as right.
        """
        if arena.address in self._pinned:
            return
        # Kept, so that it stays mapped for as long as it is registered.
        self._pinned[arena.address] = arena, device
        with torch.cuda.device(device):
            error = int(torch.cuda.cudart().cudaHostRegister(arena.address, arena.size, _PORTABLE))
            if error:
                log.warning("pinning %s bytes of host memory: CUDA error %s", arena.size, error)
                with contextlib.suppress(RuntimeError):
                    torch.zeros(
                        1, device=device
                    )  # takes the error, which would hit the next kernel

    def unpin(self, arena: Arena) -> None:
        """Undo `pin`, where it was done; no copy into the arena may be under way. Any thread."""
        _, device = self._pinned.pop(arena.address, (None, None))
        if device is not None:
            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(arena.address)

    def synchronize(self) -> None:
        """Wait until nothing is on its way into an arena any more."""
        for device in {*self._streams, *(device for _, device in self._pinned.values())}:
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(device)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream of a device. For the copying thread only."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
