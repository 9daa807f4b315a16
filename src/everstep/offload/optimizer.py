"""OffloadedOptimizer: a torch.optim.Optimizer whose moments lie in shared memory, and whose updates
another process makes.

    step()   gradients ──▶ exchange ──▶ the worker: torch's own optimizer, in place, on masters
             weights   ◀── exchange ◀──

What a whole state of it would be is in arenas (inner.py), of which `state` shows the tensors: who
reads them reads what the worker has written, and nothing is copied to the trainer for that.
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, cast

import torch
from torch.optim import Optimizer

from everstep.errors import EverstepError, Unavailable, Unsupported
from everstep.keeper.arena import Arena
from everstep.keeper.wire import Message
from everstep.keeper.workers import Worker
from everstep.offload.inner import kind_of, step_here
from everstep.offload.shared import Shared, gradient_of
from everstep.sharding.layout import is_dtensor
from everstep.sharding.leaves import Leaf
from everstep.sharding.redundancy import is_torchs
from everstep.sharding.world import group_size
from everstep.state.fingerprint import Fingerprint

log = logging.getLogger("everstep")

_LEFT_S = 10.0
DEATHS_MAX = 3
"""Of processes, one after another, in one step."""


class OffloadedOptimizer(Optimizer):
    """An optimizer of the class `kind`, whose state is not in this process's memory.

    Its updates have the bits of the same class on tensors on the CPU, with float32 masters of
    weights in bfloat16 or float16. For the thread that trains.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        params: Iterable[Any],
        *,
        states: str | os.PathLike[str] | None = None,
        overlap: bool = False,
        **options: Any,
    ) -> None:
        """`states`: a directory, for a file that holds the state and is scratch; None: memory.
        `overlap`: make updates while backward still runs, of the parameters whose gradients are
        there; for loops in which each step() follows one backward(), and nothing changes gradients
        in between (no accumulation, no clipping, no scaler). step() raises Unsupported where
        something has. `options`: of `kind`. Raises Unsupported for a class or parameters that
        cannot be."""
        self._process: Process | None = None
        self._shared: Shared | None = None
        self.overlap = Overlap(self) if overlap else None
        self._states = None if states is None else os.path.abspath(states)
        name = f"{kind.__module__}.{kind.__qualname__}"
        is_own = kind.__module__ == "__main__"
        if is_own or kind_of(name) is not kind or kind.__name__ in _REFUSED:
            raise Unsupported(f"offloading a {name}: another process cannot make its updates")
        defaults = kind([torch.zeros(1, 1, requires_grad=True)], **options).defaults
        if defaults.get("differentiable") or defaults.get("capturable"):
            raise Unsupported(f"offloading a {name}: differentiable or capturable updates")
        self.offloaded, self.kind, self._options = name, cast(Any, kind), options
        self.in_process = False
        """Whether updates are made here, in place: at a replay."""
        self.problem: str | None = None
        """Why weights and state are between two steps, and stay so; None: they do not."""
        self.has_adopted = False
        """Whether its memory had been that of one before it."""
        super().__init__(params, defaults)
        # A class that has a load_state_dict() of its own says itself what its state is.
        self.register_load_state_dict_pre_hook(_keep_loaded)
        self.register_load_state_dict_post_hook(_put_loaded)
        self.register_state_dict_pre_hook(lambda _: self.check())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns with the new weights in place. Raises Unsupported for gradients that
        are sparse, Unavailable where the worker cannot make it. Where it is broken off by whatever
        is raised, and some of its updates are made, all that comes raises Unsupported until a state
        is restored or loaded."""
        self.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.in_process:
            step_here(self, self.kind)
            return loss
        for each in (each for group in self.param_groups for each in group["params"]):
            if each.grad is not None:
                gradient_of(each)  # nothing is begun with one that cannot be
        sent = self.overlap.settle() if self.overlap else ()
        shared = self._shared if sent and self._shared else self.begin()
        try:
            for number, chunk in enumerate(shared.chunks):
                if number not in sent:
                    self.send(chunk)
            assert self._process
            self._process.finish()
            shared.get(self)
        except BaseException:
            self.problem = "an update of an OffloadedOptimizer was broken off, and made in part"
            self.close()  # it makes all that it was asked for
            if not shared.is_changed:
                self.problem = None
            raise
        return loss

    def check(self) -> None:
        """Raises Unsupported where weights and state are between two steps."""
        if self.problem:
            raise Unsupported(
                f"{self.problem}: restore() or load_state_dict() brings it back whole"
            )

    def stop(self) -> None:
        """The state is to be replaced: change it no more; blocks until that is so."""
        if self.overlap:
            self.overlap.stop()

    def replaced(self) -> None:
        """It is, with what a whole number of updates has made."""
        self.problem = None

    def begin(self) -> Shared:
        """A step, with the hyperparameters as they are."""
        shared = self._share()
        shared.begin(self)
        self._process = self._process or Process(shared)
        return shared

    def send(self, indices: Sequence[int]) -> None:
        """Let these parameters be updated, in the step that was begun; does not wait for it. Any
        thread, one at a time."""
        assert self._shared
        assert self._process
        if given := self._shared.put(indices):
            self._process.ask(given)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, before the first update. Raises Unsupported, and what the class says of
        parameters."""
        if self._shared:
            raise Unsupported("adding parameters to an OffloadedOptimizer after its first update")
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        self.kind(parameters, **self._options)  # Muon refuses biases, say
        for parameter in parameters:
            if problem := _problem_of(parameter, self.kind):
                shape = tuple(parameter.shape)
                raise Unsupported(f"offloading a parameter {shape} {problem}")
            if self.overlap:
                self.overlap.watch(parameter)

    def room(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Where the state of a parameter is to lie, by its keys: who restores reads into it."""
        return {} if self.in_process else self._share().room(parameter)

    @property
    def arena(self) -> Arena | None:
        """Of the state; None before there is one."""
        return self._shared.arena if self._shared else None

    def adopt(self, arena: Arena) -> bool:
        """Go on in the memory of an optimizer whose process has died, which has what its last
        update made of it; owns `arena` then. Blocks while an update is still made there. False
        where it does not fit, or this one has its own."""
        if self._shared or not _is_left(arena.fd):
            return False
        shared = Shared(self, self._states, arena)
        self._shared = shared if shared.arena is arena else None
        self.has_adopted = self._shared is not None
        return self.has_adopted

    def close(self) -> None:
        """End the process; the next step starts another."""
        if self._process:
            self._process.close()
            self._process = None

    def _share(self) -> Shared:
        if self._shared is None or not self._shared.fits(self):
            self.close()
            self._shared = Shared(self, self._states)
        return self._shared


_REFUSED = ("LBFGS", "SparseAdam")
_OF_WHOLE_TENSORS = ("Adafactor", "Muon")


def _problem_of(parameter: torch.Tensor, kind: type[Optimizer]) -> str | None:
    if not parameter.is_floating_point():
        return f"of {parameter.dtype}"
    if kind.__name__ == "Adafactor" and not parameter.is_contiguous():
        return "that does not lie row by row: its sums would go in another order"
    if is_dtensor(parameter):
        if kind.__name__ in _OF_WHOLE_TENSORS or not is_torchs(kind):
            return f"that is sharded over ranks: {kind.__name__} may need all of it at once"
    elif group_size() > 1:
        return "that each rank updates whole, as in DDP. Shard the model (FSDP2)"
    return None


def _keep_loaded(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    optimizer._everstep_loaded = state_dict["state"]  # type: ignore[attr-defined]


def _put_loaded(optimizer: Optimizer) -> None:
    """As it was saved: torch has cast it to the parameters' dtype."""
    assert isinstance(optimizer, OffloadedOptimizer)
    optimizer.stop()
    optimizer.replaced()
    loaded = optimizer.__dict__.pop("_everstep_loaded")
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, values in loaded.items():
        optimizer.state[parameters[index]] = {
            # Of before "step" was a number; torch makes a tensor of it, too.
            key: torch.tensor(float(value)) if isinstance(value, int | float) else value.clone()
            for key, value in values.items()
            if value is not None
        }


def _is_left(fd: int) -> bool:
    """Whether no process makes updates in an arena, soon: one whose trainer has died ends when it
    has made the last."""
    deadline = time.monotonic() + _LEFT_S
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        else:
            fcntl.lockf(fd, fcntl.LOCK_UN)
            return True


class Overlap:
    """Updates that are made while backward still runs, of one optimizer. Hooks are called by the
    threads of backward, all else by that which trains.

        backward   ── hook: a gradient is there ── … ── all of a chunk are ──┐
        a thread                                    its gradients are copied ─┴▶ the process updates
        step()     what is left, then the new weights, all at once

    The weights change in step() alone. The state changes before, so that what was used must be what
    step() finds: the same gradients, and the same hyperparameters.
    """

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer
        self.before: list[Callable[[], object]] = []
        """Called before the first update of a step: who reads the state is to be done by then."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "everstep-offload")
        self._stream = cache(torch.cuda.Stream)
        """It gives the side stream of a device."""
        self._shared: Shared | None = None
        """Of the step that is begun."""
        self._arrived: dict[torch.Tensor, torch.Tensor] = {}
        """By parameter, its gradient."""
        self._seen: list[Fingerprint] = []
        """Of weights and gradients that are sent."""
        self._sent: dict[int, Future[None]] = {}
        """By the number of a chunk."""

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
        if self._shared:
            is_same = all(each.grad is then for each, then in self._arrived.items())
            if not is_same or any(seen.changed() for seen in self._seen):
                self._refuse("a gradient or weight was changed after backward (clipping?)")
            elif not self._shared.is_said(self._optimizer):
                self._refuse("hyperparameters were changed between backward() and step()")
        sent = list(self._sent)
        self._clear()
        return sent

    def stop(self) -> None:
        """Change the state no more, which is to be replaced; blocks until that is so."""
        if self._shared:
            for each in self._sent.values():
                each.cancel()
            wait(self._sent.values())
            self._optimizer.close()
            self._optimizer.problem = "its state was to be replaced, and was not"
        self._clear()

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
                self._refuse("gradients of several backward() are added up")
            elif gradient.is_sparse:
                self._refuse("a gradient is sparse")
            self._optimizer.check()
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
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append((self._stream(device), event))
        return self._thread.submit(self._copy, indices, events)

    def _copy(
        self, indices: Sequence[int], events: Sequence[tuple[torch.cuda.Stream, torch.cuda.Event]]
    ) -> None:
        """Not on the stream of backward, which would come first. `_arrived` holds the gradients
        until the copies, for which this waits, are made."""
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for stream, event in events:
                stack.enter_context(torch.cuda.stream(stream))
                stream.wait_event(event)
            self._optimizer.send(indices)

    def _refuse(self, why: str) -> None:
        self._optimizer.problem = (
            f"offloading with overlap=True: {why}. Weights are those of the step before, but some "
            f"of the state is not (leave overlap= out of such a loop)"
        )
        self._optimizer.check()


class Process:
    """The one that makes updates, and the next one where it dies, which is asked for all of the
    step again, and makes what is not made. For one thread at a time."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._asked: list[Message] = []
        self.worker: Worker | None = None

    def ask(self, given: Sequence[int]) -> None:
        """Let it update these parameters as well, in this step; does not wait for it."""
        place = {"step": self._shared.step, "position": len(self._asked)}
        self._asked.append({"type": "update", **place, "given": list(given)})
        with contextlib.suppress(OSError):  # finish() asks the next one
            if self.worker:
                self.worker.send(self._asked[-1])
            else:
                self._open()

    def finish(self) -> None:
        """Wait until all that was asked for is done. Raises Unavailable."""
        try:
            for _ in range(DEATHS_MAX):
                try:
                    worker = self.worker or self._open()
                    worker.send({"type": "end"})
                    worker.receive()
                except OSError as error:
                    log.warning("making an update: %s; another process goes on", error)
                    self.close()
                except EverstepError as error:
                    self.close()
                    raise Unavailable(f"making an update in another process: {error}") from error
                else:
                    return
            raise Unavailable(f"making an update: {DEATHS_MAX} processes for it have died")
        finally:
            self._asked.clear()

    def _open(self) -> Worker:
        worker = self.worker = Worker("everstep.offload.inner")
        worker.send({"type": "open", "trainer": os.getpid()}, self._shared.fds)
        for message in self._asked:
            worker.send(message)
        return worker

    def close(self) -> None:
        """End it, when it has made what it was asked for."""
        if self.worker:
            self.worker.close()
            self.worker = None

    def __del__(self) -> None:
        self.close()
