"""Clipping as torch does it, and what each gradient was made of, for whoever records it.

A record is smaller where it holds the *origin* of a gradient in its place: what a communication
hook has sent (`compression`), or the gradient from before clipping, whose mantissa is not full yet;
with the coefficient that clipping multiplied it by. `clip_grad_norm_` is torch's own function in
any case: what is noted beside it changes neither the gradients nor what is communicated.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import utils as torch_clipping
from torch.utils._foreach_utils import _has_foreach_support
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from everstep.sharding import layout
from everstep.sharding.leaves import fills_memory
from everstep.state.fingerprint import memory_digest

if TYPE_CHECKING:
    from everstep.redo.compression import CompressedGradient

ROOM_PART = 0.5
"""Of a device's free memory, the most that copies of gradients may take: training comes first."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What a gradient was made of.

    `source`: what was sent of it, or the gradient from before clipping: a copy of its shape, dtype,
    device and strides, a DTensor if that is one. Nobody may change it. `coefficient`: 0-d, plain,
    on the gradient's device, by which clipping has multiplied it; None: it was not clipped.
    `foreach`: by torch's multi-tensor kernel.
    """

    source: "Tensor | CompressedGradient"
    coefficient: Tensor | None = None
    foreach: bool = False
    clipped: TensorWeakRef | None = None
    look: tuple[int, int, bytes] = (0, 0, b"")
    """Of the gradient from before: what clipping made of it, and how that looked."""


_origins = WeakTensorKeyDictionary()
_recordings: "weakref.WeakKeyDictionary[Recording, bool]" = weakref.WeakKeyDictionary()


class Recording:
    """One recorder's wish that origins are noted. Nothing is noted while nobody has it."""

    def set(self, is_on: bool, pre_clip: bool = False) -> None:
        """Note origins from now on, or not. `pre_clip`: gradients from before clipping, too, where
        the device has room for copies. What was noted is forgotten when the last one is off."""
        if is_on:
            _recordings[self] = pre_clip
        elif _recordings.pop(self, None) is not None and not _recordings:
            _origins.clear()


def is_recording() -> bool:
    """Whether origins are of use: somebody records, and what is called now is done now."""
    return bool(_recordings) and not torch.compiler.is_compiling() and not is_capturing()


def note(parameter: Tensor, sent: "CompressedGradient") -> None:
    """A hook has made this parameter's gradient of that. For threads of the backward pass."""
    _origins[parameter] = Origin(sent)


def origins(parameters: Iterable[Tensor]) -> dict[int, Origin]:
    """Returns by id() of the parameter what its gradient was made of, if it is still just that.

    All of what was sent is compared, which waits for its device. A gradient from before clipping
    counts as long as the clipped one has the same version and, on a CPU, the same digest, since
    much there is written to without a count. For the optimizer's step pre-hook; call `release`
    when done.
    """
    found: dict[int, Origin] = {}
    pending: dict[int, Tensor] = {}
    for parameter in parameters if _origins else ():
        origin, gradient = _origins.get(parameter), parameter.grad
        if origin is None or gradient is None:
            continue
        if origin.clipped is None:
            made = origin.source.makes(gradient, origin.coefficient, origin.foreach)
            found[id(parameter)], pending[id(parameter)] = origin, made
        elif origin.clipped() is gradient and _look(gradient) == origin.look:
            found[id(parameter)] = origin
    first = next(iter(pending.values()), None)  # all of them are waited for at once
    flags = [flag.to(first.device) for flag in pending.values()] if first is not None else []
    for key, is_made in zip(pending, torch.stack(flags).tolist() if flags else (), strict=True):
        if not is_made:
            del found[key]
    return found


