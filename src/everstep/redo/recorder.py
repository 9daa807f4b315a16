"""The redo log's raw material: what each optimizer call consumed, since the last record.

On CUDA a gradient is *copied* at the call, on the stream: a graph's replay may write to it with
nothing to tell. On the CPU it is *held* by reference where it has memory of its own that is new,
because then nobody writes to it any more: zero_grad() lets go of it, and the next backward makes
another. Who writes to a held one all the same is found out when the record is taken, or when it has
been copied; that record comes to nothing, and the gradients of that parameter are copied from then
on. Where a communication hook has compressed a gradient, its compressed form is held.

Between two calls of an optimizer its tensors must not change, or replay would go another way: a
fingerprint is taken after each call, and looked at before the next.
Source: LowDiff (SC 2025), which copies eagerly and does not look.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler

from everstep.errors import Unsupported
from everstep.format.tables import raw_name
from everstep.redo import clipping, compression
from everstep.redo.allowed import Overwritten, part_here
from everstep.redo.ambient import autocast_now, drawn_since, generators_now
from everstep.redo.rolling_digest import RollingDigests, Slice
from everstep.sharding.layout import is_dtensor, local_of
from everstep.sharding.leaves import Leaf
from everstep.sharding.ranked import own_name
from everstep.sharding.redundancy import class_of, inner_of
from everstep.state.fingerprint import Fingerprint
from everstep.state.objects import encode, place_of
from everstep.state.optimizers import OptimizerState

EAGER_TIMES = 3
"""Of each parameter: DDP's bucket views look fresh at step 2, and are reused from step 3 on."""

PREFIX = "@"
"""Of the names of a record's own tensors: see format.manifest.is_own."""

Gradient = tuple[torch.Tensor, torch.Tensor | None]
"""A parameter, and its gradient; None where that was written to in a way that torch does not
count."""

_UPDATES_MAX = 8
_SLACK_BYTES = 64 << 10


@dataclass(slots=True)
class Call:
    """One optimizer call: tensors by their names in the record, and what is said of them."""

    optimizer: OptimizerState
    at: str
    suffix: str = ""
    """Of names of what each rank has for itself."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    held: Fingerprint | None = None
    """Of the gradients that are held by reference, by their names in the record."""
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    is_open: bool = True
    """Until the update is made."""
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters whose gradients it has as they are, by their names in the record; ..."""
    early: Set[str] = frozenset()
    """... those of them that were copied before the call."""

    def sink(self, path: str, tensor: torch.Tensor) -> str:
        """A TensorSink for what each rank has for itself."""
        return self.common(f"{path}{self.suffix}", tensor)

    def common(self, path: str, tensor: torch.Tensor) -> str:
        """A TensorSink: hyperparameters that are tensors (lr on CUDA) change in place."""
        name = f"{self.at}!{path}"
        self.tensors[name] = local_of(tensor).detach().clone()
        return name


class Taken(NamedTuple):
    """What calls consumed: tensors by their names in the record, what is said of each call, and the
    fingerprints of the gradients that are held by reference, from before the updates."""

    tensors: Mapping[str, torch.Tensor]
    calls: Sequence[dict[str, Any]]
    held: Sequence[Fingerprint]


