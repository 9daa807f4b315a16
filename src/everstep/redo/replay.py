"""One optimizer call again: the gradients and hyperparameters of then, the optimizer of now.

It is the user's own optimizer, with its own implementation (for-loop, foreach, fused), so that the
result is exact by construction wherever the optimizer is deterministic. All hooks are off, and what
is put around step() on the object is left out: what they did to the gradients is in the record, and
what they do to the weights is not replayed (a run that does so is noticed while it trains).
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from everstep.errors import Corrupt, EverstepError, Mismatch
from everstep.format.boxes import Box
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.tables import TensorEntry, raw_name
from everstep.redo import compression, rolling_digest
from everstep.redo.ambient import autocast_as, autocast_of
from everstep.sharding.layout import is_dtensor, local_of, shards_like, with_local
from everstep.sharding.leaves import Leaf
from everstep.sharding.redundancy import class_of, inner_of, is_same_class, spread_hyperparameters
from everstep.state.objects import PASSING, as_stored, decode
from everstep.state.optimizers import OptimizerState, install
from everstep.state.stateful import check_generator

_OWN_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")

_OF_SCALER = ("grad_scale", "found_inf")
_FORMS = ("cast", "int8", "low rank", "sparse")


_NAMES_MAX = 5
"""Of tensors that an error names."""

_DEPENDS = "An update depends on something that no record holds, or is not the same twice"


class OtherBytes(Corrupt):
    """A replay came to other bytes than the run had after `step`, or raised."""

    def __init__(self, step: int, part: str, seen_by: str, count: int = 1, why: str = "") -> None:
        """`count`: of records up to this one that nothing proves. `why`: what may be the cause."""
        self.step, self.count = step, count
        self.is_lasting = not why
        """Whether it comes of what is stored, and not of this program."""
        unproven = f" Nothing proves the {count} records up to this one." if count > 1 else ""
        super().__init__(
            f"replaying step {step}: {part!r} came to other bytes than the run had after this "
            f"step ({seen_by}).{unproven} {why or _DEPENDS}. Restore a step before that, or its "
            f"base, and use strategy='full'"
        )

    def __reduce__(self) -> tuple[Any, ...]:  # as ranks of DCP tell each other of it
        return Corrupt, self.args


@dataclass(slots=True)
class Comparison:
    """A replay, compared with the run on its own layout and kind of device."""

    is_binding: bool
    """Whether torch and the machine are the run's, too: then other bytes are wrong."""
    rank: int | None = None
    """Which one of several this is."""
    first: int | None = None
    """Elsewhere, the first step after which they were other."""

    def check(
        self,
        step: int,
        part: str,
        digests: Sequence[torch.Tensor],
        leaves: Sequence[Leaf],
        why: str = "",
    ) -> None:
        """Whether a part of the state, of these tensors, has the bytes that the run had after this
        step. `why`: what may be the cause, else. Raises OtherBytes, Corrupt."""
        with as_stored(f"replaying step {step}"):
            found = rolling_digest.differs(digests, leaves)
        if found and self.is_binding:
            count, names = found
            among = f", among them {', '.join(map(repr, names[:_NAMES_MAX]))}" if names else ""
            raise OtherBytes(step, part, f"the digest of 1/{count} of it{among}", count, why)
        if found and self.first is None:
            self.first = step


@dataclass(frozen=True, slots=True)
class Loaded:
    """A record in memory. `tensors`: by their names in the record; `groups`: by optimizer, the
    hyperparameter set of each parameter. `comparison`: where all parameters are of this step after
    it, and can be compared with the run's."""

    step: int
    calls: tuple[Any, ...]
    tensors: Mapping[str, torch.Tensor]
    groups: Mapping[str, Mapping[str, int]]
    comparison: Comparison | None = None


