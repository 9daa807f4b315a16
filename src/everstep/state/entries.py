"""Entries: the named parts of a state, by what they are."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from everstep.errors import Unsupported
from everstep.sharding.leaves import Guard, Leaf
from everstep.sharding.ranked import ByRank, Share
from everstep.sharding.world import World
from everstep.state.modules import ModuleState
from everstep.state.objects import TensorSink
from everstep.state.optimizers import OptimizerState, StateByParameter
from everstep.state.overlaps import Overlap, overlapping
from everstep.state.placement import Placement
from everstep.state.stateful import (
    GeneratorState,
    LoaderState,
    ScalerState,
    Stateful,
    StatefulState,
    ValueState,
    is_generator,
    is_loader,
)
from everstep.state.streams import Streamed, StreamState

log = logging.getLogger("everstep")

_LIGHTNINGS = {"lightning", "lightning_fabric", "pytorch_lightning"}


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
class Place:
    """Where a part stands in the user's dict. `is_live`: it is an object that changes, no value.
    `parts`: the keys of one that holds others, which is no part itself."""

    name: str
    holder: Any
    key: Any
    value: Any
    is_live: bool = False
    parts: tuple[Any, ...] | None = None

    def check(self) -> None:
        """Raises Unsupported where the dict has something else there by now: what was there would
        be saved, without a word. Values may change."""
        is_fixed = self.is_live or self.parts is not None
        if is_fixed and self.holder is not None and self.holder[self.key] is not self.value:
            self._refuse("is another object")
        if self.parts is not None:
            now = tuple(_keys(self.value))
            if now != self.parts and set(now) != set(self.parts):
                self._refuse(f"has the parts {_named(now)}, it had {_named(self.parts)}")

    def _refuse(self, problem: str) -> None:
        raise Unsupported(
            f"the state has changed since this Checkpointer was made: {self.name!r} {problem}. "
            f"Close this Checkpointer, and make one with what there is now"
        )


def places_in(state: dict[str, Any]) -> list[Place]:
    """The parts of a user's dict, nested ones under joined names, each after what holds it."""
    own = Place("state", None, None, state, parts=tuple(state))
    return [own, *(place for name in state for place in _places(name, state, name))]


def _places(name: str, holder: Any, key: Any) -> Iterator[Place]:
    value = holder[key]
    if isinstance(value, (dict, list)) and _holds_live_parts(value):
        yield Place(name, holder, key, value, parts=tuple(_keys(value)))
        for part in _keys(value):
            yield from _places(f"{name}.{part}", value, part)
    else:
        yield Place(name, holder, key, value, is_live=_is_live(value) or is_loader(value))


def _keys(value: dict[Any, Any] | list[Any]) -> Iterable[Any]:
    return value if isinstance(value, dict) else range(len(value))


def _named(parts: Iterable[Any]) -> str:
    return ", ".join(map(repr, parts)) or "none"


def entries_of(places: Iterable[Place]) -> Iterator[Entry]:
    """What is saved of each."""
    indices = count()
    for place in places:
        if place.parts is None:
            _refuse_prepared(place)
            yield from _entry(place, indices)


def overlaps_of(entries: Sequence[Entry]) -> dict[int, Overlap]:
    """Those in the values, by id(). What is trained is none."""
    tensors: dict[int, tuple[str, Tensor, bool]] = {}
    for entry in sorted(entries, key=lambda each: isinstance(each, ValueState)):
        with contextlib.suppress(Unsupported):  # of a part that perhaps nobody wants
            for leaf in entry.leaves(Guard()):
                tensors.setdefault(id(leaf.tensor), (leaf.name, leaf.tensor, False))
            for name, each in entry.tensors().items() if isinstance(entry, ValueState) else ():
                tensors.setdefault(id(each), (name, each, not each.requires_grad))
    found: dict[int, Overlap] = {}
    for other, key in overlapping((key, row[1]) for key, row in tensors.items()):
        if not tensors[key][2]:
            key, other = other, key
        if tensors[key][2]:
            found[key] = Overlap(tensors[key][0], tensors[key][1], *tensors[other])
    return dict(sorted(found.items(), key=lambda row: row[1].name))


