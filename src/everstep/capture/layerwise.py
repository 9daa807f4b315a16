"""Gradients are copied while backward still runs: `Log(layerwise=True)`.

    backward   ── hook: a gradient is there ── … ── GROUP_BYTES of them are ──┐
    a thread                                        into the next record's image
    step()     what is there, and was not written to since, is copied no more

It is a guess: that the next record lies in its image as the last one did, and that gradients stay
as backward leaves them. A gradient that has changed by step() is copied then, and is not copied
early again in this run. Where the record lies otherwise, its tensors are copies out of the image.
Source: LowDiff+ (SC 2025), layer-wise snapshots; it does not look whether they are still right.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from everstep.capture.copies import Batch, Devices, Landing, image_tensor, place
from everstep.capture.plan import Plan
from everstep.capture.pool import Pool, Slot
from everstep.errors import Unavailable
from everstep.redo.clipping import is_capturing
from everstep.redo.recorder import Gradient
from everstep.sharding.layout import is_dtensor
from everstep.sharding.leaves import Leaf
from everstep.state.fingerprint import Fingerprint

GROUP_BYTES = 4 << 20
"""Copied together: each group costs a hand-over to the thread, or an event."""


class Early(NamedTuple):
    """What of a record is in its slot before the record is made: entries, and when those off a
    device are there."""

    slot: Slot
    entries: Set[str]
    landings: list[Landing]


@dataclass(slots=True)
class _Group:
    gradients: dict[str, torch.Tensor]
    seen: Fingerprint
    """Of them, from before the copy."""
    copied: Future[None] | None = None
    ends: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)

    def wait(self) -> None:
        """Until they are copied; the current streams of devices wait, and not the host."""
        if self.copied:
            self.copied.result()
        for device, end in self.ends.items():
            torch.cuda.current_stream(device).wait_event(end)


class Layerwise:
    """Of one Checkpointer, where no other ranks are. Hooks are called by the threads of backward,
    all else by that which trains."""

    def __init__(self, pool: Pool, devices: Devices) -> None:
        self._pool, self._devices = pool, devices
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "everstep-layers")
        self._stream = cache(torch.cuda.Stream)
        """It gives the side stream of a device."""
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._keys: dict[torch.Tensor, tuple[str, int]] = {}
        """Of parameters whose gradients the next record has: their entries in it, and bytes."""
        self._plan: Plan | None = None
        self._descriptor_size = 0
        self._turns: Counter[torch.Tensor] = Counter()
        """How often each parameter got a gradient since its last update; ..."""
        self._usual: dict[torch.Tensor, int] = {}
        """... and how often before it: several times where gradients are added up."""
        self._unfit: set[str] = set()
        """What was copied early, and was another one by step()."""
        self._slot: Slot | None = None
        self._begun: set[str] = set()
        """What is in the slot, or will be; ..."""
        self._arrived: list[Leaf] = []
        """... not copied yet; ..."""
        self._groups: list[_Group] = []
        """... being copied, or not settled yet."""
        self._landings: list[Landing] = []

    def expect(
        self, plan: Plan, gradients: Mapping[str, torch.Tensor], descriptor_size: int
    ) -> None:
        """The next record will lie as this one, and have gradients of these parameters, by their
        entries."""
        self._plan, self._descriptor_size = plan, descriptor_size
        self._keys = {
            parameter: (key, parameter.nbytes)
            for key, parameter in gradients.items()
            if key not in self._unfit and parameter.requires_grad and not is_dtensor(parameter)
        }
        for parameter in self._keys.keys() - self._hooks.keys():
            self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._arrive)

    def settle(self, gradients: Mapping[str, Gradient]) -> Set[str]:
        """Return which of these, by their entries, are in the image as they are now, before an
        update. What is done to them afterwards does not reach the image. Blocks until they are
        copied; of those on a GPU its current stream waits for that, and not the host."""
        with self._lock:
            self._flush()
            for parameter, _ in gradients.values():
                self._usual[parameter] = self._turns.pop(parameter, 0)
        there: set[str] = set()
        for group in self._groups:
            group.wait()
            changed = group.seen.changed()
            for key in group.gradients.keys() & gradients.keys():
                is_same = group.gradients.pop(key) is gradients[key][1] and key not in changed
                (there if is_same else self._unfit).add(key)
        self._groups = [group for group in self._groups if group.gradients]
        return there

    def take(
        self, plan: Plan | None, gradients: Mapping[str, torch.Tensor]
    ) -> tuple[Early | None, dict[str, torch.Tensor]]:
        """Give the slot with these entries, which were settled, to a caller whose record has this
        plan. Where another plan was expected, copies of them on the CPU, when they are made; the
        slot is given back, and nothing expected. So it is where there are none."""
        with self._lock:  # nothing arrives in the slot after this, but what `_landings` tell of
            for group in self._groups:
                group.wait()
        slot, expected, found = self._slot, self._plan, dict[str, torch.Tensor]()
        assert not gradients or (slot and expected), "they were settled in a slot"
        early = None
        if slot and expected and gradients and plan is expected:
            early, self._pool.lent = Early(slot, gradients.keys(), self._landings), slot
        else:
            for event, _ in self._landings:
                event.synchronize()
            if slot and expected:
                image = image_tensor(slot.arena, slot.index)
                for key, like in gradients.items():
                    found[key] = place(image, expected.offsets[key], like).clone()
                self._pool.take_back(slot)
            self._plan = None
        with self._lock:
            self._slot = None
            self._begun.clear()
            self._arrived, self._groups, self._landings = [], [], []
        return early, found

    def close(self) -> None:
        """Copy nothing any more."""
        self.remove_hooks()
        self.take(None, {})
        self._thread.shutdown()

    def remove_hooks(self) -> None:
        """Look at no gradient any more."""
        for hook in self._hooks.values():
            hook.remove()

    def _arrive(self, parameter: torch.Tensor) -> None:
        if is_capturing():
            return
        with self._lock:
            self._turns[parameter] += 1
            key, size = self._keys.get(parameter, (None, 0))
            is_last = self._turns[parameter] == self._usual.get(parameter)
            if key is None or key in self._begun or not is_last:
                return
            gradient = parameter.grad
            if gradient is None or not _is_alike(gradient, parameter) or gradient.nbytes != size:
                return
            if not self._has_slot(gradient):
                return
            self._begun.add(key)
            self._arrived.append(Leaf(key, gradient))
            if gradient.is_cuda:  # each may come from another stream
                stream = self._stream(gradient.device)
                stream.wait_stream(torch.cuda.current_stream(gradient.device))
            if sum(leaf.tensor.nbytes for leaf in self._arrived) >= GROUP_BYTES:
                self._flush()

    def _has_slot(self, gradient: torch.Tensor) -> bool:
        """Whether there is a slot to which it can be copied now. Does not wait for one: without it
        all is copied after step()."""
        if self._slot is None and self._plan and self._pool.lent is None:
            with contextlib.suppress(Unavailable):
                self._slot = self._pool.acquire(self._plan, self._descriptor_size, waits=False)
            self._pool.lent = None
            if self._slot is None:
                self._plan = None
        # Copies into memory that is not pinned would hold up backward.
        is_quick = gradient.is_cpu or (self._slot and self._devices.has_pinned(self._slot.arena))
        return self._slot is not None and bool(is_quick)

    def _flush(self) -> None:
        """Begin to copy what has arrived. `_lock` is held."""
        leaves, self._arrived = self._arrived, []
        if not leaves:
            return
        assert self._slot
        assert self._plan
        arena, index = self._slot.arena, self._slot.index
        batch = Batch.of(leaves, self._plan)
        named = {leaf.name: leaf.tensor for leaf in leaves}
        group = _Group(named, Fingerprint(leaves, follows=True))
        self._devices.use(batch.on_device)
        for device in batch.on_device:
            stream = self._stream(device)
            # What was done to them since they arrived is no change to the fingerprint.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.device(device), torch.cuda.stream(stream):
                self._landings += batch.enqueue_from(device, arena, index)
                group.ends[device] = torch.cuda.Event()
                group.ends[device].record(stream)
        if batch.shares or batch.strided:
            group.copied = self._thread.submit(batch.copy_from_cpu, arena, index)
        self._groups.append(group)


def _is_alike(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether it takes the place that a record has for a gradient of this parameter."""
    is_dense = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    return is_dense and gradient.is_contiguous() and gradient.dtype == parameter.dtype
