"""Whether updates treat each parameter by itself, so that a replay may step a part of them: those
that a spread base has of an earlier step, or those whose gradients have been read.

Known of torch's own optimizers, and not of a class that nobody knows.
"""

import torch

from everstep.state.optimizers import OptimizerState
from everstep.state.redundancy import is_torchs

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def why_not(optimizers: list[OptimizerState]) -> str | None:
    """Why not; None where a call of step() may be made in several, each with the gradients of some
    parameters."""
    if not optimizers:
        return "the state has no optimizer"
    seen: set[int] = set()
    for optimizer in optimizers:
        kind = type(optimizer.optimizer)
        if not is_torchs(kind) or kind is torch.optim.LBFGS:
            return f"{optimizer.name!r} is a {kind.__qualname__}, which may couple parameters"
        for group in optimizer.optimizer.param_groups:
            # By which torch chooses between for-loop and foreach, for all of a group together.
            if len({(type(p) in _PLAIN, p.device.type) for p in group["params"]}) > 1:
                return f"{optimizer.name!r} has parameters of several kinds, or on several devices"
        for _, name, parameter, _ in optimizer.parameters():
            if id(parameter) in seen:
                return f"{name!r} has two optimizers"
            if optimizer.mapped.split(parameter) is not None:
                return f"{name!r} is boxes of other tensors"
            seen.add(id(parameter))
    return None
