"""The redo log's raw material: what each optimizer call consumed, since the last record.

A gradient is *held* by reference where its storage is fresh, because then nobody writes to it any
more: zero_grad() lets go of it, and the next backward makes another. So it is with FSDP2's,
which are parts of what a reduce-scatter made, where nobody but gradients has that (`owners`). It is
*copied* at the call where that is not sure: the first records, storage that was seen before
(zero_grad(set_to_none=False), DDP's buckets), other views, optimizers that were seen to write to
gradients, a GradScaler that unscales inside of the update. Where a communication hook has
compressed it, its compressed form is held.

Between two calls of an optimizer its tensors must not change, or replay would go another way: a
tripwire is armed after each call, and looked at before the next.
Source: LowDiff (SC 2025), which copies eagerly and does not look.
"""

import weakref
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from everstep.errors import Unsupported
from everstep.format.tables import raw_name
from everstep.redo import clipping, compression, owners
from everstep.redo.autocast import autocast_now
from everstep.redo.graphs import Pools
from everstep.redo.hashes import Hashes
from everstep.redo.refusals import (
    Lasting,
    Outside,
    check_gradient,
    check_graphs,
    local_gradient,
    part_here,
)
from everstep.redo.samples import updated_name, updated_of
from everstep.redo.watched import Watched, first_that_differs
from everstep.sharding.layout import is_dtensor, local_of
from everstep.sharding.leaves import sample
from everstep.sharding.mapped import Mapped
from everstep.sharding.ranked import own_name
from everstep.sharding.redundancy import class_of, inner_of, takes_part
from everstep.state.attributes import attributes, other_generators
from everstep.state.objects import encode, place_of
from everstep.state.optimizers import OptimizerState
from everstep.state.recorded import check_parts

EAGER_TIMES = 3
"""Of each parameter: DDP's bucket views look fresh at step 2, and are reused from step 3 on."""

PREFIX = "@"
"""Of the names of a record's own tensors: see format.manifest.is_own."""

_UPDATES_MAX = 8
_SLACK_BYTES = 64 << 10


@dataclass(slots=True)
class _Held:
    """A gradient that was noted, and how it was then."""

    parameter: int
    name: str
    gradient: torch.Tensor
    whole: torch.Tensor
    """Of which it is this rank's part, or itself."""
    is_copied: bool
    seen: tuple[int, int, bytes] = (0, 0, b"")

    def look(self) -> bool:
        """Whether it was written to since the last look, as far as versions and a sample tell."""
        before = self.seen
        self.seen = self.whole._version, self.gradient._version, sample(self.gradient)
        return self.seen != before


