"""The hooks on an optimizer: hold its update for what is not copied yet, and note what it consumes.

Ours is the last pre-hook, because those before it may change gradients, and the first post-hook,
because those after it may change weights. A closure is wrapped, so that holding and noting happen
after its backward (Lightning always passes one).
"""

import time
from typing import Any

from everstep.capture.full import Full
from everstep.capture.log import Log
from everstep.handle import Metrics
from everstep.state.optimizers import OptimizerState


class Hook:
    """The pre-hook and post-hook on one optimizer. Trainer's thread."""

    def __init__(
        self, optimizer: OptimizerState, capture: Full, log: Log | None, metrics: Metrics
    ) -> None:
        """`log`: None where nothing is to be noted."""
        self._state = optimizer
        self._capture = capture
        self._log = log
        self._metrics = metrics
        self._writes_early = False
        self._began = 0.0
        optimizer_ = optimizer.optimizer
        self._before = optimizer_.register_step_pre_hook(self._before_step)
        self._after = optimizer_.register_step_post_hook(self._after_step) if log else None

    def put_in_order(self) -> None:
        """Others may have been registered since."""
        optimizer = self._state.optimizer
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if next(reversed(before)) != self._before.id:
            before[self._before.id] = before.pop(self._before.id)
        if self._after and next(iter(after)) != self._after.id:
            others = [key for key in after if key != self._after.id]
            after.update({key: after.pop(key) for key in others})

    def remove(self) -> None:
        """Leave the optimizer alone."""
        self._before.remove()
        if self._after:
            self._after.remove()

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        myself, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if self._writes_early or not callable(closure):
            self._hold()
            return None

        def closure_then_hold() -> Any:
            loss = closure()  # forward and backward: the copies may go on meanwhile
            # Torn: it wrote before it called the closure (SAM does). Once is enough.
            self._writes_early |= not self._hold()
            return loss

        if rest:
            return (myself, closure_then_hold, *rest[1:]), kwargs
        return args, {**kwargs, "closure": closure_then_hold}

    def _hold(self) -> bool:
        began = time.perf_counter()
        clean = self._capture.hold(self._state.index)
        if self._log:
            self._log.before_step(self._state)
        self._began = time.perf_counter()
        self._metrics.hold_seconds += self._began - began
        self._metrics.stall_seconds += self._began - began
        return clean

    def _after_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._log
        self._log.after_step(self._state, time.perf_counter() - self._began)
