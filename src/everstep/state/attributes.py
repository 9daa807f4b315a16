"""What an optimizer of the user's own keeps beside its state and its groups: attributes.

No checkpoint has them. A whole state is exact all the same; a replay would begin with those of a
new optimizer, and come to other weights. So an update that changes one is no record, nor is any
after it; and a replay tells where they are others than they were.
"""

import random
import sys
from collections import deque
from collections.abc import Set
from itertools import count, islice
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.sharding.redundancy import inner_of
from everstep.state.optimizers import OptimizerState

_NUMBERS = (int, float, complex, bool, str, bytes, type(None), torch.dtype)
_ITEMS_MAX = 256
_TEXT_MAX = 100
_ARRAY_BYTES_MAX = 1 << 16
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
    random generators, collections of those, or optimizers."""
    rows = _own(optimizer)
    covered: set[int] = set()
    if not all(isinstance(value, _NUMBERS) for value in rows.values()):
        covered = _covered(inner_of(optimizer.optimizer))
    return {key: _print(value, covered) for key, value in rows.items()}


def plain_attributes(optimizer: OptimizerState) -> dict[str, str]:
    """Those that another process can compare: numbers and the like."""
    rows = list(_own(optimizer).items())[:_ITEMS_MAX]
    found = {key: _text(value) for key, value in rows if isinstance(value, _NUMBERS)}
    return {key: value for key, value in found.items() if len(value) <= _TEXT_MAX}


def other_generators(optimizer: OptimizerState) -> tuple[Any, ...]:
    """The states of python's and numpy's global generators, to see whether an update draws from
    them, which no replay does; nothing for torch's optimizers, which do not."""
    if _is_torchs(optimizer):
        return ()
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    return (random.getstate(), _plain(numpy.random.get_state(legacy=False)))


def _own(optimizer: OptimizerState) -> dict[str, Any]:
    """None of torch's classes, nor of one that says by a state_dict() of its own what its state
    is."""
    if _is_torchs(optimizer) or optimizer.has_own_methods:
        return {}
    return {k: v for k, v in vars(inner_of(optimizer.optimizer)).items() if k not in _KNOWN}


def _is_torchs(optimizer: OptimizerState) -> bool:
    return type(inner_of(optimizer.optimizer)).__module__.startswith("torch.optim")


def _generators() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    own = (numpy.random.Generator, numpy.random.RandomState) if numpy else ()
    return (torch.Generator, random.Random, *own)


def _covered(optimizer: Optimizer) -> set[int]:
    """By id() what a checkpoint has, wherever else it is named."""
    entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
    found = [optimizer.state, optimizer.param_groups, *optimizer.param_groups, *entries]
    found += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found += [value for entry in entries for value in entry.values()]
    return set(map(id, found))


def _print(value: Any, covered: Set[int], depth: int = 0) -> Any:
    if isinstance(value, _NUMBERS):
        return _text(value)
    if id(value) in covered or depth == _DEPTH_MAX:
        return None
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, _generators()):
        return _drawn(value)
    if isinstance(value, Optimizer):
        return _print({"state": value.state}, covered, depth)
    if isinstance(value, dict):
        rows = list(value.items())[:_ITEMS_MAX]
        return len(value), [
            (_print(key, covered, depth + 1), _print(item, covered, depth + 1))
            for key, item in rows
        ]
    if isinstance(value, (list, tuple, deque)):
        rows = list(islice(value, _ITEMS_MAX))
        return len(value), [_print(item, covered, depth + 1) for item in rows]
    if isinstance(value, (set, frozenset)):
        rows = list(islice(value, _ITEMS_MAX))
        return len(value), sorted(repr(_print(item, covered, depth + 1)) for item in rows)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return value.tobytes() if value.nbytes <= _ARRAY_BYTES_MAX else None
    return repr(value) if isinstance(value, count) else None


def _text(value: Any) -> str:
    """Python writes no integers of thousands of digits."""
    return hex(value) if isinstance(value, int) and value.bit_length() > 64 else repr(value)


def _drawn(generator: Any) -> Any:
    """Its state, to see whether something was drawn from it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):  # numpy's old kind
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def _plain(state: Any) -> Any:
    """A state of numpy's, to be compared."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
