"""What no log of a run could ever hold: log and spread refuse it, with a way out, and auto keeps to
whole states.

Known when a Checkpointer is made: LBFGS, embeddings with sparse gradients, optimizers that update
outside of step(). Known later: a gradient that turns out to be sparse, a step() that goes into a
CUDA graph, and tensors that change outside of step() from the first step on, again and again.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from everstep.errors import Unsupported
from everstep.sharding.layout import is_dtensor, part_of, spread_of
from everstep.sharding.leaves import fills_memory
from everstep.sharding.redundancy import inner_of, is_dealt_out, updates_elsewhere
from everstep.sharding.topology import goes_by_elements
from everstep.state.optimizers import OptimizerState

WAY_OUT = "Use strategy='full', or 'auto'"

OUTSIDE_MAX = 3
"""So often, with no record between: that is how the run is made, and not a slip."""


class Refused(Unsupported):
    """This run cannot be recorded, neither now nor later."""


class Lasting(Unsupported):
    """What updates depend on has changed where no record sees it: what comes after it depends on
    it, too."""


class Outside(Unsupported):
    """Something changed tensors outside of an optimizer's step(), or may have."""


class Overwritten(Unsupported):
    """A gradient that was held by reference was written to. It is copied from now on, so that this
    is no sign of what comes after it."""


class Held:
    """Whether a log holds at all, as long as it has not shown it. For the thread that trains."""

    def __init__(self) -> None:
        self._changes: int | None = 0

    def note_success(self) -> None:
        """Something was recorded: from now on a change is an exception, and no reason to stop."""
        self._changes = None

    def note(self, error: Unsupported) -> None:
        """What was noted is no record. Raises Refused where that comes too often."""
        if self._changes is None or not isinstance(error, Outside):
            return
        self._changes += 1
        if self._changes == OUTSIDE_MAX:
            raise Refused(
                f"{error}. So it was each of the {OUTSIDE_MAX} times since this run began: its "
                f"optimizer or its loop changes them outside of step(), and no step can be "
                f"recorded. {WAY_OUT}"
            ) from error


def check(
    optimizers: Iterable[OptimizerState], modules: Mapping[str, nn.Module], is_alone: bool = True
) -> None:
    """Raises Refused, naming optimizer or parameter. `modules`: of the state, by name. `is_alone`:
    whether what other ranks do is saved by nobody here."""
    owned, seen = set(), dict[int, str]()
    for state in optimizers:
        if twin := seen.get(id(state.optimizer)):
            raise Refused(
                f"recording {state.name!r}: it is the same optimizer as {twin!r}. Leave one of "
                f"these out of the state"
            )
        seen[id(state.optimizer)] = state.name
        if problem := _why_not(state, is_alone):
            raise Refused(f"recording {state.name!r}: {problem}. {WAY_OUT}")
        owned |= {id(parameter) for _, _, parameter, _ in state.parameters()}
    for name, module in modules.items():
        for path, part in module.named_modules(prefix=name):
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                weight = part.weight
                if weight.requires_grad and id(weight) in owned:
                    raise Refused(
                        f"recording '{path}.weight': {path!r} was made with sparse=True, and no "
                        f"record holds sparse gradients. Make it with sparse=False, or "
                        f"{_lower(WAY_OUT)}"
                    )


def check_gradients(optimizers: Iterable[OptimizerState]) -> None:
    """Those that are there now. Raises Refused."""
    for state in optimizers:
        for _, name, parameter, _ in state.parameters():
            if (gradient := parameter.grad) is not None:
                check_gradient(name, gradient)


def check_gradient(name: str, gradient: torch.Tensor) -> None:
    """Raises Refused where it is sparse."""
    if gradient.layout is not torch.strided:
        raise Refused(
            f"recording {name!r}: its gradient is sparse, which no record holds. Make it dense "
            f"(an embedding with sparse=False), or {_lower(WAY_OUT)}"
        )


def check_placement(name: str, parameter: torch.Tensor, gradient: torch.Tensor, kind: str) -> None:
    """Raises Unsupported where an optimizer of class `kind` came to other bits with the part of the
    gradient that belongs to the parameter's: torch replicates those of embeddings that are cut."""
    is_part = is_dtensor(gradient) and is_dtensor(parameter)
    if is_part and not goes_by_elements(kind) and spread_of(gradient) != spread_of(parameter):
        raise Unsupported(
            f"the gradient of {name!r} is placed otherwise than the parameter, and what {kind} "
            f"makes of it depends on that. Use strategy='full'"
        )


def check_graphs(optimizers: Iterable[OptimizerState]) -> None:
    """Raises Refused where a step() was captured."""
    for state in optimizers:
        if state.was_captured:
            raise Refused(
                f"recording {state.name!r}: its step() went into a CUDA graph, whose replays call "
                f"no hook, so that nobody sees what it consumes. Keep step() outside of the graph, "
                f"or {_lower(WAY_OUT)}"
            )


def _why_not(state: OptimizerState, is_alone: bool) -> str | None:
    optimizer = state.optimizer
    kind, inner = type(optimizer), inner_of(optimizer)
    if isinstance(inner, torch.optim.LBFGS):
        return "LBFGS runs its closure several times in one step, which no record holds"
    if is_alone and is_dealt_out(optimizer):
        return "other ranks make some of its updates, and this Checkpointer is alone"
    if updates_elsewhere(optimizer):
        return "with overlap_with_ddp=True it updates in DDP's hooks, and not in its step()"
    if not state.calls_hooks:
        return (
            f"the step() of {kind.__qualname__} calls none of torch's hooks, so that nobody sees "
            f"what it consumes"
        )
    if callable(getattr(inner, "train", None)) and callable(getattr(inner, "eval", None)):
        return (
            f"{type(inner).__qualname__} changes weights outside of step(), in its train() and "
            f"eval(), as schedule-free optimizers do"
        )
    return None


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def local_gradient(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient. Raises Unsupported where that is not here."""
    if (part := part_of(gradient, parameter)) is None:
        raise Unsupported(
            f"the gradient of {name!r} is placed otherwise than the parameter. Use strategy='full'"
        )
    return part


def part_here(
    name: str, parameter: torch.Tensor, gradient: torch.Tensor, kind: str
) -> torch.Tensor:
    """This rank's part of a gradient that an optimizer of class `kind` consumes. Raises Unsupported
    where that is not here, or no replay could have it as it is."""
    check_placement(name, parameter, gradient, kind)
    gradient = local_gradient(name, parameter, gradient)
    if not fills_memory(gradient):
        raise Unsupported(
            f"the gradient of {name!r} has gaps or overlaps in memory (an expanded tensor?), on "
            f"which sums depend"
        )
    if type(gradient) is not torch.Tensor:
        raise Unsupported(
            f"the gradient of {name!r} is a {type(gradient).__name__}. Use strategy='full'"
        )
    return gradient
