"""The hooks on an optimizer: hold its update for what is not copied yet, and note what it consumes.

Ours is the last pre-hook, because those before it may change gradients, and the first post-hook,
because those after it may change weights. A closure is wrapped, so that holding and noting happen
after its backward (Lightning always passes one). A step() that is compiled calls them as they are:
what they do is no part of the update, and must not be traced. A step() that goes into a CUDA graph
calls them then, when nothing is updated, and never again.
"""

import sys
import time
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

import torch

from everstep.capture.copier import Copier
from everstep.errors import Unsupported
from everstep.handle import Metrics
from everstep.redo.clipping import is_capturing
from everstep.redo.recorder import Recorder
from everstep.sharding.redundancy import offloaded_of
from everstep.state.optimizers import OptimizerState

_ours: set[int] = set()
"""Ids of the hooks that everstep has put on optimizers: more than one Checkpointer may save the
same. They change nothing, so that their order among themselves does not matter."""


class Hook:
    """The pre-hook and post-hook on one optimizer. Trainer's thread."""

    def __init__(
        self,
        optimizer: OptimizerState,
        capture: Copier,
        recorder: Recorder,
        metrics: Metrics,
        settle: Callable[[], None],
    ) -> None:
        """`settle`: waits for what the restored state may still lack at the first update."""
        self._state = optimizer
        self._settle = settle
        self._optimizer = optimizer.optimizer
        self._capture = capture
        self._recorder = recorder
        self._metrics = metrics
        self._is_outside = False
        self._is_compiled = False
        self._before = self._optimizer.register_step_pre_hook(self._before_step)
        self._after = self._optimizer.register_step_post_hook(self._after_step)
        _ours.update((self._before.id, self._after.id))
        self._offloaded = offloaded_of(self._optimizer)
        self._overlap = self._offloaded and self._offloaded.overlap
        if self._overlap:
            self._overlap.before.append(self._before_backward_updates)
        self._leave_compiled()

    def put_in_order(self) -> None:
        """Others may have been registered since. Raises Unsupported while an update is made, and
        where one was broken off."""
        if self._offloaded:
            self._offloaded.check()
        if self._overlap and self._overlap.is_updating:
            raise Unsupported(
                f"saving between backward() and step(): {self._state.name!r} makes its updates "
                f"meanwhile (overlap=True). Save after step()"
            )
        self._leave_compiled()
        optimizer: Any = self._optimizer  # torch calls its OrderedDicts dicts
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        # What is in place is left alone: torch may be going through them.
        if not _is_at_begin(self._before.id, reversed(before)):
            before.move_to_end(self._before.id)
        if not _is_at_begin(self._after.id, after):
            after.move_to_end(self._after.id, last=False)

    def remove(self) -> None:
        """Leave the optimizer alone."""
        if self._overlap:
            self._overlap.before.remove(self._before_backward_updates)
            self._overlap = None
        for handle in (self._before, self._after):
            handle.remove()
            _ours.discard(handle.id)

    def _leave_compiled(self) -> None:
        """Before the first save a hook does nothing, so that this comes in time; importing what
        compiles takes seconds, and most runs never need it."""
        if self._is_outside or "torch._dynamo" not in sys.modules:
            return
        self._is_outside = True
        before: Callable[..., Any] = torch.compiler.disable(self._before_step)
        after: Callable[..., Any] = torch.compiler.disable(self._after_step)

        def traced(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_compiling():
                self._is_compiled = True
            return before(optimizer, args, kwargs)

        self._optimizer._optimizer_step_pre_hooks[self._before.id] = traced
        self._optimizer._optimizer_step_post_hooks[self._after.id] = after

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_capturing():
            self._state.was_captured = True
            self._settle()
            self._capture.await_copies()
            return None
        self._settle()
        self._state.has_stepped = True
        myself, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if not callable(closure):
            self._hold(rest, kwargs)
            return None

        def closure_then_hold() -> Any:
            loss = closure()  # forward and backward: the copies may go on meanwhile
            said = loss.detach() if hasattr(loss, "detach") else loss
            self._hold(*_with({"closure": said}, rest, kwargs))  # what it returned, in its place
            return loss

        given, named = _with(closure_then_hold, rest, kwargs)
        return (myself, *given), named

    def _before_backward_updates(self) -> None:
        self._settle()
        self._capture.await_copies()
        self._recorder.begin_early(self._state)

    def _hold(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Wait for copies of what the update changes, and note what it consumes."""
        began = time.perf_counter()
        self._capture.hold(self._state.index)
        if self._recorder.is_on:
            hooks = reversed(self._optimizer._optimizer_step_pre_hooks)
            if not _is_at_begin(self._before.id, hooks):
                self._recorder.refuse(
                    f"a pre-hook of {self._state.name!r} was registered meanwhile"
                )
            if self._is_compiled:  # its last bits are others than those of the plain update
                self._recorder.refuse(f"the step() of {self._state.name!r} is compiled")
            self._recorder.before_step(self._state, args, kwargs)
        seconds = time.perf_counter() - began
        self._metrics.hold_seconds += seconds
        self._metrics.stall_seconds += seconds

    def _after_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_capturing() and self._recorder.is_on:
            self._recorder.after_step(self._state)


def _is_at_begin(own: int, hooks: Iterable[int]) -> bool:
    """Whether there is nothing before it but others of everstep's."""
    return _ours.issuperset(takewhile(own.__ne__, hooks))


def _with(closure: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of step(), with this in the place of its closure."""
    return ([closure, *args[1:]], kwargs) if args else (args, {**kwargs, "closure": closure})
