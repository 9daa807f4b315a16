"""The redo log's raw material: what each optimizer call consumed, since the last record.

A gradient is *held* by reference where its storage is fresh, because then nobody writes to it any
more: zero_grad() lets go of it, and the next backward makes another. It is *copied* at the call
where that is not sure: the first records, storage that was seen before (zero_grad(set_to_none=
False), DDP's buckets), views, optimizers that were seen to write to gradients, a GradScaler that
unscales inside of the update.

Between two calls of an optimizer its tensors must not change, or replay would go another way: a
tripwire is armed after each call, and looked at before the next.
Source: LowDiff (SC 2025), which copies eagerly and does not look.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from everstep.capture.tripwire import Tripwire, sample_places
from everstep.errors import Unsupported
from everstep.state import clipping
from everstep.state.leaves import Leaf
from everstep.state.objects import encode
from everstep.state.optimizers import OptimizerState

EAGER_RECORDS = 3
"""DDP's bucket views look fresh at step 2, and are used again from step 3 on."""

PREFIX = "@"
"""Of the names of a record's own tensors; nothing else in a state begins so."""


@dataclass(slots=True)
class Call:
    """One optimizer call: tensors by their names in the record, and what is said of them."""

    optimizer: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    gradients: list[tuple[str, torch.Tensor, int, bool]] = field(default_factory=list)
    """Name, tensor, version before the update, whether it is held by reference."""
    is_open: bool = True
    """Until the update is made."""


@dataclass(slots=True)
class _Armed:
    """One optimizer's tensors of one walk, and how they were after its last call."""

    leaves: tuple[Leaf, ...]
    tensors: tuple[torch.Tensor, ...]
    places: list[tuple[int, int, int]]
    tripwire: Tripwire | None = None


