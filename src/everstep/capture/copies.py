"""Copying tensors into a slot's image, on the CPU and off CUDA devices.

A `Batch` is what one owner's tensors need: plain memory moves for contiguous CPU tensors, torch
copies for the rest. Copies off a device run on a side stream of it, into pinned memory, and are
ordered after what the training stream had enqueued at the call.
"""

import contextlib
import ctypes
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Any

import torch

from everstep.capture.plan import Plan
from everstep.format.packs import in_groups
from everstep.keeper.arena import Arena
from everstep.sharding.leaves import Leaf

log = logging.getLogger("everstep")

MOVERS = min(4, len(os.sched_getaffinity(0)))
"""Threads that share large copies on the CPU."""

_SHARE_BYTES = 16 << 20
_FIRST_BYTES = 8 << 20
_GROUP_BYTES = 64 << 20
_MESSAGES_MAX = 15
_SMALL_BYTES = 64 << 10
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
# Both are memmove(3). The one releases the GIL, which costs a hand-over each time; the other does
# not.
_move_large = ctypes.CDLL(None).memmove
_move_small = ctypes.PyDLL(None).memmove
for _move in (_move_large, _move_small):
    _move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _move.restype = ctypes.c_void_p


Move = tuple[int, int, int]
"""Offset in the image, source address, bytes."""

Place = tuple[int, torch.Tensor]
"""Offset in the image, tensor."""

Landing = tuple[torch.cuda.Event, int]
"""When it has passed, the unit that begins at that offset is there."""


@dataclass(slots=True)
class Batch:
    """The copies of one owner, in the order of the image, in units that are told when done."""

    shares: list[list[Move]] = field(default_factory=list)
    strided: list[Place] = field(default_factory=list)
    on_device: dict[torch.device, list[list[Place]]] = field(default_factory=dict)
    sources: list[torch.UntypedStorage] = field(default_factory=list)
    """Keeps the memory behind the addresses alive: `parameter.data = ...` would free it."""

    @classmethod
    def of(cls, leaves: Iterable[Leaf], plan: Plan) -> "Batch":
        """Sort the leaves by the way in which they are copied."""
        batch = cls()
        moves: list[Move] = []
        devices: dict[torch.device, list[Place]] = {}
        rows = [(plan.offsets[leaf.entry], leaf.tensor) for leaf in leaves]
        for offset, tensor in sorted(rows, key=itemgetter(0)):
            size = tensor.nbytes
            if size == 0:
                continue
            if tensor.is_cuda:
                devices.setdefault(tensor.device, []).append((offset, tensor.detach()))
            elif tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
                moves.append((offset, tensor.data_ptr(), size))
                batch.sources.append(tensor.untyped_storage())
            else:
                batch.strided.append((offset, tensor.detach()))
        batch.shares = _shares(moves)
        for device, places in devices.items():
            sized = ((place, place[1].nbytes) for place in places)
            batch.on_device[device] = in_groups(sized, _GROUP_BYTES)
        return batch

    def __bool__(self) -> bool:
        """Whether there is anything to copy."""
        return bool(self.shares or self.strided or self.on_device)

    def starts(self) -> Iterator[int]:
        """The offset at which each unit begins."""
        yield from (share[0][0] for share in self.shares)
        yield from (offset for offset, _ in self.strided)
        for groups in self.on_device.values():
            yield from (group[0][0] for group in groups)

    def size_on(self, device: torch.device) -> int:
        """Bytes that are copied off one device."""
        groups = self.on_device.get(device, ())
        return sum(tensor.nbytes for group in groups for _, tensor in group)

    def copy_from_cpu(
        self,
        arena: Arena,
        slot: int,
        movers: Executor | None = None,
        arrived: Callable[[int], None] = lambda start: None,
    ) -> None:
        """Make the CPU copies; blocks until they are done. `arrived` is told each unit's start.

        With `movers`, large amounts are shared between their threads. Training that uses all cores
        waits in each parallel region for its slowest thread: what is taken evenly from all cores
        costs half of what is taken from one.
        """
        base = arena.image_address(slot)

        def move_all(share: list[Move]) -> None:
            for offset, source, size in share:
                (_move_small if size < _SMALL_BYTES else _move_large)(base + offset, source, size)
            arrived(share[0][0])

        try:
            list((movers.map if movers and len(self.shares) > 1 else map)(move_all, self.shares))
        except RuntimeError:  # the program is ending, and with it all pools
            list(map(move_all, self.shares))
        if self.strided:
            image = image_tensor(arena, slot)
            for offset, tensor in self.strided:
                place(image, offset, tensor).copy_(tensor)
                arrived(offset)

    def enqueue_from(self, device: torch.device, arena: Arena, slot: int) -> list[Landing]:
        """Enqueue the copies off one device on the current stream; does not block where the arena
        is pinned. Returns an event for each unit, in order, and the unit's start.

        The caller keeps the sources alive until the stream has passed them.
        """
        image = image_tensor(arena, slot)
        landed = []
        for group in self.on_device.get(device, ()):
            for offset, tensor in group:
                plain = tensor.resolve_conj().resolve_neg()  # a new one only where a bit is set
                place(image, offset, plain).copy_(plain, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(device))
            landed.append((event, group[0][0]))
        return landed


