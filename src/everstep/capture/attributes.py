"""What an optimizer of the user's own keeps beside its state and its groups: attributes.

No checkpoint has them. A whole state is exact all the same; a replay would begin with those of a
new optimizer, and come to other weights. So an update that changes one is no record.
"""

import random
from collections.abc import Set
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.state.optimizers import OptimizerState
from everstep.state.redundancy import inner_of

_NUMBERS = (int, float, complex, bool, str, bytes, type(None), torch.dtype)
_ITEMS_MAX = 256
_DEPTH_MAX = 4
_KNOWN = frozenset(
    {
        *vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.0)),
        "grad_scale",  # a GradScaler's, which records have
        "found_inf",
        "_opt_called",  # a scheduler's
    }
)


def attributes(optimizer: OptimizerState) -> dict[str, Any]:
    """Its own attributes in a form that can be compared, as far as they are numbers, tensors,
    random generators, lists and dicts of those, or optimizers; none of torch's classes, nor of one
    that says by a state_dict() of its own what its state is."""
    inner = inner_of(optimizer.optimizer)
    kind = type(inner)
    if kind.__module__.startswith("torch.optim") or optimizer.has_own_methods:
        return {}
    rows = {k: v for k, v in vars(inner).items() if k not in _KNOWN}
    covered: set[int] = set()
    if not all(isinstance(value, _NUMBERS) for value in rows.values()):
        covered = _covered(inner)
    return {key: _print(value, covered) for key, value in rows.items()}


def _covered(optimizer: Optimizer) -> set[int]:
    """By id() what a checkpoint has, wherever else it is named."""
    entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
    found = [optimizer.state, optimizer.param_groups, *optimizer.param_groups, *entries]
    found += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found += [value for entry in entries for value in entry.values()]
    return set(map(id, found))


def _print(value: Any, covered: Set[int], depth: int = 0) -> Any:
    if isinstance(value, _NUMBERS):
        return repr(value)
    if id(value) in covered or depth == _DEPTH_MAX:
        return None
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, Optimizer):
        return _print({"state": value.state}, covered, depth)
    if isinstance(value, dict):
        rows = list(value.items())[:_ITEMS_MAX]
        return len(value), [
            (_print(key, covered, depth + 1), _print(item, covered, depth + 1))
            for key, item in rows
        ]
    if isinstance(value, (list, tuple)):
        return len(value), [_print(item, covered, depth + 1) for item in value[:_ITEMS_MAX]]
    return None