class Recorder:
    """Notes optimizer calls. For the thread that trains."""

    def __init__(self, optimizers: Sequence[OptimizerState], audit: bool = False) -> None:
        """`audit`: look at all bytes instead of a sample, and note their digest for the replay; a
        pass over the state before and after each update. Raises Unsupported for an optimizer that
        a log cannot replay."""
        for optimizer in optimizers:
            _check(optimizer)
        self._optimizers = optimizers
        self._audit = audit
        self._digests: dict[int, str] = {}
        self.problem: str | None = None
        """Why what was noted since the last `take` is no record."""
        self._calls: list[Call] = []
        self._taken = 0
        self._writes_gradients = False
        self._seen: dict[int, StorageWeakRef] = {}
        self._armed: dict[int, _Armed] = {}
        self._turn = 0

    def watch(self, owned: Mapping[int, tuple[Leaf, ...]]) -> None:
        """The optimizers' tensors from now on, by the optimizers' index; none of them was written
        to since its optimizer's last call."""
        self._armed = {
            index: _Armed(leaves, tuple(leaf.tensor for leaf in leaves), sample_places(leaves))
            for index, leaves in owned.items()
        }
        for index in self._armed:
            self._arm(index)

    @property
    def pending(self) -> bool:
        """Whether something was noted since the last `take`."""
        return bool(self._calls) or self.problem is not None

    def reset(self) -> None:
        """Forget what was noted: the state is another one now."""
        self._calls.clear()
        self._armed.clear()
        self._digests.clear()
        self.problem = None

    def before_step(self, optimizer: OptimizerState) -> None:
        """The gradients are final, the update comes next."""
        if self.problem or not self._is_untouched(optimizer):
            return
        if self._calls and self._calls[-1].is_open:
            self.problem = f"{optimizer.name!r} ran its closure more than once in a step"
            return
        call = Call(optimizer.name)
        at = f"{PREFIX}{len(self._calls)}"
        kind = type(optimizer.optimizer)
        call.said["optimizer"] = optimizer.name
        call.said["class"] = f"{kind.__module__}.{kind.__qualname__}"
        call.said["sets"] = optimizer.hyperparameters(_into(call, at))
        scaler = _scaler_of(optimizer)
        if scaler:
            call.said["scaler"] = encode(scaler, "scaler", _into(call, at))
        must_copy = bool(scaler) or self._writes_gradients or self._taken < EAGER_RECORDS
        try:
            self._note_gradients(optimizer, call, at, must_copy)
        except Unsupported as error:
            self.problem = str(error)
            return
        self._calls.append(call)

    def after_step(self, optimizer: OptimizerState) -> None:
        """The update is made, or enqueued."""
        if self._calls and self._calls[-1].optimizer == optimizer.name:
            for name, gradient, version, is_held in self._calls[-1].gradients:
                if gradient._version != version:
                    self._writes_gradients = True
                    if is_held:
                        self.problem = f"{optimizer.name!r} wrote to the gradient of {name!r}"
            self._calls[-1].gradients.clear()
            self._calls[-1].is_open = False
        self._arm(optimizer.index)
        if self._audit and self._calls:
            self._calls[-1].said["after"] = self._digests[optimizer.index]

    def take(self) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """The tensors and the calls since the last `take`, which are forgotten here. Raises
        Unsupported where they are no record."""
        for optimizer in self._optimizers:
            self._is_untouched(optimizer)
        calls, self._calls = self._calls, []
        problem, self.problem = self.problem, None
        if problem:
            raise Unsupported(problem)
        self._taken += 1
        tensors = {name: tensor for call in calls for name, tensor in call.tensors.items()}
        return tensors, [call.said for call in calls]

    def _arm(self, index: int) -> None:
        if armed := self._armed.get(index):
            self._turn += 1
            armed.tripwire = Tripwire(armed.leaves, armed.tensors, armed.places, self._turn)
        if self._audit:
            self._digests[index] = self._optimizers[index].digest()

    def _is_untouched(self, optimizer: OptimizerState) -> bool:
        """Whether its tensors are as its last call left them; else that is the problem."""
        armed = self._armed.get(optimizer.index)
        changed = armed.tripwire.changed() if armed and armed.tripwire else []
        known = self._digests.get(optimizer.index)
        if known and not changed and known != optimizer.digest():
            changed = [f"a tensor of {optimizer.name}"]
        if changed and not self.problem:
            self.problem = (
                f"{', '.join(map(repr, changed[:5]))} changed between two calls of "
                f"{optimizer.name!r}, by something else than the optimizer, which no replay repeats"
            )
        return not changed

    def _note_gradients(
        self, optimizer: OptimizerState, call: Call, at: str, must_copy: bool
    ) -> None:
        clips: dict[tuple[int, bool], dict[str, Any]] = {}
        parameters = [parameter for _, _, parameter, _ in optimizer.parameters()]
        for _, name, parameter, _ in optimizer.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            _check_gradient(name, gradient)
            key = f"{at}.{name}"
            clipped = clipping.raw_gradient(parameter)
            if clipped:
                call.tensors[key] = clipped.raw  # nobody else writes to it
                _note_clip(clips, clipped, name, call, at)
            else:
                is_held = not must_copy and self._is_fresh(parameter, gradient)
                kept = gradient.detach()
                call.tensors[key] = kept if is_held else kept.clone()
                call.gradients.append((name, gradient, gradient._version, is_held))
            self._seen[id(parameter)] = StorageWeakRef(gradient.untyped_storage())
        clipping.release(parameters)
        if clips:
            call.said["clips"] = list(clips.values())

    def _is_fresh(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        storage = gradient.untyped_storage()
        if gradient._is_view() or storage.nbytes() != gradient.nbytes:
            return False
        seen = self._seen.get(id(parameter))
        return seen is None or seen.expired() or seen.cdata != storage._cdata


def _note_clip(
    clips: dict[tuple[int, bool], dict[str, Any]],
    clipped: clipping.Clipped,
    name: str,
    call: Call,
    at: str,
) -> None:
    """Gradients that were clipped together share a coefficient."""
    group = (id(clipped.coefficient), clipped.foreach)
    if group not in clips:
        key = f"{at}!clip.{len(clips)}"
        call.tensors[key] = clipped.coefficient.detach().clone()
        clips[group] = {"coefficient": key, "foreach": clipped.foreach, "names": []}
    clips[group]["names"].append(name)


def _into(call: Call, at: str) -> Callable[[str, torch.Tensor], str]:
    """A TensorSink: hyperparameters that are tensors (lr on CUDA) change in place."""

    def sink(path: str, tensor: torch.Tensor) -> str:
        name = f"{at}!{path}"
        call.tensors[name] = tensor.detach().clone()
        return name

    return sink


def _scaler_of(optimizer: OptimizerState) -> dict[str, torch.Tensor] | None:
    """What a GradScaler hands to a fused optimizer, which unscales and may skip by itself."""
    found = {key: getattr(optimizer.optimizer, key, None) for key in ("grad_scale", "found_inf")}
    known = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    return known or None


def _check(optimizer: OptimizerState) -> None:
    if isinstance(optimizer.optimizer, torch.optim.LBFGS):
        raise Unsupported(
            f"recording {optimizer.name!r}: LBFGS runs its closure several times in one step, "
            f"which no record holds. Use strategy='full'"
        )


def _check_gradient(name: str, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise Unsupported(f"the gradient of {name!r} is sparse. Use strategy='full'")
    if type(gradient) is not torch.Tensor:
        raise Unsupported(
            f"the gradient of {name!r} is a {type(gradient).__name__}. Use strategy='full'"
        )
