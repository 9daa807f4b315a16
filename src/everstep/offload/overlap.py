"""Updates that are made while backward still runs: `OffloadedOptimizer(..., overlap=True)`.

    backward   ── hook: a gradient is there ── … ── all of a chunk are ──┐
    a thread                                    its gradients are copied ─┴▶ the process updates it
    step()     what is left, then the new weights, all at once

The weights change in step() alone. The state changes before, so that what was used must be what
step() finds: the same gradients, and the same hyperparameters.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch

from everstep.errors import Unsupported
from everstep.sharding.layout import is_dtensor
from everstep.sharding.leaves import Leaf
from everstep.state.fingerprint import Fingerprint

if TYPE_CHECKING:
    from everstep.offload.optimizer import OffloadedOptimizer
    from everstep.offload.shared import Shared


class Overlap:
    """Of one optimizer. Hooks are called by the threads of backward, all else by that which
    trains."""

    def __init__(self, optimizer: "OffloadedOptimizer") -> None:
        self._optimizer = optimizer
        self.before: list[Callable[[], object]] = []
        """Called before the first update of a step: who reads the state is to be done by then."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "everstep-offload")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._shared: Shared | None = None
        """Of the step that is begun."""
        self._arrived: dict[torch.Tensor, torch.Tensor] = {}
        """By parameter, its gradient."""
        self._seen: list[Fingerprint] = []
        """Of weights and gradients that are sent."""
        self._sent: dict[int, Future[None]] = {}
        """By the number of a chunk."""
        self._problem: str | None = None

    @property
    def is_updating(self) -> bool:
        """Whether the state is between two steps."""
        return self._shared is not None

    def watch(self, parameter: torch.Tensor) -> None:
        """Take its gradients when they come. Raises Unsupported."""
        if is_dtensor(parameter):
            raise Unsupported("offloading with overlap=True: of sharded parameters nobody tells")
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def settle(self) -> Collection[int]:
        """Wait until all that came is sent; the numbers of these chunks. Raises Unsupported where
        something was used that is another by now."""
        for each in self._sent.values():
            each.result()
        if self._shared and not self._problem:
            is_same = all(each.grad is then for each, then in self._arrived.items())
            if not is_same or any(seen.changed() for seen in self._seen):
                self._problem = "a gradient or weight was changed after backward (clipping?)"
            elif not self._shared.is_said(self._optimizer):
                self._problem = "hyperparameters were changed between backward() and step()"
        if self._problem:
            raise self._refusal()
        sent = list(self._sent)
        self._clear()
        return sent

    def stop(self) -> None:
        """The state is to be replaced: change it no more; blocks until that is so."""
        if self._shared:
            for each in self._sent.values():
                each.cancel()
            wait(self._sent.values())
            self._optimizer.close()
            self._problem = "its state was to be replaced, and was not"
        self._clear()

    def replaced(self) -> None:
        """It is, with what a whole number of updates has made."""
        self._problem = None

    def _clear(self) -> None:
        self._shared = None
        self._arrived.clear()
        self._seen.clear()
        self._sent.clear()

    def _arrive(self, parameter: torch.Tensor) -> None:
        with self._lock:
            gradient = parameter.grad
            assert gradient is not None
            if parameter in self._arrived:
                self._problem = "gradients of several backward() are added up"
            elif gradient.is_sparse:
                self._problem = "a gradient is sparse"
            if self._problem:
                raise self._refusal()
            if self._shared is None:
                for each in self.before:
                    each()
                self._shared = self._optimizer.begin()
            self._arrived[parameter] = gradient
            chunk, members = self._shared.chunk_of(parameter)
            if all(each in self._arrived or not each.requires_grad for each in members):
                self._sent[chunk] = self._send(self._shared.chunks[chunk], members)

    def _send(self, indices: Sequence[int], members: Sequence[torch.Tensor]) -> Future[None]:
        used = [*members, *(each.grad for each in members if each.grad is not None)]
        leaves = (Leaf(str(number), each) for number, each in enumerate(used))
        self._seen.append(Fingerprint(leaves, follows=True))
        events = []
        for device in {each.device for each in members if each.is_cuda}:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append((self._streams[device], event))
        return self._thread.submit(self._copy, indices, events)

    def _copy(
        self,
        indices: Sequence[int],
        events: Sequence[tuple[torch.cuda.Stream, torch.cuda.Event]],
    ) -> None:
        """Not on the stream of backward, which would come first. `_arrived` holds the gradients
        until the copies, for which this waits, are made."""
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for stream, event in events:
                stack.enter_context(torch.cuda.stream(stream))
                stream.wait_event(event)
            self._optimizer.send(indices)

    def _refusal(self) -> Unsupported:
        return Unsupported(
            f"offloading with overlap=True: {self._problem}. Weights are those of the step before, "
            f"but some of the optimizer's state is not: restore() brings it back. Leave overlap= "
            f"out of such a loop"
        )
