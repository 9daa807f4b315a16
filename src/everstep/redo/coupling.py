"""Whether updates treat each parameter by itself, so that a replay may step a part of them: those
that a spread base has of an earlier step, or those whose gradients have been read.

Known of torch's own optimizers, and not of a class that nobody knows.
"""

import torch

from everstep.sharding.redundancy import is_redundancy_free, is_torchs
from everstep.state.optimizers import OptimizerState
from everstep.state.overlaps import overlapping

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def why_coupled(optimizers: list[OptimizerState]) -> str | None:
    """Return why an update may depend on other parameters; None where a call of step() may be made
    in several, each with the gradients of some parameters."""
    if not optimizers:
        return "the state has no optimizer"
    seen: set[int] = set()
    for optimizer in optimizers:
        if problem := _coupling(optimizer.optimizer):
            return f"{optimizer.name!r} {problem}"
        for _, name, parameter, _ in optimizer.parameters():
            if id(parameter) in seen:
                return f"{name!r} has two optimizers"
            if optimizer.mapped.split(parameter) is not None:
                return f"{name!r} is boxes of other tensors"
            seen.add(id(parameter))
    parameters = (p for each in optimizers for _, _, p, _ in each.parameters())
    if any(overlapping(enumerate(parameters))):  # the order of their updates may matter then
        return "parameters share memory"
    return None


def _coupling(optimizer: torch.optim.Optimizer) -> str | None:
    """What lets an update of a parameter depend on others."""
    kind = type(optimizer)
    if is_redundancy_free(optimizer):
        return "is a ZeroRedundancyOptimizer, which updates for other ranks"
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
