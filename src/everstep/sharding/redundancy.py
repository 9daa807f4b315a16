"""Optimizers around an optimizer: torch's ZeroRedundancyOptimizer, of which each rank updates some
parameters and has the state of those, and the proxies of integrations.

torch's module is looked up where the user has imported it.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from everstep.errors import Unsupported


class OptimizerProxy(Optimizer):
    """In place of an optimizer whose groups do not show their parameters, with those that they
    have in its steps. Hooks on it are called in the steps of the other."""

    def __init__(self, inner: Optimizer, members: Sequence[Sequence[torch.Tensor]]) -> None:
        self.inner = inner
        super().__init__([{"params": list(each)} for each in members], {})
        inner.register_step_pre_hook(
            lambda _, *args: self._call(self._optimizer_step_pre_hooks, *args)
        )
        inner.register_step_post_hook(
            lambda _, *args: self._call(self._optimizer_step_post_hooks, *args)
        )
        fetch_hyperparameters(self)

    def step(self, closure: Any = None) -> Any:
        """Nobody calls it: it is here so that torch lets hooks in."""
        raise TypeError("step the optimizer around this one: it is only a view of its parts")

    def _call(self, hooks: Mapping[int, Any], args: Any, kwargs: Any) -> None:
        for hook in list(hooks.values()):
            hook(self, args, kwargs)


def _copy_groups(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    for one, other in zip(source, target, strict=True):
        other.update({key: value for key, value in one.items() if key != "params"})


def is_redundancy_free(optimizer: Optimizer) -> bool:
    """Whether it is one."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def inner_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state: of its rank's parameters."""
    if isinstance(optimizer, OptimizerProxy):
        return optimizer.inner
    return cast(Any, optimizer).optim if is_redundancy_free(optimizer) else optimizer


OFFLOADED = "offloaded "
"""Begins the class of an OffloadedOptimizer, before that of what makes its updates."""


def class_of(optimizer: Optimizer) -> str:
    """The class of what makes the updates, module and qualified name."""
    if offloaded := offloaded_of(optimizer):
        return f"{OFFLOADED}{offloaded.offloaded}"
    kind = type(inner_of(optimizer))
    return f"{kind.__module__}.{kind.__qualname__}"


def offloaded_of(optimizer: Optimizer) -> Any:
    """The OffloadedOptimizer (offload/optimizer.py) that it is; None where it is another."""
    inner = inner_of(optimizer)
    return inner if getattr(inner, "offloaded", None) else None


def is_same_class(now: str, then: str) -> bool:
    """Whether these are the same class. A program's own module is __main__ where it was started as
    a script, and has its name where it was imported."""
    for one, other in ((now, then), (then, now)):
        module, _, name = one.partition(".")
        if module == "__main__" and other.endswith(f".{name}"):
            return True
    return now == then


def is_torchs(kind: type[Optimizer]) -> bool:
    """Whether it is a class of torch's own. Not by its module, which torch names in two ways."""
    return kind is not Optimizer and getattr(torch.optim, kind.__name__, None) is kind


def updating_ranks(
    optimizer: Optimizer, parameter: torch.Tensor, name: str, ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """Of the ranks that have a parameter, those that update it and have its state. Raises
    Unsupported, for the tensor `name`, where that cannot be told."""
    if not is_redundancy_free(optimizer):
        return ranks
    zero = cast(Any, optimizer)
    among = dist.get_process_group_ranks(zero.process_group)
    if not set(ranks) <= set(among):
        raise Unsupported(
            f"capturing {name!r}: its ZeroRedundancyOptimizer deals it out among ranks "
            f"{sorted(among)}, but ranks {list(ranks)} have its parameter, each group its own "
            f"state. Give it a process group of all of them, or use FSDP2"
        )
    return (among[zero._param_to_rank[parameter]],)


def is_here(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Whether this rank has the state of a parameter."""
    if not is_redundancy_free(optimizer):
        return True
    zero = cast(Any, optimizer)
    return bool(zero._param_to_rank[parameter] == zero.rank)


def fetch_hyperparameters(optimizer: Optimizer) -> None:
    """What its inner optimizer says, its groups say too, where that is the one that is changed."""
    if isinstance(optimizer, OptimizerProxy):
        _copy_groups(optimizer.inner.param_groups, optimizer.param_groups)


def spread_hyperparameters(optimizer: Optimizer) -> None:
    """What its groups say now, its inner optimizer says too."""
    if isinstance(optimizer, OptimizerProxy):
        _copy_groups(optimizer.param_groups, optimizer.inner.param_groups)
    if is_redundancy_free(optimizer):
        zero = cast(Any, optimizer)
        zero._sync_param_groups(zero.param_groups, zero.optim.param_groups)