class Recorder:
    """Notes optimizer calls. For the thread that trains."""

    def __init__(
        self,
        optimizers: Sequence[OptimizerState],
        is_full: bool = False,
        rank: int | None = None,
        pre_clip: bool = False,
    ) -> None:
        """`is_full`: look at all bytes instead of a sample, and digest all for the replay: passes
        over the state at each update. `rank`: of several. `pre_clip`: note gradients from before
        clipping, too."""
        self.is_on = False
        """Whether optimizer calls are to be noted."""
        self._recording = clipping.Recording()
        self._pre_clip = pre_clip
        self._rank = rank
        self._optimizers = optimizers
        self._is_full = is_full
        self.only: Set[str] | None = None
        """Names of the parameters whose gradients are noted; None: of all."""
        self.problem: Unsupported | None = None
        """Why what was noted since the last `take` is no record."""
        self._calls: list[Call] = []
        self._noted: Counter[int] = Counter()
        """How often each parameter had a gradient."""
        self._turn = 0
        self._walk: object = None
        """The last one in which the tensors were where their fingerprints had found them."""
        self._copied: set[int] = set()
        """Parameters whose gradients were written to while they were held, or come in memory that
        is used again: they are copied for good."""
        self._last: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """That of each parameter's last gradient. torch keeps a storage's object while anything has
        that."""
        self._fingerprints: dict[int, Fingerprint] = {}
        """Of each optimizer's tensors since its last call; ..."""
        self._at_base: dict[int, Fingerprint] = {}
        """... and of all bytes of its parameters, from a base to the next call."""
        owners = {each.name: each.index for each in optimizers}
        self._rolling = RollingDigests(owners, rank, is_full=is_full)
        self._bytes_max = 0
        self._early: set[int] = set()
        """Optimizers whose update has begun, before their step() is called."""
        self.settle: Callable[[Mapping[str, Gradient]], Set[str]] | None = None
        """Returns which of these are copied as they are now (capture/layerwise.py); None: nobody
        copies them early."""
        self.plain: dict[str, torch.Tensor] = {}
        self.early: Set[str] = frozenset()
        """What calls have under these names, of those that were taken last; `plain` where the
        gradient has the parameter's dtype."""

    def start(self) -> None:
        """Note what comes from now on, from the optimizers' tensors of now: none of them was
        written to since its optimizer's last call."""
        self.stop()
        self.is_on = True
        self._recording.set(True, pre_clip=self._pre_clip)
        parameters = [p for optimizer in self._optimizers for _, _, p, _ in optimizer.parameters()]
        self._bytes_max = _UPDATES_MAX * sum(parameter.nbytes for parameter in parameters)
        for optimizer in self._optimizers:
            self._fingerprints[optimizer.index] = Fingerprint(
                optimizer.tensors(), self._turn, is_full=self._is_full, follows=True
            )
            if not self._is_full:
                leaves = (Leaf(name, parameter) for _, name, parameter, _ in optimizer.parameters())
                self._at_base[optimizer.index] = Fingerprint(leaves, is_full=True)

    def roll(self, step_s: float) -> None:
        """Digest the optimizers' tensors of now from now on, so much at a time that it goes unseen
        beside a step of `step_s`."""
        here = {o.name: [leaf.tensor for leaf in o.here()] for o in self._optimizers}
        self._rolling.set(here, step_s)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing was noted since the last `take`, and nothing has changed."""
        return (
            not self._calls
            and self.problem is None
            and all(map(self._is_untouched, self._optimizers))
        )

    def stop(self) -> None:
        """Note nothing, and forget what was noted: the state is another one now."""
        self.is_on, self._walk = False, None
        self._recording.set(False)
        self.only = None
        self._calls.clear()
        self._fingerprints.clear()
        self._at_base.clear()
        self._early.clear()
        self.problem = None

    def refuse(self, problem: str | Unsupported) -> None:
        """What was noted since the last `take` is no record."""
        self._calls.clear()
        known = problem if isinstance(problem, Unsupported) else Unsupported(problem)
        self.problem = self.problem or known.with_traceback(None)  # which would hold gradients

    def begin_early(self, optimizer: OptimizerState) -> None:
        """Its state changes from here on; its gradients are known when step() is called."""
        if self.is_on:
            self._is_untouched(optimizer, self._at_base.pop(optimizer.index, None))
            self._early.add(optimizer.index)

    def before_step(
        self, optimizer: OptimizerState, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """The gradients are final, the update comes next. `args`, `kwargs`: of step(); a closure is
        {"closure": what it returned}."""
        at_base = self._at_base.pop(optimizer.index, None)
        if self.problem or not self._is_untouched(optimizer, at_base):
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
        call.generators = generators_now()
        self._calls.append(call)
        if sum(tensor.nbytes for call in self._calls for tensor in call.tensors.values()) > (
            self._bytes_max + _SLACK_BYTES
        ):
            self.refuse(f"more than {_UPDATES_MAX} updates came without checkpointer.step()")

    def after_step(self, optimizer: OptimizerState) -> None:
        """The update is made, or enqueued."""
        self._early.discard(optimizer.index)
        call = self._calls[-1] if self._calls else None
        if call is None or not call.is_open or call.optimizer is not optimizer:
            self.refuse(f"an update of {optimizer.name!r} did not call its closure")
        else:
            call.is_open = False
            if drawn := drawn_since(call.generators):
                before = {place_of(torch.device(key)): state for key, state in drawn.items()}
                call.said["generators"] = encode(before, "generators", call.sink)
            call.generators.clear()
        self._turn += 1
        if known := self._fingerprints.get(optimizer.index):
            self._fingerprints[optimizer.index] = known.again(self._turn)

    def take(self, walk: object) -> Taken:
        """What came since the last `take`, which is forgotten here. `walk`: of the state as it is
        now; while it is the same object, nothing of it has moved. Raises Unsupported where it is
        no record."""
        is_same, self._walk = walk is self._walk, walk
        for optimizer in self._optimizers:
            if optimizer.is_graphed:
                self.refuse(f"updates of {optimizer.name!r} may come from a CUDA graph, unseen")
            # Who keeps numbers may keep tensors beside them that no walk has.
            self._is_untouched(optimizer, is_in_place=is_same and not optimizer.keeps_numbers)
        for call in self._calls:
            self._check_held(call)
        if any(call.is_open for call in self._calls):
            self.refuse("an update raised")
        calls, self._calls = self._calls, []
        problem, self.problem = self.problem, None
        if problem:
            raise problem
        if self.settle:
            self.early = frozenset(name for call in calls for name in call.early)
            self.plain = {
                name: parameter
                for call in calls
                for name, parameter in call.plain.items()
                if call.tensors[name].dtype == parameter.dtype
            }
        tensors: dict[str, torch.Tensor] = {}
        for call in calls:
            tensors |= call.tensors
        held = [call.held for call in calls if call.held]
        return Taken(tensors, [call.said for call in calls], held)

    def slices(self) -> list[Slice]:
        """What of the optimizers' tensors, as the calls have left them, is digested next."""
        return self._rolling.next(
            {each.name: self._fingerprints[each.index] for each in self._optimizers}
        )

    def distrust(self, names: Collection[str]) -> None:
        """These gradients, by their names in a record, were written to while that was copied: all
        of their optimizers' are copied at the call from now on, as others will follow them."""
        wanted = {name.partition(".")[2] for name in names}
        for optimizer in self._optimizers if wanted else ():
            parameters = {name: id(parameter) for _, name, parameter, _ in optimizer.parameters()}
            if not wanted.isdisjoint(parameters):
                self._copied.update(parameters.values())

    def _check_held(self, call: Call) -> None:
        """Whether the gradients that it holds are what it consumed."""
        if changed := call.held.changed() if call.held else []:
            self.distrust(changed)
            names = [name.removeprefix(f"{call.at}.") for name in changed[:5]]
            self.refuse(
                Overwritten(
                    f"{', '.join(map(repr, names))} had a gradient that was written to in or "
                    f"after the update of {call.optimizer.name!r}. It is copied from now on"
                )
            )

    def _is_untouched(
        self,
        optimizer: OptimizerState,
        at_base: Fingerprint | None = None,
        *,
        is_in_place: bool = False,
    ) -> bool:
        """Whether its state is as its last call left it, and its parameters are as they were
        `at_base`; else that is the problem."""
        is_early = optimizer.index in self._early
        known = None if is_early else self._fingerprints.get(optimizer.index)
        changed = known.changed(is_in_place=is_in_place) if known else []
        if not changed and at_base:
            changed = at_base.changed()
        if changed:
            self.refuse(
                f"{', '.join(map(repr, changed[:5]))} changed between two calls of "
                f"{optimizer.name!r}, by something else than the optimizer (or by it before it "
                f"called its closure), which no replay repeats"
            )
        return not changed

    def _note_gradients(self, call: Call, must_copy: bool) -> None:
        clips: dict[tuple[int, bool], dict[str, Any]] = {}
        shrunk: dict[str, compression.CompressedGradient] = {}
        parameters = list(call.optimizer.parameters())
        rows = [(name, p, p.grad) for _, name, p, _ in parameters if p.grad is not None]
        known = clipping.origins(parameter for _, parameter, _ in rows)
        if self.settle:
            is_seen = not _is_unscaled(call.optimizer)
            found = {f"{call.at}.{name}": (p, grad if is_seen else None) for name, p, grad in rows}
            call.early = self.settle(found)
        held: list[Leaf] = []
        copied: list[str] = []
        for name, parameter, gradient in rows:
            if self.only is not None and name not in self.only:
                continue
            part = part_here(name, parameter, gradient, call.said["class"])
            self._noted[id(parameter)] += 1
            origin = known.get(id(parameter))
            source = origin.source if origin else None
            if origin and origin.coefficient is not None:
                _note_clip(clips, origin, name, call)
            if isinstance(source, compression.CompressedGradient):
                shrunk[name] = source
                call.tensors |= source.tensors(call.at, name)
            elif isinstance(source, torch.Tensor):  # nobody else writes to it
                key = raw_name(call.at, name) if is_dtensor(source) else f"{call.at}.{name}"
                call.tensors[key] = part_here(name, parameter, source, call.said["class"])
            else:
                key = f"{call.at}.{name}"
                call.tensors[key], call.plain[key] = part.detach(), parameter
                if must_copy or not self._is_fresh(parameter, part):
                    copied += [] if key in call.early else [key]
                else:
                    held += [] if key in call.early else [Leaf(key, gradient)]
            self._last[id(parameter)] = weakref.ref(part.untyped_storage())
        copies = clipping.copies_of([call.tensors[key] for key in copied])
        call.tensors |= dict(zip(copied, copies, strict=True))
        call.held = Fingerprint(held, self._turn) if held else None
        call.early &= call.plain.keys()
        clipping.release(parameter for _, _, parameter, _ in parameters)
        if clips:
            call.said["clips"] = list(clips.values())
        if shrunk:
            call.said["compressed"] = compression.describe(shrunk)

    def _is_fresh(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether a gradient has memory of its own, new and on the CPU, as far as can be told."""
        storage, last = gradient.untyped_storage(), self._last.get(id(parameter))
        if last is not None and last() is storage:
            self._copied.add(id(parameter))
        return (
            gradient.is_cpu
            and not gradient._is_view()
            and storage.nbytes() == gradient.nbytes
            and self._noted[id(parameter)] > EAGER_TIMES
            and id(parameter) not in self._copied
        )


def _note_clip(
    clips: dict[tuple[int, bool], dict[str, Any]], origin: clipping.Origin, name: str, call: Call
) -> None:
    """Gradients that were clipped together share a coefficient."""
    assert origin.coefficient is not None
    group = (id(origin.coefficient), origin.foreach)
    if group not in clips:
        key = call.sink(f"clip.{len(clips)}", origin.coefficient)
        clips[group] = {"coefficient": key, "foreach": origin.foreach, "names": []}
    clips[group]["names"].append(name)


def _scaler_of(optimizer: OptimizerState) -> dict[str, torch.Tensor] | None:
    """What a GradScaler hands to a fused optimizer, which unscales and may skip by itself."""
    inner = inner_of(optimizer.optimizer)
    found = {key: getattr(inner, key, None) for key in ("grad_scale", "found_inf")}
    known = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    return known or None


def _is_unscaled(optimizer: OptimizerState) -> bool:
    """Whether a GradScaler, which makes this call, has divided the gradients by its scale. torch
    does not count that as a write."""
    if told := _scaler_of(optimizer):
        return "grad_scale" not in told
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["self"].is_enabled())