def shares_of(
    entries: Iterable[Entry], said: Mapping[str, ByRank], world: World
) -> dict[str, Share]:
    """By part, of what each rank has its own. `said`: by the program. Raises ValueError."""
    known = {each.name: each for each in entries}
    if unknown := sorted(said.keys() - known.keys()):
        raise ValueError(f"by_rank: the state has no parts {unknown}, but {list(known)}")
    for name in said:
        if isinstance(known[name], ModuleState | OptimizerState):
            raise ValueError(
                f"by_rank: {name!r} is a model or an optimizer, whose tensors all ranks have in "
                f"common. Where each rank trains its own, give each a store of its own, and "
                f"alone=True"
            )
    kinds = GeneratorState | LoaderState
    shares = {
        name: Share(world.rank, world.size)
        for name, each in known.items()
        if isinstance(each, kinds) or (isinstance(each, StatefulState) and each.says("is_by_rank"))
    }
    return shares | {name: Share.of(rule, world.rank, world.size) for name, rule in said.items()}


def _entry(place: Place, indices: Iterator[int]) -> Iterator[Entry]:
    name, value = place.name, place.value
    if isinstance(value, nn.Module):
        yield ModuleState(name, value)
    elif isinstance(value, Optimizer):
        optimizer = OptimizerState(name, _with_hooks(name, value), next(indices))
        yield optimizer
        if _has_own_state(value, optimizer.optimizer):
            optimizer.wrapper = type(value).__name__
            yield StatefulState(f"{name}.wrapper", StateByParameter(value))
    elif is_loader(value):
        yield LoaderState(name, value)
        if value.generator is not None:
            # Its own state_dict does not have it.
            yield GeneratorState(f"{name}.generator", value.generator, is_new=True)
    else:
        yield _single(place)


def _single(place: Place) -> Entry:
    name, value = place.name, place.value
    if isinstance(value, GradScaler):
        return ScalerState(name, value)
    if is_generator(value):
        return GeneratorState(name, value)
    if isinstance(value, Streamed) and not isinstance(value, type):
        return StreamState(name, value)
    if isinstance(value, Stateful) and not isinstance(value, type):
        return StatefulState(name, value)
    if isinstance(value, dict) and value.keys() == {"state", "param_groups"}:
        log.warning(
            "%r is what state_dict() of an optimizer returned: it is saved as it stands there, "
            "and restore() gives it to no optimizer. Give the optimizer itself",
            name,
        )
    return ValueState(name, place.holder, place.key)


def _with_hooks(name: str, optimizer: Optimizer) -> Optimizer:
    """The optimizer, or of a wrapper that is none by itself (Accelerate's; Lightning's, though it
    looks like one) what it wraps: that has the state, and its step() calls hooks. Others that look
    like one may have state of their own. Raises Unsupported."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") or _is_lightnings(optimizer):
        wrapped = getattr(optimizer, "optimizer", None)
        if not isinstance(wrapped, Optimizer):
            raise Unsupported(
                f"capturing {name!r}: {type(optimizer).__name__} never called __init__ of "
                f"torch.optim.Optimizer, so no update of it can be held. Give the optimizer that "
                f"it wraps"
            )
        optimizer = wrapped
    return optimizer


def _has_own_state(wrapper: Any, optimizer: Optimizer) -> bool:
    """Whether what was seen through keeps something of each parameter beside the optimizer's own
    state (Lookahead: its slow weights). Accelerate's and Lightning's do not."""
    own = vars(wrapper).get("state")
    return wrapper is not optimizer and isinstance(own, dict) and own is not optimizer.state


def _is_lightnings(optimizer: Optimizer) -> bool:
    """Whether it is a wrapper of Lightning's or Fabric's."""
    packages = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    return not packages.isdisjoint(_LIGHTNINGS) and hasattr(optimizer, "optimizer")


def _refuse_prepared(place: Place) -> None:
    """Raises Unsupported for a loader of Accelerate's, which says that it is of the class that it
    wraps."""
    kind = type(place.value)
    if kind.__module__ == "accelerate.data_loader" and hasattr(place.value, "base_dataloader"):
        raise Unsupported(
            f"capturing {place.name!r}: a loader that Accelerate has prepared does not know its "
            f"epoch, and would resume with other data. Give all that the Accelerator has prepared: "
            f"from everstep.integrations.accelerate import state_of, and state_of(accelerator)"
        )


def _is_live(value: Any) -> bool:
    kinds = (nn.Module, Optimizer, GradScaler, Stateful, Streamed)
    return isinstance(value, kinds) or is_generator(value)


def _holds_live_parts(value: Mapping[Any, Any] | list[Any], depth: int = 0) -> bool:
    """Whether a model, optimizer or other stateful object stands anywhere in it."""
    for item in value.values() if isinstance(value, Mapping) else value:
        if _is_live(item):
            return True
        # One that is nested in itself is refused when it is encoded.
        if isinstance(item, (dict, list)) and depth < 100 and _holds_live_parts(item, depth + 1):
            return True
    return False