class Progress:
    """Tells up to where an image is whole, in few steps: each costs a message. Thread-safe."""

    def __init__(self, starts: Iterable[int], size: int, tell: Callable[[int], None]) -> None:
        """`starts`: of the units that are still to come. `size`: bytes of the image."""
        self._starts = sorted(starts)
        self._missing = Counter(self._starts)  # two begin at one start where one is copied again
        self._next = 0
        self._tell_from = _FIRST_BYTES  # the disk need not wait for more
        self._stride = max(_FIRST_BYTES, size // _MESSAGES_MAX)
        self._tell = tell
        self._lock = threading.Lock()

    def arrived(self, start: int) -> None:
        """The unit that begins there is copied."""
        with self._lock:
            self._missing[start] -= 1
            while self._next < len(self._starts) and not self._missing[self._starts[self._next]]:
                self._next += 1
            if self._next == len(self._starts):
                return  # the seal tells
            whole = self._starts[self._next]
            if whole < self._tell_from:
                return
            self._tell_from = whole + self._stride
        self._tell(whole)


def _shares(moves: list[Move]) -> list[list[Move]]:
    """The moves in shares of equal bytes; a move may be cut."""
    shares: list[list[Move]] = []
    left = 0
    for offset, source, size in moves:
        while size > 0:
            if left == 0:
                shares.append([])
                left = _SHARE_BYTES
            part = min(size, left)
            shares[-1].append((offset, source, part))
            offset, source, size, left = offset + part, source + part, size - part, left - part
    return shares


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
        self.stream = cache(torch.cuda.Stream)
        """It gives the side stream of a device. For the copying thread only."""
        self._used: dict[torch.device, None] = {}
        self._pinned: dict[int, tuple[Arena, torch.device | None]] = {}

    def use(self, devices: Iterable[torch.device]) -> None:
        """Copies off these come next. Any thread."""
        self._used |= dict.fromkeys(devices)

    def pin(self, arena: Arena, device: torch.device) -> None:
        """Register the arena with CUDA, once, for all devices; `device` is one in use. Takes
        seconds for many GB, so it is done before its first copy.

        Where it fails, copies go through the driver's own staging: slower, and just as right.
        """
        if arena.address in self._pinned:
            return
        # Kept, so that it stays mapped for as long as it is registered.
        self._pinned[arena.address] = arena, None
        register = torch.cuda.cudart().cudaHostRegister
        if error := _error_of(device, register, arena.address, arena.size, _PORTABLE):
            log.warning("pinning %s bytes of host memory: CUDA error %s", arena.size, error)
        else:
            self._pinned[arena.address] = arena, device

    def has_pinned(self, arena: Arena) -> bool:
        """Whether copies into it need not be waited for. Any thread."""
        return self._pinned.get(arena.address, (None, None))[1] is not None

    def unpin(self, arena: Arena) -> None:
        """Undo `pin`, where it was done; no copy into the arena may be under way. Any thread."""
        _, device = self._pinned.pop(arena.address, (None, None))
        if device is not None:
            _error_of(device, torch.cuda.cudart().cudaHostUnregister, arena.address)

    def synchronize(self) -> None:
        """Wait until nothing is on its way into an arena any more."""
        for device in list(self._used):
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(device)


def _error_of(device: torch.device, call: Callable[..., Any], *arguments: int) -> int:
    """What a call of the runtime returned; 0 where it went well. The error is taken out of this
    thread, else the next kernel would raise it: that of the run, which has no part in it."""
    with torch.cuda.device(device):
        error = int(call(*arguments))
        if error:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
    return error
