"""State: the user's dict of models, optimizers and values as leaves, objects and hyperparameters."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from everstep.errors import Mismatch
from everstep.state.leaves import Guard, Leaf, check_tensor, find_aliases
from everstep.state.modules import ModuleState
from everstep.state.objects import TensorSink
from everstep.state.optimizers import OptimizerState
from everstep.state.placement import Placement
from everstep.state.stateful import (
    GeneratorState,
    GlobalGenerators,
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


@dataclass(frozen=True, slots=True)
class Walk:
    """What changes rarely: the leaves, other names of theirs, and the optimizers' part of the table.

    The same object is returned for as long as nothing has changed.
    """

    leaves: tuple[Leaf, ...]
    aliases: Mapping[str, list[str]]
    optimizers: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Collected:
    """The state at one call: the walk, tensors met in objects (copied at the call), and the objects."""

    walk: Walk
    loose: tuple[Leaf, ...]
    objects: dict[str, Any]
    hyperparameters: dict[str, Any]


class State:
    """The state of a run. Not thread-safe: for the thread that trains."""

    def __init__(self, state: dict[str, Any], rng: bool = True) -> None:
        """Raises TypeError and ValueError for what is no state."""
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise TypeError("state must be a dict of names to models, optimizers and values")
        if rng and "rng" in state:
            raise ValueError(
                'the name "rng" is taken by the random generators; rename it or pass rng=False'
            )
        self._entries: list[Entry] = list(_entries(state))
        if rng:
            self._entries.append(GlobalGenerators())
        self._walk: Walk | None = None
        self._guard = Guard()
        self._owners: dict[int, int | None] = {}
        self.user_seconds = 0.0
        """Spent in state_dict() methods that are not ours."""

    @property
    def optimizers(self) -> list[OptimizerState]:
        """The optimizers, by their index."""
        return [entry for entry in self._entries if isinstance(entry, OptimizerState)]

    def collect(self) -> Collected:
        """The state at this moment, by reference: tensors are not copied here, objects are."""
        loose: dict[str, Leaf] = {}

        def sink(name: str, tensor: torch.Tensor) -> str:
            check_tensor(name, tensor)
            loose[name] = Leaf(name, tensor.detach(), self._owners.get(id(tensor)))
            return name

        if self._walk is None or not self._guard.holds():
            self._walk = self._walk_anew()
        objects = {}
        for entry in self._entries:
            began = time.perf_counter()
            if (value := entry.objects(sink)) is not None:
                objects[entry.name] = value
            if isinstance(entry, StatefulState):
                self.user_seconds += time.perf_counter() - began
        hyperparameters = {entry.name: entry.hyperparameters(sink) for entry in self.optimizers}
        return Collected(self._walk, tuple(loose.values()), objects, hyperparameters)

    def prepare(self, placement: Placement, only: list[str] | None) -> None:
        """Let each part say where its tensors go. `only`: names of parts; others are left alone."""
        self._name_parameters()
        chosen = [entry for entry in self._entries if only is None or _is_chosen(entry.name, only)]
        if only is not None and not chosen:
            names = [entry.name for entry in self._entries]
            raise Mismatch(f"restoring only={only}: the state has no such part, but {names}")
        for entry in chosen:
            entry.prepare(placement)
        if only is None:
            self._report_extra(placement)
        self._walk = None

    def _report_extra(self, placement: Placement) -> None:
        saved = placement.saved
        for name in sorted(
            saved.objects.keys() - {entry.name for entry in self._entries} - {"rng"}
        ):
            placement.problems.append(f"missing: the state has no {name!r}")
        for name, entry in sorted(saved.tensors.items()):
            reached = placement.used.intersection((entry.spec.name, *entry.aliases))
            if name not in placement.used and not (name.startswith("rng.") or reached):
                placement.problems.append(f"missing: the state has no tensor {name!r}")

    def _walk_anew(self) -> Walk:
        self._guard = Guard()
        self._name_parameters()
        found = [leaf for entry in self._entries for leaf in entry.leaves(self._guard)]
        self._owners = owners = self._find_owners()
        leaves, aliases = find_aliases(
            Leaf(leaf.name, leaf.tensor, owners.get(id(leaf.tensor), leaf.owner)) for leaf in found
        )
        table = {entry.name: entry.table() for entry in self.optimizers}
        return Walk(tuple(leaves), aliases, table)

    def _name_parameters(self) -> None:
        names: dict[int, str] = {}
        for entry in self._entries:
            if isinstance(entry, ModuleState):
                for key, name in entry.parameter_names().items():
                    names.setdefault(key, name)
            elif isinstance(entry, ValueState):
                for name, tensor in entry.tensors().items():
                    names.setdefault(id(tensor), name)
        for optimizer in self.optimizers:
            optimizer.parameter_names = names

    def _find_owners(self) -> dict[int, int | None]:
        """The optimizer of each parameter; None where several have it, so that it is copied at the call."""
        owners: dict[int, int | None] = {}
        for optimizer in self.optimizers:
            for _, _, parameter, _ in optimizer.parameters():
                several = owners.get(id(parameter), optimizer.index) != optimizer.index
                owners[id(parameter)] = None if several else optimizer.index
        return owners


def _entries(state: dict[str, Any]) -> Iterator[Entry]:
    count = 0

    def entry(name: str, holder: Any, key: Any) -> Iterator[Entry]:
        nonlocal count
        value = holder[key]
        if isinstance(value, nn.Module):
            yield ModuleState(name, value)
        elif isinstance(value, Optimizer):
            yield OptimizerState(name, value, count)
            count += 1
        elif isinstance(value, GradScaler):
            yield ScalerState(name, value)
        elif is_generator(value):
            yield GeneratorState(name, value)
        elif isinstance(value, Stateful) and not isinstance(value, type):
            yield StatefulState(name, value)
        elif isinstance(value, dict) and _holds_live_parts(value):
            for part in value:
                yield from entry(f"{name}.{part}", value, part)
        elif isinstance(value, list) and _holds_live_parts(dict(enumerate(value))):
            for index in range(len(value)):
                yield from entry(f"{name}.{index}", value, index)
        else:
            yield ValueState(name, holder, key)

    for name in state:
        yield from entry(name, state, name)


def _holds_live_parts(value: Mapping[Any, Any]) -> bool:
    """Whether a model, optimizer or other stateful object stands anywhere in it."""
    for item in value.values():
        if isinstance(item, (nn.Module, Optimizer, GradScaler, Stateful)) or is_generator(item):
            return True
        nested = dict(enumerate(item)) if isinstance(item, list) else item
        if isinstance(nested, dict) and _holds_live_parts(nested):
            return True
    return False


def _is_chosen(name: str, only: list[str]) -> bool:
    return any(name == wanted or name.startswith(f"{wanted}.") for wanted in only)