def redo(record: Loaded, optimizers: Mapping[str, OptimizerState]) -> None:
    """Bring parameters and optimizer state from before this record to after it; blocks as long as
    the optimizers do. Gradients are None afterwards, and torch's generators as some update left
    them. Raises Corrupt, Mismatch."""
    for number, said in enumerate(record.calls):
        with as_stored(f"replaying step {record.step}"):
            state = find(record.step, said, optimizers)
            call = _prepare(record, f"@{number}", said, state)
        try:
            _step(state, call)
        except (EverstepError, MemoryError, *PASSING):
            raise
        except Exception as error:
            why = f"Its update raised {error!r}, and depends on something that is not here"
            raise OtherBytes(record.step, state.name, "it raised", why=why) from error
    if comparison := record.comparison:
        known = rolling_digest.known_digests(record.tensors, comparison.rank)
        for name in known.keys() & optimizers.keys():  # the others are of derived parts
            comparison.check(record.step, name, known[name], optimizers[name].here())


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call had beside gradients. `sets`: hyperparameters, by the index of a group here."""

    sets: dict[int, dict[str, Any]]
    args: list[Any]
    kwargs: dict[str, Any]
    scaler: dict[str, torch.Tensor]
    generators: dict[str, torch.Tensor]
    autocast: dict[str, torch.dtype]


def of_rank(said: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """A call as a rank of so many has to make it again. Of another number of ranks: as the first
    one did; generators and digests are those of no rank then."""
    ranks = said.get("ranks")
    if not ranks:
        return dict(said)
    common = {key: value for key, value in said.items() if key != "ranks"}
    if len(ranks) == size:
        return {**common, **ranks[rank]}
    first = {key: value for key, value in ranks[0].items() if key not in ("digest", "generators")}
    return {**common, **first}


def find(
    step: int, said: Mapping[str, Any], optimizers: Mapping[str, OptimizerState]
) -> OptimizerState:
    """The optimizer of a call. Raises Mismatch where it is not there, or of another class."""
    state = optimizers.get(said["optimizer"])
    if state is None:
        raise Mismatch(
            f"replaying step {step}: the state has no {said['optimizer']!r}, whose updates lead "
            f"there. Give it, or restore parts of the step with only="
        )
    kind = class_of(state.optimizer)
    if not is_same_class(kind, said["class"]):
        raise Mismatch(
            f"replaying step {step}: {state.name!r} is a {kind} now, it was a {said['class']}. "
            f"Build the state as it was"
        )
    return state


def _prepare(record: Loaded, at: str, said: Mapping[str, Any], state: OptimizerState) -> _Call:
    """Set gradients and hyperparameters as they were."""

    def tensor(name: str, _: str) -> torch.Tensor:
        return record.tensors[name]

    call = _read(record.step, said, record.groups[said["optimizer"]], state, tensor)
    unlike = compression.by_parameter(said)
    for _, name, parameter, _ in state.parameters():
        own = unlike.get(name, {})
        gradient = compression.gradient_of(record.tensors, at, name, parameter, own)
        if gradient is not None and not compression.has_shape(own):
            gradient = _part_of(parameter, gradient)
        parameter.grad = None if gradient is None else with_local(parameter, gradient)
    for index, values in call.sets.items():
        install(state.optimizer, index, values)
    spread_hyperparameters(state.optimizer)
    gradients = [(parameter, parameter.grad) for _, _, parameter, _ in state.parameters()]
    return replace(
        call,
        args=[_closure(value, gradients) for value in call.args],
        kwargs={key: _closure(value, gradients) for key, value in call.kwargs.items()},
    )


def _part_of(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank has of a gradient that was read whole."""
    if not is_dtensor(parameter):
        return whole
    local = torch.empty_like(local_of(parameter), dtype=whole.dtype, requires_grad=False)
    for box, memory in shards_like(parameter, local)[1]:
        memory.copy_(whole[box.slices_in(Box.whole(tuple(whole.shape)))])
    return local


