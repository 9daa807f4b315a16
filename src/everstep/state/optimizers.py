"""Optimizers as state: by parameter name, never by group index; exact dtypes; no dummy step.

torch's own load_state_dict casts (fp32 moments of a bf16 parameter become bf16), so entries of
`optimizer.state` are made here as the checkpoint has them, unless the user's class has its own way.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.errors import Mismatch, Unsupported
from everstep.format.tables import TensorEntry
from everstep.sharding.layout import is_dtensor, local_of
from everstep.sharding.leaves import Guard, Leaf, bytes_of, check_tensor
from everstep.sharding.mapped import Mapped, StateOf, lies_like, memory_like
from everstep.sharding.redundancy import (
    fetch_hyperparameters,
    inner_of,
    is_here,
    offloaded_of,
    spread_hyperparameters,
)
from everstep.state.objects import TensorSink, as_stored, encode
from everstep.state.placement import Placement, Saved

_STRUCTURE = ("params", "param_names")
_PARAMETER = "everstep.parameter"
"""With a name, in place of a parameter that is a key in a state_dict of a user's class."""


class OptimizerState:
    """An optimizer under a name of the state. `index` tells its tensors from other optimizers'."""

    def __init__(self, name: str, optimizer: Optimizer, index: int) -> None:
        self.name = name
        self.optimizer = optimizer
        self.index = index
        self.parameter_names: Mapping[int, str] = {}
        self.mapped = Mapped()
        self.has_stepped = False
        """Whether a hook has seen an update."""
        self.was_captured = False
        """Whether a hook has seen one go into a CUDA graph, in place of being made."""
        kind = type(inner_of(optimizer))
        self.has_own_methods = (
            kind.load_state_dict is not Optimizer.load_state_dict
            or kind.state_dict is not Optimizer.state_dict
        )
        """Whether its class says itself what its state is."""
        self.calls_hooks = bool(getattr(type(optimizer).step, "hooked", None))
        """Whether torch calls hooks in its step()."""
        self.wrapper: str | None = None
        """Of what was seen through, and has state of its own beside it: its class."""
        self._keys: dict[str, list[str]] = {}
        self._plain: list[tuple[str, dict[Any, Any], str]] = []
        self._of_parameters = 0
        """How many entries of its state belonged to its parameters at the last walk."""

    @property
    def is_graphed(self) -> bool:
        """Whether updates may come of which no hook tells: those of a CUDA graph, which may be
        older than the hook; or where its class calls none."""
        groups = self.optimizer.param_groups
        may_be_captured = any(group.get("capturable") for group in groups)
        return (
            self.was_captured or not self.calls_hooks or (not self.has_stepped and may_be_captured)
        )

    @property
    def state(self) -> dict[Any, Any]:
        """By parameter, what the optimizer keeps of it (on this rank)."""
        return inner_of(self.optimizer).state

    def parameters(self) -> Iterator[tuple[int, str, torch.Tensor, bool]]:
        """(group index, name, parameter, whether a module gave the name) of every parameter. One
        that is boxes of several tensors has its local name; `mapped` knows theirs."""
        for index, group in enumerate(self.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                known = self.parameter_names.get(id(parameter))
                name = known or f"{self.name}.param_groups.{index}.params.{position}"
                if known is None:
                    name = self.mapped.name_of(name, parameter)
                yield index, name, parameter, known is not None

    def owned(self) -> Iterator[tuple[Leaf, StateOf | None]]:
        """Its parameters, each before the tensors of its state, as far as they are here, whoever
        else may have them."""
        for _, name, parameter, _ in self.parameters():
            yield Leaf(name, parameter, self.index), None
            for key, value in self.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    of = StateOf(self.optimizer, self.name, name, parameter, key)
                    yield Leaf(f"{self.name}.{name}.{key}", value, self.index), of

    def tensors(self) -> Iterator[Leaf]:
        """The same alone."""
        return (leaf for leaf, _ in self.owned())

    def here(self) -> list[Leaf]:
        """What is here of its parameters, and behind them of their state, in an order that is the
        same where the layout is; none of them is boxes of other tensors. No state where its class
        says itself what that is, and may bring it back in another form."""
        found: dict[tuple[bool, str, str], Leaf] = {}
        for leaf, of in self.owned():
            if of is None or not self.has_own_methods:
                place = (True, of.name, str(of.key)) if of else (False, leaf.name, "")
                found[place] = Leaf(leaf.name, local_of(leaf.tensor).detach())
        return [found[place] for place in sorted(found) if found[place].tensor.numel()]

    @property
    def keeps_numbers(self) -> bool:
        """Whether its state holds something beside tensors, or may: its class says what that is."""
        return self.has_own_methods or bool(self._plain)

    def leaves(self, guard: Guard) -> list[Leaf]:
        """State tensors, and parameters that no module holds."""
        found: list[Leaf] = []
        self._keys, self._plain = {}, []
        stateful = {id(each) for _, _, each, _ in self.parameters() if each in self.state}
        self._of_parameters = len(stateful)
        guard.watch_attribute(inner_of(self.optimizer), "state")  # load_state_dict makes new ones
        guard.watch_attribute(self.optimizer, "param_groups")
        guard.watch_size(self.state)
        guard.watch_size(self.optimizer.param_groups)
        for index, group in enumerate(self.optimizer.param_groups):
            guard.watch_part(self.optimizer.param_groups, index)
            guard.watch_part(group, "params")
            guard.watch_size(group["params"])
            for position, parameter in enumerate(group["params"]):
                guard.watch_item(group["params"], position, parameter)
        for _, name, parameter, is_named in self.parameters():
            if not is_named:
                check_tensor(name, parameter)
                found.append(Leaf(name, parameter, self.index))
            if not self.has_own_methods and parameter in self.state:
                guard.watch_part(self.state, parameter)
                found += self._state_leaves(name, parameter, guard)
        return found

    def table(self) -> dict[str, Any]:
        """What the piece table says: each parameter's hyperparameter set,
        its state tensors' keys."""
        groups: dict[str, int] = {}
        for index, name, parameter, _ in self.parameters():
            for each in self.mapped.names(name, parameter):
                if groups.setdefault(each, index) != index:
                    raise Unsupported(
                        f"capturing {self.name!r}: {name!r} is a part of {each!r}, another part of "
                        f"which is in group {groups[each]}, and it in group {index}. Put all parts "
                        f"of a tensor into one group"
                    )
        return {"groups": groups, "state": self._keys}

    def hyperparameters(self, sink: TensorSink) -> list[Any]:
        """One set per group: everything in it but the parameters."""
        fetch_hyperparameters(self.optimizer)
        return [
            {
                key: encode(value, f"{self.name}.param_groups.{index}.{key}", sink)
                for key, value in group.items()
                if key not in _STRUCTURE
            }
            for index, group in enumerate(self.optimizer.param_groups)
        ]

    def objects(self, sink: TensorSink) -> Any:
        """State that is no tensor: counters, lists (LBFGS), whatever is not kept by parameter."""
        if self.has_own_methods:
            if any(self.mapped.split(parameter) for _, _, parameter, _ in self.parameters()):
                raise Unsupported(
                    f"capturing {self.name!r}: {type(self.optimizer).__name__} has a state_dict() "
                    f"of its own, which does not tell what belongs to which of its parameters' "
                    f"boxes. Use another optimizer, or do without layout="
                )
            known = {id(parameter): name for _, name, parameter, _ in self.parameters()}
            state = _with_keys(
                self.optimizer.state_dict(),
                lambda key: (_PARAMETER, known[id(key)]) if id(key) in known else key,
            )
            return {"state_dict": encode(state, f"{self.name}.state_dict", sink)}
        plain: dict[str, dict[Any, Any]] = {}
        for name, state, key in self._plain:
            known = plain.setdefault(name, {}).setdefault(key, state[key])
            if known is not state[key] and repr(known) != repr(state[key]):
                raise Unsupported(
                    f"capturing {self.name!r}: the {key!r} of {name!r} is {plain[name][key]!r} and "
                    f"{state[key]!r}, in different parameters that are parts of it"
                )
        # State of a tensor that is in no group any more has no effect.
        entries = self.state.items() if len(self.state) != self._of_parameters else ()
        other = {key: value for key, value in entries if not isinstance(key, torch.Tensor)}
        if not plain and not other:
            return None
        return {
            "state": {
                name: encode(state, f"{self.name}.{name}", sink) for name, state in plain.items()
            },
            "other": encode(other, f"{self.name}.state", sink),
        }

    def prepare(self, placement: Placement) -> None:
        """Check that parameters and groups fit; new state is installed when its tensors have
        arrived."""
        saved = placement.saved.optimizers.get(self.name)
        if saved is None:
            placement.problems.append(f"missing: the checkpoint has no optimizer {self.name!r}")
            return
        with as_stored(f"restoring {self.name!r}"):
            self._prepare(placement, saved, placement.stored(self.name) or {})

    def _prepare(
        self, placement: Placement, saved: Mapping[str, Any], objects: Mapping[str, Any]
    ) -> None:
        names = {name: parameter for _, name, parameter, _ in self.parameters()}
        known = {each for name, own in names.items() for each in self.mapped.names(name, own)}
        for name in sorted(known - saved["groups"].keys()):
            placement.problems.append(
                f"missing: the checkpoint's {self.name} does not have {name!r}"
            )
        placement.optimized.update((self.name, name) for name in known)
        for _, name, parameter, is_named in self.parameters():
            if not is_named:
                placement.into(name, parameter)
        if "state_dict" in objects:
            keys = {(_PARAMETER, name): parameter for name, parameter in names.items()}
            state_dict = _with_keys(
                placement.decode(objects["state_dict"]), lambda key: keys.get(key, key)
            )
            placement.then(lambda: self.optimizer.load_state_dict(state_dict))
            return
        self._prepare_groups(placement, saved)
        self._prepare_state(placement, objects, names)

    def _state_leaves(self, name: str, parameter: torch.Tensor, guard: Guard) -> list[Leaf]:
        found: list[Leaf] = []
        state, names = self.state[parameter], self.mapped.names(name, parameter, only_here=True)
        guard.watch_size(state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and isinstance(key, str):
                leaf = Leaf(f"{self.name}.{name}.{key}", value, self.index)
                check_tensor(leaf.name, value)
                guard.watch_item(state, key, value)
                found.append(leaf)
                for each in names:
                    known = self._keys.setdefault(each, [])
                    known += [key] if key not in known else []
            else:
                self._plain += [(each, state, key) for each in names]
        return found

    def _prepare_groups(self, placement: Placement, saved: Mapping[str, Any]) -> None:
        sets = placement.saved.manifest.hyperparameters.get(self.name, [])
        members: dict[int, set[int]] = {}
        for index, name, parameter, _ in self.parameters():
            for each in self.mapped.names(name, parameter):
                if each in saved["groups"]:
                    members.setdefault(index, set()).add(saved["groups"][each])
        for index in range(len(self.optimizer.param_groups)):
            chosen = sorted(members.get(index, {index} if index < len(sets) else ()))
            if len({repr(sets[number]) for number in chosen}) > 1:
                placement.problems.append(
                    f"groups: parameters in group {index} of {self.name!r} have different "
                    f"hyperparameters in the checkpoint (its groups {chosen})"
                )
            elif chosen:
                values = {key: placement.decode(value) for key, value in sets[chosen[0]].items()}
                if not values.keys().isdisjoint(_STRUCTURE):
                    raise ValueError(f"{_STRUCTURE} are no hyperparameters")
                placement.then(partial(install, self.optimizer, index, values))
        placement.then(partial(spread_hyperparameters, self.optimizer))

    def _prepare_state(
        self, placement: Placement, objects: Mapping[str, Any], names: Mapping[str, torch.Tensor]
    ) -> None:
        offloaded = offloaded_of(self.optimizer)
        if offloaded:
            offloaded.stop()
        plain = objects.get("state", {})
        new: dict[torch.Tensor, dict[str, Any]] = {}
        for name, parameter in names.items():
            if id(parameter) in placement.settled:
                state = self.state.get(parameter, {})
                # Tensors in its lists, which are in a record, too: a replay has brought them.
                placement.decode(plain.get(name))
            elif is_here(self.optimizer, parameter):
                state = self._state_of(placement, plain, name, parameter)
            else:
                continue
            if state:
                new[parameter] = state
        other = placement.decode(objects.get("other", {}))

        def install() -> None:
            found = self.state
            found.clear()
            for parameter, state in new.items():
                found[parameter] = state
            found.update(other)
            if offloaded:
                offloaded.replaced()

        placement.then(install)

    def _state_of(
        self, placement: Placement, plain: Mapping[str, Any], name: str, parameter: torch.Tensor
    ) -> dict[str, Any]:
        """What is to be kept of a parameter, when its tensors have arrived. Of one that consists of
        boxes: in its own shape where the state of their tensors has theirs, else what all of them
        have, which must be the same. `plain`: by parameter, what is no tensor."""
        saved = placement.saved.optimizers[self.name]
        sets = placement.saved.manifest.hyperparameters.get(self.name, [])
        names = self.mapped.names(name, parameter, only_here=True)
        offloaded = offloaded_of(self.optimizer)
        live = self.state.get(parameter) or (offloaded.room(parameter) if offloaded else {})
        keys = {each: saved["state"].get(each, ()) for each in names}
        state: dict[str, Any] = {}
        for key in dict.fromkeys(key for own in keys.values() for key in own):
            full = {each: f"{self.name}.{each}.{key}" for each in names}
            if absent := [each for each in full.values() if each not in placement.saved.tensors]:
                problem = f"missing: the checkpoint has no tensor {absent[0]!r}"
                placement.problems.append(problem)
                continue
            first = names[0]
            entry, owner = placement.saved.tensors[full[first]], placement.saved.tensors.get(first)
            is_counter = key == "step" and not _counts_on_device(sets[saved["groups"][first]])
            device = _device(entry, owner, parameter.device, is_counter)
            if self.mapped.split(parameter) is None:
                # It has the strides of its parameter of today, if it had those of that of then.
                is_like = is_dtensor(parameter) or not owner or entry.strides == owner.strides
                like = parameter if is_like else None
                state[key] = _destination(placement, full[first], live.get(key), like, device)
                placement.late.add(entry.spec.name)
            elif _follows(placement.saved, full, parameter, self.mapped, key):
                dtype = getattr(torch, entry.spec.dtype)
                state[key] = _like(parameter, live.get(key), dtype, device)
                memory = memory_like(parameter, state[key])
                for piece in self.mapped.split(parameter) or ():
                    each = f"{self.name}.{piece.name}.{key}"
                    placement.into_box(each, piece.shape, piece.box, piece.of(memory))
            else:
                state[key] = _common(placement, full, device)
        values = {each: plain.get(each, {}) for each in names}
        for each, value in values.items():
            if repr(value) != repr(values[names[0]]):
                placement.problems.append(
                    f"state: {names[0]!r} and {each!r} are in one parameter, {name!r}, and differ "
                    f"in what {self.name!r} keeps of them"
                )
        if names:
            state.update(placement.decode(values[names[0]]))
        return state


def _destination(
    placement: Placement, name: str, live: Any, like: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """The live state tensor where it fits exactly, else a new one on `device`, with the strides of
    `like`, its parameter, if it has its shape: torch makes it so, too. None: with its own, in whose
    order its elements are summed up."""
    entry = placement.saved.tensors[name]
    if (shared := placement.made(name)) is not None:
        return shared
    fits = (
        isinstance(live, torch.Tensor)
        and tuple(live.shape) == entry.spec.shape
        and str(live.dtype) == f"torch.{entry.spec.dtype}"
        and live.device == device
        and (like is not None or Leaf(name, live).strides == entry.strides)
    )
    if not fits:
        return placement.new(name, device, like=like)
    assert isinstance(live, torch.Tensor)
    placement.into(name, live)
    placement.note_made(name, live)
    return live


def _with_keys(value: Any, key_of: Callable[[Any], Any]) -> Any:
    """The same dicts and lists with other keys."""
    if isinstance(value, dict):
        made = copy(value)  # an OrderedDict, a defaultdict
        made.clear()
        made.update({key_of(key): _with_keys(each, key_of) for key, each in value.items()})
        return made
    return [_with_keys(each, key_of) for each in value] if type(value) is list else value


class StateByParameter:
    """What an optimizer that wraps another keeps of parameters itself, by their places in its
    groups: its own state_dict() may go by id() (Lookahead)."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """By group and position."""
        state = self._optimizer.state
        return {name: state[p] for name, p in self._places().items() if p in state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place of all that is there."""
        places, found = self._places(), self._optimizer.state
        found.clear()
        found.update({places[name]: value for name, value in state.items()})

    def _places(self) -> dict[str, torch.Tensor]:
        groups = enumerate(self._optimizer.param_groups)
        return {f"{at}.{i}": p for at, group in groups for i, p in enumerate(group["params"])}


def _device(
    entry: TensorEntry, owner: TensorEntry | None, here: torch.device, is_counter: bool
) -> torch.device:
    """Where a state tensor of a parameter (`owner`) goes that is `here` now: there, too, but to the
    CPU what was there while its parameter was not, and what torch counts there."""
    was_apart = owner is not None and owner.device != "cpu"
    return torch.device("cpu") if entry.device == "cpu" and (was_apart or is_counter) else here


def _counts_on_device(hyperparameters: Mapping[str, Any]) -> bool:
    """Whether torch's optimizers want `step` to lie where the parameter does."""
    return any(hyperparameters.get(key) for key in ("capturable", "fused"))


def install(optimizer: Optimizer, index: int, values: dict[str, Any]) -> None:
    """Set a group's hyperparameters; what is neither among them nor a default of the optimizer's
    goes, as in torch's own load_state_dict. A tensor keeps its object, which a captured graph may
    hold."""
    group = optimizer.param_groups[index]
    for key in set(group) - set(values) - set(_STRUCTURE) - set(optimizer.defaults):
        del group[key]
    for key, value in values.items():
        live = group.get(key)
        if (
            isinstance(live, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and (live.shape, live.dtype) == (value.shape, value.dtype)
        ):
            with torch.no_grad():
                live.copy_(value)
        else:
            group[key] = value


def _follows(
    saved: Saved, full: Mapping[str, str], parameter: torch.Tensor, mapped: Mapped, key: str
) -> bool:
    """Whether the state tensors `full` have an element for each of their parameters'."""
    shapes = {piece.name: piece.shape for piece in mapped.split(parameter) or ()}
    alike = all(saved.tensors[name].spec.shape == shapes[each] for each, name in full.items())
    return alike and not (key == "step" and not any(shapes[each] for each in full))


def _like(
    parameter: torch.Tensor, live: Any, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The live state tensor where it lies as the parameter does, else a new one."""
    is_of_kind = isinstance(live, torch.Tensor) and (live.dtype, live.device) == (dtype, device)
    if is_of_kind and lies_like(parameter, live):
        found: torch.Tensor = live
        return found
    # zeros: padding belongs to no tensor
    return torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)


def _common(placement: Placement, full: Mapping[str, str], device: torch.device) -> torch.Tensor:
    """One of several that must be equal: that is known when they have arrived."""
    tensors = {name: placement.new(name, device) for name in full.values()}
    placement.then(partial(_check_equal, tensors))
    return next(iter(tensors.values()))


def _check_equal(tensors: Mapping[str, torch.Tensor]) -> None:
    (first, value), *others = tensors.items()
    for name, other in others:
        if not torch.equal(bytes_of(value), bytes_of(other)):
            raise Mismatch(
                f"restoring {first!r}: here it is one with {name!r}, and in the checkpoint they "
                f"differ ({value} and {other}). Tensors are filled, optimizers are not restored: "
                f"restore on a layout that has these parameters apart"
            )