def release(parameters: Iterable[Tensor]) -> None:
    """Forget the origins of these parameters' gradients; unknown ones are no error. A recorder does
    so in each step for all parameters of the optimizer, found or not."""
    for parameter in parameters if _origins else ():
        _origins.pop(parameter, None)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients' total norm: calls torch.nn.utils.clip_grad_norm_, and returns the norm
    before clipping. A log with `pre_clip` holds a copy of each gradient until the update."""
    rest = norm_type, error_if_nonfinite, foreach
    if not is_recording():
        return torch_clipping.clip_grad_norm_(parameters, max_norm, *rest)
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    holders = [parameter for parameter in listed if parameter.grad is not None]
    copies = _copies(holders) if any(_recordings.values()) else {}
    # Of a generator that is empty torch warns.
    norm = torch_clipping.clip_grad_norm_(listed or parameters, max_norm, *rest)
    if copies or _origins:
        _note_clipped(holders, copies, max_norm, norm, foreach)
    return norm


def scale_in_place(raw: Sequence[Tensor], coefficient: Tensor, foreach: bool) -> None:
    """Multiply as clipping did. The bytes are those of clipping if device, strides and torch build
    are the same (only NaN bits of bfloat16 depend on strides and the number of threads). Any
    devices and dtypes may be in `raw`."""
    with torch.no_grad():
        for indices in _groups(raw):
            group = [raw[index] for index in indices]
            factor = coefficient.to(group[0].device)
            if foreach:
                torch._foreach_mul_(group, factor)
            else:
                for gradient in group:
                    gradient.mul_(factor)


def has_room(tensors: Iterable[Tensor]) -> bool:
    """Whether their devices have memory to spare for copies: what nobody has, and what torch keeps
    for later. Host memory is not looked at. Asks the driver, and waits for no kernel."""
    sizes: Counter[torch.device] = Counter()
    for tensor in tensors:
        sizes[tensor.device] += tensor.nbytes if tensor.is_cuda else 0
    for device in +sizes:
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        if sizes[device] > ROOM_PART * (free - torch.cuda.memory_allocated(device)):
            return False
    return True


def copies_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Copies with the same strides, in few kernel launches."""
    copies = [torch.empty_like(gradient) for gradient in gradients]
    if copies:
        torch._foreach_copy_(copies, list(gradients))
    return copies


def _copies(holders: Sequence[Tensor]) -> dict[int, Tensor]:
    """Returns gradients as they are now, by index: those of which nothing was sent, and whose
    arithmetic can be repeated from a copy. None where two are one, which torch scales twice."""
    gradients = {
        index: parameter.grad
        for index, parameter in enumerate(holders)
        if parameter.grad is not None
        and _is_repeatable(parameter.grad)
        and ((known := _origins.get(parameter)) is None or known.coefficient is not None)
    }
    memories = [layout.local_of(gradient).detach() for gradient in gradients.values()]
    places = [memory.data_ptr() for memory in memories if memory.numel()]
    is_one_twice = len(set(places)) < len(places)
    if not memories or is_one_twice or torch.is_inference_mode_enabled() or not has_room(memories):
        return {}
    rows = zip(gradients.items(), copies_of(memories), strict=True)
    return {index: layout.with_local(gradient, copy) for (index, gradient), copy in rows}


def _is_repeatable(gradient: Tensor) -> bool:
    """Not a subclass's, sparse or with lazy bits, nor with gaps; of DTensors those that say which
    elements are here."""
    memory = layout.local_of(gradient)
    if layout.is_dtensor(gradient) and any(each.is_partial() for each in gradient.placements):
        return False
    return (
        type(memory) is Tensor
        and memory.layout is torch.strided
        and not (memory.is_inference() or memory.is_conj() or memory.is_neg())
        and fills_memory(memory)
    )


def _note_clipped(
    holders: Sequence[Tensor],
    copies: Mapping[int, Tensor],
    max_norm: float,
    norm: Tensor,
    foreach: bool | None,
) -> None:
    """Note by what these were multiplied, as torch comes to it."""
    if layout.is_dtensor(norm) and not all(each.is_replicate() for each in norm.placements):
        return  # torch reduces as it multiplies (norm_type=inf)
    norm_here = layout.local_of(norm).detach()
    coefficient = torch.clamp(float(max_norm) / (norm_here + 1e-6), max=1.0)
    gradients = [parameter.grad for parameter in holders if parameter.grad is not None]
    for group in _groups(gradients):
        device = gradients[group[0]].device
        factor, is_foreach = coefficient.to(device), foreach
        if is_foreach is None:
            is_foreach = _has_foreach_support([gradients[index] for index in group], device)
        for index in group:
            parameter, gradient = holders[index], gradients[index]
            known = _origins.pop(parameter, None)
            if index in copies:
                clipped = TensorWeakRef(gradient)
                _origins[parameter] = Origin(
                    copies[index], factor, is_foreach, clipped, _look(gradient)
                )
            elif known is not None and known.coefficient is None:
                _origins[parameter] = replace(known, coefficient=factor, foreach=is_foreach)


def _look(gradient: Tensor) -> tuple[int, int, bytes]:
    """A DTensor counts what is done to it, and not to its memory."""
    memory = layout.local_of(gradient)
    return gradient._version, memory._version, memory_digest(memory) if memory.is_cpu else b""


def _groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices by device and dtype, as torch groups for its multi-tensor kernels."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    return list(groups.values())


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph: what is called is not done
    now, but at each replay, which writes to the same memory with no Python, and with nothing that
    counts a version."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
