"""The allow-list: which runs a log records.

It goes by the exact type of each optimizer: torch's own that change their state in place, and do
the same again from the same bytes; others by the user's word (`everstep.Log(optimizers=...)`). It
binds recording, never replay. Those that go by single elements: sharding/topology.py.

What shows later to be unusual (a gradient that is sparse, or lies otherwise than its parameter)
costs a whole state each time (capture/trust.py).
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from everstep.errors import Unsupported
from everstep.sharding.layout import is_dtensor, part_of, spread_of
from everstep.sharding.leaves import fills_memory
from everstep.sharding.redundancy import inner_of, is_redundancy_free, is_torchs, offloaded_of
from everstep.sharding.topology import ELEMENTWISE, goes_by_elements
from everstep.state.optimizers import OptimizerState
from everstep.state.overlaps import overlapping

_PLAIN = (torch.Tensor, nn.Parameter)
_NAMES = (*ELEMENTWISE, "Adafactor", "Muon")
_ALLOWED = {getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name)}


class Overwritten(Unsupported):
    """A gradient that was held by reference was written to. It is copied from now on, so that this
    is no sign of what comes after it."""


def why_not_allowed(
    optimizers: Sequence[OptimizerState],
    modules: Mapping[str, nn.Module],
    added: Iterable[type] = (),
) -> str | None:
    """Return why no log of this run is recorded, naming optimizer or parameter; None where it is.
    `modules`: of the state, by name. `added`: classes on the user's word."""
    if not optimizers:
        return "a log records what optimizers consume, and the state has none"
    owners: dict[int, str] = {}
    for state in optimizers:
        for _, name, parameter, _ in state.parameters():
            if (owner := owners.setdefault(id(parameter), state.name)) != state.name:
                return f"{name!r} has two optimizers, {owner!r} and {state.name!r}"
        problem = f"is in a {state.wrapper}, which has state of its own" if state.wrapper else None
        if problem := problem or _why_not(state, {*_ALLOWED, *added}):
            return f"{state.name!r} {problem}"
    for name, module in modules.items():
        for path, part in module.named_modules(prefix=name):
            is_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
            if is_sparse and part.weight.requires_grad and id(part.weight) in owners:
                return f"{path!r} was made with sparse=True, and no record holds sparse gradients"
    return None


def _why_not(state: OptimizerState, allowed: set[type]) -> str | None:
    if is_redundancy_free(state.optimizer):
        return "is a ZeroRedundancyOptimizer, of whose updates other ranks make some"
    optimizer = inner_of(state.optimizer)
    offloaded = offloaded_of(optimizer)
    kind = offloaded.kind if offloaded else type(optimizer)
    if kind not in allowed:
        return (
            f"is a {kind.__module__}.{kind.__qualname__}, whose updates nobody here knows to be "
            f"repeatable. If it changes its state in place, and by nothing but its gradients and "
            f"settings, say so: strategy=everstep.Log(optimizers=[{kind.__name__}])"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "makes differentiable updates, which put new tensors in the place of the old"
    step = vars(optimizer).get("step")
    if hasattr(step, "_torchdynamo_orig_callable"):
        return "has a step() that is compiled, which comes to other last bits"
    if hasattr(step, "__wrapped__") and _unwrapped(step) is not _unwrapped(type(optimizer).step):
        return "has a step() of its own, which is not its class's"
    if state.was_captured:
        return "is updated by a CUDA graph, whose replays call no hook"
    if not state.calls_hooks:
        return "has a step() that calls none of torch's hooks"
    for _, name, parameter, _ in state.parameters():
        if state.mapped.split(parameter) is not None:
            return f"changes {name!r}, which is boxes of other tensors (layout=, FSDP1)"
    return None


def _unwrapped(step: Any) -> Any:
    """The function inside of what torch and schedulers put around it."""
    found = inspect.unwrap(step)
    return getattr(found, "__func__", found)


def why_coupled(optimizers: list[OptimizerState]) -> str | None:
    """Return why an update of what is recorded may depend on other parameters; None where a call of
    step() may be made in several, each with the gradients of some: a replay steps those that a
    spread base has of an earlier step. Known of torch's own optimizers, and not of a class that
    nobody knows."""
    for optimizer in optimizers:
        if problem := _coupling(optimizer.optimizer):
            return f"{optimizer.name!r} {problem}"
    parameters = (p for each in optimizers for _, _, p, _ in each.parameters())
    if any(overlapping(enumerate(parameters))):  # the order of their updates may matter then
        return "parameters share memory"
    return None


def _coupling(optimizer: torch.optim.Optimizer) -> str | None:
    """What lets an update of a parameter depend on others."""
    kind = type(optimizer)
    if not is_torchs(kind) or kind is torch.optim.LBFGS:
        return f"is a {kind.__qualname__}, which may couple parameters"
    for group in optimizer.param_groups:
        # By which torch chooses between for-loop and foreach, for all of a group together.
        if len({(type(p) in _PLAIN, p.device.type) for p in group["params"]}) > 1:
            return "has parameters of several kinds, or on several devices"
        # Its default eps is that of the first parameter's dtype, for all that follow.
        if kind is torch.optim.Adafactor and len({p.dtype for p in group["params"]}) > 1:
            return "is an Adafactor with parameters of several dtypes"
    return None


def part_here(
    name: str, parameter: torch.Tensor, gradient: torch.Tensor, kind: str
) -> torch.Tensor:
    """This rank's part of a gradient that an optimizer of class `kind` consumes. Raises Unsupported
    where that is not here, or no replay could have it as it is."""
    is_part = is_dtensor(gradient) and is_dtensor(parameter)
    if is_part and not goes_by_elements(kind) and spread_of(gradient) != spread_of(parameter):
        # torch replicates those of embeddings that are cut.
        why = f"is placed otherwise than the parameter, and what {kind} makes of it depends on that"
        raise Unsupported(f"the gradient of {name!r} {why}")
    why = "is sparse, which no record holds"
    if gradient.layout is torch.strided:
        if (part := part_of(gradient, parameter)) is None:
            why = "is placed otherwise than the parameter"
        elif not fills_memory(part):
            why = "has gaps or overlaps in memory (an expanded tensor?), on which sums depend"
        elif type(part) is not torch.Tensor:
            why = f"is a {type(part).__name__}"
        else:
            return part
    raise Unsupported(f"the gradient of {name!r} {why}")
