"""Entries: the named parts of a state, by what they are."""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, Protocol

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from everstep.state.leaves import Guard, Leaf
from everstep.state.loaders import LoaderGenerator, LoaderState, is_loader
from everstep.state.modules import ModuleState
from everstep.state.objects import TensorSink
from everstep.state.optimizers import OptimizerState
from everstep.state.placement import Placement
from everstep.state.stateful import (
    GeneratorState,
    ScalerState,
    Stateful,
    StatefulState,
    ValueState,
    is_generator,
)


class Entry(Protocol):
    """One named part of the state."""

    name: str

    def leaves(self, guard: Guard) -> list[Leaf]:
        """Tensors that stay the same objects from step to step, for as long as the guard holds."""

    def objects(self, sink: TensorSink) -> Any:
        """Everything else, as tagged JSON; None where there is nothing."""

    def prepare(self, placement: Placement) -> None:
        """Say where stored tensors go and what is to be done then; report what does not fit."""


def entries_of(state: dict[str, Any]) -> Iterator[Entry]:
    """The parts of a user's dict, nested ones under joined names."""
    indices = count()
    for name in state:
        yield from _entry(name, state, name, indices)


def _entry(name: str, holder: Any, key: Any, indices: Iterator[int]) -> Iterator[Entry]:
    value = holder[key]
    if isinstance(value, (dict, list)) and _holds_live_parts(value):
        for part in value if isinstance(value, dict) else range(len(value)):
            yield from _entry(f"{name}.{part}", value, part, indices)
    elif isinstance(value, nn.Module):
        yield ModuleState(name, value)
    elif isinstance(value, Optimizer):
        yield OptimizerState(name, value, next(indices))
    elif isinstance(value, GradScaler):
        yield ScalerState(name, value)
    elif is_generator(value):
        yield GeneratorState(name, value)
    elif is_loader(value):
        yield LoaderState(name, value)
        if value.generator is not None:
            yield LoaderGenerator(f"{name}.generator", value.generator)
    elif isinstance(value, Stateful) and not isinstance(value, type):
        yield StatefulState(name, value)
    else:
        yield ValueState(name, holder, key)


def _holds_live_parts(value: Mapping[Any, Any] | list[Any], depth: int = 0) -> bool:
    """Whether a model, optimizer or other stateful object stands anywhere in it."""
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, (nn.Module, Optimizer, GradScaler, Stateful)) or is_generator(item):
            return True
        # One that is nested in itself is refused when it is encoded.
        if isinstance(item, (dict, list)) and depth < 100 and _holds_live_parts(item, depth + 1):
            return True
    return False