@dataclass(slots=True)
class Call:
    """One optimizer call: tensors by their names in the record, and what is said of them."""

    optimizer: OptimizerState
    at: str
    suffix: str = ""
    """Of names of what each rank has for itself."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    gradients: list[_Held] = field(default_factory=list)
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    others: tuple[Any, ...] = ()
    """Python's and numpy's, where the update may draw from them."""
    is_open: bool = True
    """Until the update is made."""

    def sink(self, path: str, tensor: torch.Tensor) -> str:
        """A TensorSink for what each rank has for itself."""
        return self.common(f"{path}{self.suffix}", tensor)

    def common(self, path: str, tensor: torch.Tensor) -> str:
        """A TensorSink: hyperparameters that are tensors (lr on CUDA) change in place."""
        name = f"{self.at}!{path}"
        self.tensors[name] = local_of(tensor).detach().clone()
        return name


class Recorder:
    """Notes optimizer calls. For the thread that trains."""

    def __init__(
        self, optimizers: Sequence[OptimizerState], audit: bool = False, rank: int | None = None
    ) -> None:
        """`audit`: look at all bytes instead of a sample, and note their digest for the replay; a
        pass over the state before and after each update. `rank`: of several."""
        self._rank = rank
        self._optimizers = optimizers
        self._audit = audit
        self._hashes: dict[int, Hashes] = {}
        """Of the parameters at a base, by optimizer; not where all is audited at each step."""
        self.only: Set[str] | None = None
        """Names of the parameters whose gradients are noted; None: of all."""
        self.problem: Unsupported | None = None
        """Why what was noted since the last `take` is no record."""
        self._calls: list[Call] = []
        self._noted: Counter[int] = Counter()
        """How often each parameter had a gradient."""
        self._turn = 0
        self._pools = Pools()
        self._writers: set[str] = set()
        """Optimizers that were seen to write to gradients."""
        self._reused: set[int] = set()
        """Parameters whose gradients were seen in memory of an earlier one, or to be written to
        after the update."""
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """The last of each parameter. torch keeps a storage's object while anything has that."""
        self._watched: dict[int, Watched] = {}
        self._attributes: dict[int, dict[str, Any]] = {}
        self.lasting: Lasting | None = None
        """Likewise, of all that is noted from now on."""
        self._bytes_max = 0
        self._has_shared = False

    def watch(self) -> None:
        """The optimizers' tensors of now, from now on: none of them was written to since its
        optimizer's last call."""
        self._watched = {}
        for optimizer in self._optimizers:
            self._watched[optimizer.index] = Watched.of(optimizer)
        parameters = [p for optimizer in self._optimizers for _, _, p, _ in optimizer.parameters()]
        self._bytes_max = _UPDATES_MAX * sum(parameter.nbytes for parameter in parameters)
        self._has_shared = len({id(parameter) for parameter in parameters}) < len(parameters)
        for optimizer in self._optimizers:
            if optimizer.index not in self._attributes:  # else it was noted before, or is a change
                self._attributes[optimizer.index] = attributes(optimizer)
            self._arm(optimizer)
            if not self._audit:
                rows = (
                    (name, local_of(parameter)) for _, name, parameter, _ in optimizer.parameters()
                )
                self._hashes[optimizer.index] = Hashes(rows)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing was noted since the last `take`, and nothing has changed."""
        return (
            not self._calls
            and self.problem is None
            and all(map(self._is_untouched, self._optimizers))
        )

    def reset(self) -> None:
        """Forget what was noted: the state is another one now."""
        self._calls.clear()
        self._watched.clear()
        self._hashes.clear()
        self.problem = None

    def refuse(self, problem: str | Unsupported) -> None:
        """What was noted since the last `take` is no record."""
        self._calls.clear()
        known = problem if isinstance(problem, Unsupported) else Unsupported(problem)
        self.problem = self.problem or known.with_traceback(None)  # which would hold gradients

    def before_step(
        self, optimizer: OptimizerState, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """The gradients are final, the update comes next. `args`, `kwargs`: of step(); a closure is
        {"closure": what it returned}."""
        self._check_attributes(optimizer)
        if self.problem or not self._is_untouched(optimizer) or not self._is_as_at_base(optimizer):
            return
        if any(call.is_open for call in self._calls):
            self.refuse(f"an update of {optimizer.name!r} raised, or ran its closure twice")
            return
        suffix = "" if self._rank is None else own_name("", self._rank)
        call = Call(optimizer, f"{PREFIX}{len(self._calls)}", suffix)
        call.said |= {"optimizer": optimizer.name, "class": class_of(optimizer.optimizer)}
        try:
            call.said["sets"] = optimizer.hyperparameters(call.common)
            if args or kwargs:
                call.said["arguments"] = encode([list(args), dict(kwargs)], "step", call.sink)
            if autocast := autocast_now():
                call.said["autocast"] = autocast
            scaler = _scaler_of(optimizer)
            if scaler:
                call.said["scaler"] = encode(scaler, "scaler", call.sink)
            self._note_gradients(call, must_copy=bool(scaler))
        except Unsupported as error:
            self.refuse(error)
            return
        except torch.OutOfMemoryError:  # the run itself may have enough
            self.refuse(f"there is no device memory for copies of gradients of {optimizer.name!r}")
            return
        call.generators, call.others = _generators(), other_generators(optimizer)
        self._calls.append(call)
        if sum(tensor.nbytes for call in self._calls for tensor in call.tensors.values()) > (
            self._bytes_max + _SLACK_BYTES
        ):
            self.refuse(f"more than {_UPDATES_MAX} updates came without checkpointer.step()")

    def after_step(self, optimizer: OptimizerState) -> None:
        """The update is made, or enqueued."""
        call = self._calls[-1] if self._calls else None
        if call is None or not call.is_open or call.optimizer is not optimizer:
            self.refuse(f"an update of {optimizer.name!r} did not call its closure")
        else:
            self._close(call)
        if (watched := self._watched.get(optimizer.index)) and watched.replaced():
            self._watched[optimizer.index] = Watched.of(optimizer)
        if self._has_shared:
            self._hashes.clear()
        for other in self._optimizers if self._has_shared else (optimizer,):
            self._arm(other)
        if call and self._audit and optimizer.index in self._watched:
            call.said["digest"] = self._watched[optimizer.index].digests[-1][1]

    def made(self) -> set[int]:
        """What the optimizers' last calls left in their state, by id(): an update may put a new
        tensor in the place of the last one (transformers' Adafactor), and so does a replay."""
        return {id(tensor) for each in self._watched.values() for tensor in each.of_state}

    def take(self, step: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """The tensors and the calls since the last `take`, which are forgotten here, and samples of
        what they led to, after `step`. Raises Unsupported where they are no record."""
        check_graphs(self._optimizers)
        for optimizer in self._optimizers:
            if optimizer.is_graphed:
                self.refuse(
                    Outside(f"updates of {optimizer.name!r} may come from a CUDA graph, unseen")
                )
            self._is_untouched(optimizer)
        for call in self._calls:
            self._look_again(call)
        if any(call.is_open for call in self._calls):
            self.refuse("an update raised")
        calls, self._calls = self._calls, []
        problem, self.problem = self.problem, None
        if problem:
            raise problem
        tensors = {name: tensor for call in calls for name, tensor in call.tensors.items()}
        for optimizer in self._optimizers:
            if watched := self._watched.get(optimizer.index):
                name = updated_name(optimizer.name, self._rank)
                tensors[name] = updated_of(watched.parameters, watched.state, step)
        return tensors, [call.said for call in calls]

    def distrust(self, names: Collection[str]) -> None:
        """These gradients, by their names in a record, were written to while that was copied, by
        somebody of whom nothing tells: they are copied from now on."""
        wanted = {name.partition(".")[2] for name in names}
        for optimizer in self._optimizers:
            for _, name, parameter, _ in optimizer.parameters() if wanted else ():
                if name in wanted:
                    self._reused.add(id(parameter))

    def _close(self, call: Call) -> None:
        """What the update did beside updating."""
        call.is_open = False
        optimizer = call.optimizer
        for held in call.gradients:
            if held.look():
                self._writers.add(optimizer.name)
                if not held.is_copied:
                    self.refuse(f"{optimizer.name!r} wrote to the gradient of {held.name!r}")
        after = _generators()
        if drawn := [key for key, state in call.generators.items() if not state.equal(after[key])]:
            before = {place_of(torch.device(key)): call.generators[key] for key in drawn}
            call.said["generators"] = encode(before, "generators", call.sink)
        if call.others != other_generators(optimizer):
            self.refuse(
                f"{optimizer.name!r} draws from python's or numpy's generator, which a replay does "
                f"not (or another thread does meanwhile). Draw from torch's, or use strategy='full'"
            )
        call.generators, call.others = {}, ()
        self._check_attributes(optimizer)

    def _look_again(self, call: Call) -> None:
        """Whether a gradient was written to after its update (a second backward that adds to it,
        zero_grad(set_to_none=False)): such a one is copied from the next time on."""
        for held in call.gradients:
            if held.look():
                self._reused.add(held.parameter)
                if not held.is_copied:
                    self.refuse(f"the gradient of {held.name!r} was written to after the update")
        call.gradients.clear()

    def _arm(self, optimizer: OptimizerState) -> None:
        if watched := self._watched.get(optimizer.index):
            self._turn += 1
            watched.arm(self._turn)
            watched.digests = optimizer.digests() if self._audit else []
            watched.plain = optimizer.plain()

    def _is_untouched(self, optimizer: OptimizerState) -> bool:
        """Whether its state is as its last call left it; else that is the problem."""
        watched = self._watched.get(optimizer.index)
        if watched is None or watched.tripwire is None:
            return True
        changed = watched.tripwire.changed() + watched.moved() + watched.replaced()
        if not changed and watched.plain != optimizer.plain():
            changed = [f"a number in the state of {optimizer.name}"]
        if not changed and self._audit:
            changed = first_that_differs(watched.digests, optimizer.digests())
        return self._refuse_changed(optimizer, changed)

    def _is_as_at_base(self, optimizer: OptimizerState) -> bool:
        """Before the first update after it: whether all of its parameters' bytes are."""
        hashes = self._hashes.pop(optimizer.index, None)
        return hashes is None or self._refuse_changed(optimizer, hashes.changed())

    def _refuse_changed(self, optimizer: OptimizerState, changed: list[str]) -> bool:
        """Whether there is nothing to refuse."""
        if changed:
            self.refuse(
                Outside(
                    f"{', '.join(map(repr, changed[:5]))} changed between two calls of "
                    f"{optimizer.name!r}, by something else than the optimizer (or by it before "
                    f"it called its closure), which no replay repeats"
                )
            )
        return not changed

    def _check_attributes(self, optimizer: OptimizerState) -> None:
        """A replay has those of a new optimizer."""
        now = attributes(optimizer)
        known = self._attributes.get(optimizer.index, now)
        self._attributes[optimizer.index] = now
        if changed := sorted(key for key in now | known if now.get(key) != known.get(key)):
            self.lasting = Lasting(
                f"{optimizer.name!r} keeps {', '.join(map(repr, changed))} in an attribute, which "
                f"is in no checkpoint. Keep it in its `state` or its groups, or use "
                f"strategy='full'"
            )
            self.refuse(self.lasting)

    def _note_gradients(self, call: Call, must_copy: bool) -> None:
        clips: dict[tuple[int, bool], dict[str, Any]] = {}
        shrunk: dict[str, compression.CompressedGradient] = {}
        parameters = list(call.optimizer.parameters())
        rows = _rows(call.optimizer, parameters)
        known = _origins(rows, call.optimizer.mapped)
        must_copy |= call.optimizer.name in self._writers
        on_cuda = {row.gradient.device for row in rows if row.gradient.is_cuda}
        must_copy |= self._pools.are_apart(on_cuda)  # a graph's replay writes there, unseen
        in_buffers = set() if must_copy else self._unshared(rows)
        for name, parameter, gradient in rows:
            check_gradient(name, gradient)
            if self.only is not None and name not in self.only:
                continue
            part = part_here(name, parameter, gradient, call.said["class"])
            self._noted[id(parameter)] += 1
            origin = known.get(id(parameter))
            source = origin.source if origin else None
            if origin and origin.coefficient is not None:
                _note_clip(clips, origin.coefficient, origin.foreach, name, call)
            if isinstance(source, compression.CompressedGradient):
                shrunk[name] = source
                call.tensors |= source.tensors(call.at, name)
            elif isinstance(source, torch.Tensor):  # nobody else writes to it
                key = raw_name(call.at, name) if is_dtensor(source) else f"{call.at}.{name}"
                call.tensors[key] = local_gradient(name, parameter, source)
            else:
                copies = must_copy or not self._is_fresh(parameter, part, in_buffers)
                _hold(call, name, parameter, gradient, part, copies)
            self._seen[id(parameter)] = weakref.ref(part.untyped_storage())
        updated = [parameter for _, _, parameter, _ in parameters]
        clipping.release(updated)
        check_parts(call.optimizer, {held.name: held.gradient for held in call.gradients})
        if clips:
            call.said["clips"] = list(clips.values())
        if shrunk:
            call.said["compressed"] = compression.describe(shrunk)

    def _unshared(self, rows: "Sequence[_Row]") -> set[int]:
        """The storages of DTensors' gradients that nobody has but gradients and what is noted."""
        if not any(is_dtensor(row.gradient) for row in rows):
            return set()
        parameters = (p for each in self._optimizers for _, _, p, _ in each.parameters())
        noted = (tensor for call in self._calls for tensor in call.tensors.values())
        return owners.unshared_parts(parameters, noted)

    def _is_fresh(
        self, parameter: torch.Tensor, gradient: torch.Tensor, in_buffers: Container[int]
    ) -> bool:
        storage = gradient.untyped_storage()
        seen = self._seen.get(id(parameter))
        if seen is not None and seen() is storage:
            self._reused.add(id(parameter))  # also when a restore, say, has let go of that memory
        is_all = not gradient._is_view() and storage.nbytes() == gradient.nbytes
        if not is_all and storage._cdata not in in_buffers:
            return False
        return id(parameter) not in self._reused and self._noted[id(parameter)] > EAGER_TIMES


class _Row(NamedTuple):
    """A parameter that a call updates."""

    name: str
    parameter: torch.Tensor
    gradient: torch.Tensor


def _rows(
    optimizer: OptimizerState, parameters: Iterable[tuple[int, str, torch.Tensor, bool]]
) -> list[_Row]:
    return [
        _Row(name, parameter, gradient)
        for _, name, parameter, _ in parameters
        if takes_part(optimizer.optimizer, parameter)
        if (gradient := parameter.grad) is not None
    ]


def _hold(
    call: Call,
    name: str,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    part: torch.Tensor,
    copies: bool,
) -> None:
    """Note a gradient, of which this rank has that part, as it is: a copy, or by reference."""
    kept = part.detach()
    call.tensors[f"{call.at}.{name}"] = kept.clone() if copies else kept
    held = _Held(id(parameter), name, part, gradient, copies)
    held.look()
    call.gradients.append(held)


def _origins(rows: Sequence[_Row], mapped: Mapped) -> Mapping[int, clipping.Origin]:
    """What gradients were made of, by id() of the parameter. Of what is boxes of other tensors the
    gradient itself is noted: nobody could tell how each rank's boxes of them were made."""
    return clipping.origins(row.parameter for row in rows if mapped.split(row.parameter) is None)


def _generators() -> dict[str, torch.Tensor]:
    """The states of torch's generators, to see whether an update draws from them."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        on_gpus = enumerate(torch.cuda.get_rng_state_all())
        states |= {f"cuda:{index}": state for index, state in on_gpus}
    return states


def _note_clip(
    clips: dict[tuple[int, bool], dict[str, Any]],
    coefficient: torch.Tensor,
    foreach: bool,
    name: str,
    call: Call,
) -> None:
    """Gradients that were clipped together share a coefficient."""
    group = (id(coefficient), foreach)
    if group not in clips:
        key = call.sink(f"clip.{len(clips)}", coefficient)
        clips[group] = {"coefficient": key, "foreach": foreach, "names": []}
    clips[group]["names"].append(name)


def _scaler_of(optimizer: OptimizerState) -> dict[str, torch.Tensor] | None:
    """What a GradScaler hands to a fused optimizer, which unscales and may skip by itself."""
    inner = inner_of(optimizer.optimizer)
    found = {key: getattr(inner, key, None) for key in ("grad_scale", "found_inf")}
    known = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    return known or None