def check(
    step: int,
    at: str,
    said: Mapping[str, Any],
    groups: Mapping[str, int],
    state: OptimizerState,
    tensors: Mapping[str, TensorEntry],
) -> None:
    """Raises Corrupt where documents say of a call (of prefix `at`) what none can have been: before
    anything of the state is changed. `tensors`: of its record. What an optimizer makes of values
    of the right kinds, only the update itself shows."""

    def tensor(name: str, _: str) -> torch.Tensor:
        spec = tensors[name].spec
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")

    with as_stored(f"replaying step {step}"):
        call = _read(step, said, groups, state, tensor)
        if "cpu" in call.generators:
            check_generator(torch.default_generator, call.generators["cpu"])
        for row in said.get("clips", ()):
            tensor(row["coefficient"], "").reshape(())
        compressed = set()
        for row in said.get("compressed", ()):
            if row["form"] not in _FORMS or row["dtype"] not in ITEM_SIZES:
                raise ValueError(f"{row} is no form of a gradient")
            compressed |= {*row["names"]}
        for _, name, parameter, _ in state.parameters():
            found = tensors.get(f"{at}.{name}", tensors.get(raw_name(at, name)))
            if found is None or name in compressed:
                continue
            if found.spec.shape != tuple(parameter.shape):
                raise ValueError(f"the gradient of {name!r} has the shape {found.spec.shape}")


def _read(
    step: int,
    said: Mapping[str, Any],
    groups: Mapping[str, int],
    state: OptimizerState,
    tensor: Callable[[str, str], torch.Tensor],
) -> _Call:
    """A call, without gradients; closures are as they were stored. Raises Mismatch where a group
    has parameters that had different hyperparameters then."""
    stored, numbers = said["sets"], dict[int, int]()
    for index, name, _, _ in state.parameters():
        one, other = numbers.setdefault(index, groups[name]), groups[name]
        if one != other and repr(stored[one]) != repr(stored[other]):
            raise Mismatch(
                f"replaying step {step}: a group of {state.name!r} has parameters that had "
                f"different hyperparameters then (its groups {sorted((one, other))}). Build the "
                f"state as it was"
            )
    sets = {
        index: {key: decode(value, tensor) for key, value in stored[number].items()}
        for index, number in numbers.items()
    }
    args, kwargs = decode(said.get("arguments", [[], {}]), tensor)
    scaler = decode(said.get("scaler", {}), tensor)
    return _Call(
        sets,
        list(args),
        dict(kwargs),
        {key: scaler[key] for key in _OF_SCALER if key in scaler},
        decode(said.get("generators", {}), tensor),
        autocast_of(said.get("autocast", {})),
    )


def _closure(value: Any, gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> Any:
    """An argument of step(); a closure that returns what the one of then did, and leaves the same
    gradients: an optimizer may let go of those before it calls it."""
    if not (isinstance(value, dict) and value.keys() == {"closure"}):
        return value

    def closure() -> Any:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return value["closure"]

    return closure


def _step(state: OptimizerState, call: _Call) -> None:
    for device, generator in call.generators.items():
        if device == "cpu":
            torch.set_rng_state(generator)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(generator, device)
    optimizer = inner_of(state.optimizer)
    with _without_hooks(optimizer):
        for key, value in call.scaler.items():
            setattr(optimizer, key, value)
        try:
            with autocast_as(call.autocast):
                # Of the class, as what stands in its place on the object (schedulers put something
                # there) was around it then: what that did is in the record.
                type(optimizer).step(optimizer, *call.args, **call.kwargs)
        finally:
            for key in call.scaler:
                delattr(optimizer, key)
            for _, _, parameter, _ in state.parameters():
                parameter.grad = None


@contextlib.contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Its own hooks and those of all optimizers are off within."""
    kept: list[tuple[Any, str, Any]]
    kept = [(optimizer, name, getattr(optimizer, name)) for name in _OWN_HOOKS]
    kept += [(torch_optimizer, name, getattr(torch_optimizer, name)) for name in _GLOBAL_HOOKS]
    try:
        for holder, name, _ in kept:
            setattr(holder, name, OrderedDict())
        yield
    finally:
        for holder, name, hooks in kept:
            setattr(holder, name, hooks)
