"""Clipping as torch does it, bit for bit, that keeps the gradients from before it for a recorder.

Clipping fills the mantissa, so a record packs better with the raw gradient and the coefficient in
it; `scale` makes the clipped gradient of them again. While no recorder wants that, and within the
capture of a CUDA graph, `clip_grad_norm_` is torch's own function and keeps nothing.

What decides how a gradient is scaled while a recorder wants it:

* Nobody else can see the tensor, on a CPU: `p.grad` becomes a new tensor, the old one is the raw
  gradient. One pass over memory, as in torch. So it is with FSDP2's, which lie in one buffer that
  nobody else has (`owners`).
* Others see it (views, as DDP's buckets; references; other parameters), or it is on an
  accelerator, where a CUDA graph may write to its address with nothing to tell: the raw gradient
  is a copy, torch scales in place.
* The device has no memory to spare for copies: torch scales in place, nothing is kept.
* torch's arithmetic could not be repeated from a copy (sparse gradients, gaps or overlaps in
  memory, one gradient twice in the list, DTensors beside others): torch scales in place, nothing
  is kept.

Of DTensors the norm is torch's, with its collectives; then each rank scales what it has, as torch
does. What is kept makes no difference to what is communicated.

Everything here runs in the training thread.
"""

import ctypes
import itertools
import types
import warnings
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.nn import utils as torch_clipping
from torch.utils._foreach_utils import _has_foreach_support

from everstep.redo import kept, owners
from everstep.redo.graphs import is_capturing
from everstep.redo.room import has_room
from everstep.sharding.layout import (
    has_known_placements,
    is_dtensor,
    local_of,
    replicated,
    with_local,
)
from everstep.sharding.leaves import sample


class Clipped(NamedTuple):
    """A gradient before clipping, and what it was multiplied by.

    `raw`: the gradient's shape, dtype, device and strides, a DTensor if that is one; shares no
    memory with `p.grad`. Whoever looked it up may hold it, and must not change it. `coefficient`:
    0-d, plain, at most 1 (or NaN), on `raw`'s device; its dtype follows the norm's. `foreach`:
    torch's multi-tensor kernel was used. `version`: the gradient's before clipping.
    """

    raw: Tensor
    coefficient: Tensor
    foreach: bool
    version: int


_Seen = tuple[int, int, bytes]
"""Versions, and a sample or a digest of the bytes."""


class _Entry(NamedTuple):
    """`Clipped` and what tells whether it still holds."""

    clipped: Clipped | None
    """None where nobody wanted it any more."""
    gradient: "weakref.ref[Tensor]"
    memory: "weakref.ref[Tensor]"
    """Of a DTensor its local tensor."""
    seen: "_Seen"
    raw_versions: tuple[int, int]
    is_new: bool
    """Whether the gradient is a tensor that clipping made."""


_entries: kept.ByParameter[_Entry] = kept.by_parameter()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients' total norm: torch.nn.utils.clip_grad_norm_, same results bit for bit.

    Returns the total norm before clipping, as torch does: 0-d, on the first gradient's device.
    Raises what torch raises (RuntimeError: not finite with `error_if_nonfinite`; no foreach there).

    While a recorder wants what was before, `p.grad` may be another tensor object afterwards (see
    the module), and a copy's worth of memory is held until the optimizer's step or the next
    clipping.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            message = "`parameters` is an empty generator, no gradient clipping will occur."
            warnings.warn(message, stacklevel=2)  # here: torch would blame this file
    else:
        parameters = list(parameters)
    if not kept.wants_raw() or torch.compiler.is_compiling() or is_capturing():
        _let_go(parameters)
        return torch_clipping.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    release(parameters)
    owners = [parameter for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():
        return _clip_and_keep(owners, max_norm, norm_type, error_if_nonfinite, foreach)


def raw_gradient(parameter: Tensor) -> Clipped | None:
    """What `parameter.grad` was before clipping; None unless it is still what clipping made.

    Still: the same tensor object at the same version, and on a CPU with the same bytes in a small
    sample (of a DTensor in all of it), since some edits (`p.grad.data`, NumPy) go around version
    counters. So None after an edit in place, another gradient, a new backward or `release`.

    For the optimizer's step pre-hook; call `release` when done. Does not block or synchronise.
    """
    entry = _entries.get(parameter)
    gradient = parameter.grad
    if entry is None or entry.clipped is None or gradient is None:
        return None
    if entry.gradient() is not gradient or entry.memory() is not local_of(gradient):
        return None
    raw = entry.clipped.raw
    if _look(gradient) == entry.seen and _versions(raw) == entry.raw_versions:
        return entry.clipped
    if is_dtensor(gradient):  # whoever does that does it again, and perhaps not on all ranks
        kept.give_up_parts()
    return None


def has_replaced(parameter: Tensor) -> bool:
    """Whether clipping made its gradient a new tensor since `release`, whatever became of that: it
    looks fresh, also where zero_grad(set_to_none=False) will write to it."""
    entry = _entries.get(parameter)
    return entry is not None and entry.is_new


def release(parameters: Iterable[Tensor]) -> None:
    """Forget the raw gradients of these parameters; unknown ones are no error.

    A recorder calls it in each step for all parameters of the optimizer, found or not. Else they
    are held until the next clipping of the same parameters, their deletion, or the last `detach`.
    """
    for parameter in parameters if _entries else ():
        _entries.discard(parameter)


def _let_go(parameters: Iterable[Tensor]) -> None:
    """Hold their raw gradients no longer; `has_replaced` stays as it is."""
    for parameter in parameters if _entries else ():
        if entry := _entries.get(parameter):
            _entries[parameter] = entry._replace(clipped=None)


def scale(raw: Sequence[Tensor], coefficient: Tensor, foreach: bool) -> list[Tensor]:
    """Multiply as clipping did: new tensors of the same dtypes, devices and strides.

    `coefficient` (0-d) is moved to each tensor's device first; `raw` is not changed. The bytes are
    those of clipping if device, strides and torch build are the same (only NaN bits of bfloat16
    depend on strides and the number of threads). Any device and dtype may be in `raw`.
    """
    scaled = list(raw)
    with torch.no_grad():
        for indices in _groups(raw):
            group = [raw[index] for index in indices]
            factor = coefficient.to(group[0].device)
            if foreach:
                products = list(torch._foreach_mul(group, factor))
            else:
                products = [torch.mul(gradient, factor) for gradient in group]
            for index, product in zip(indices, products, strict=True):
                scaled[index] = _in_form_of(raw[index], product)
    return scaled


def scale_in_place(raw: Sequence[Tensor], coefficient: Tensor, foreach: bool) -> None:
    """As `scale`, where nobody needs `raw` any more: to the same bytes, without new memory."""
    with torch.no_grad():
        for indices in _groups(raw):
            group = [raw[index] for index in indices]
            factor = coefficient.to(group[0].device)
            if foreach:
                torch._foreach_mul_(group, factor)
            else:
                for gradient in group:
                    gradient.mul_(factor)


def _clip_and_keep(
    holders: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """`clip_grad_norm_` for tensors that have gradients; returns the total norm."""
    # Elements of this list are only reached by index: a local name would be one more holder.
    gradients = [owner.grad for owner in holders if owner.grad is not None]
    total_norm = torch_clipping.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    versions = [local_of(gradients[index])._version for index in range(len(gradients))]
    norm = replicated(total_norm)  # else torch reduces as it multiplies (norm_type=inf)
    replaced, copied = _replaced_and_copied(gradients) if norm is not None else ([], [])
    raws = dict(zip(copied, _copies([gradients[index] for index in copied]), strict=True))
    # First, since it may raise: then, as in torch, part of the gradients is scaled.
    taken = set(replaced)
    rest = [owner for index, owner in enumerate(holders) if index not in taken]
    torch_clipping.clip_grads_with_norm_(rest, max_norm, total_norm, foreach)
    if norm is None or not (raws or replaced):
        return total_norm

    coefficient = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    for indices in _groups(gradients):
        device = gradients[indices[0]].device
        factor = coefficient.to(device)
        # foreach=True without support has raised in get_total_norm.
        is_foreach = foreach
        if is_foreach is None:
            is_foreach = _has_foreach_support([gradients[index] for index in indices], device)
        new = [index for index in indices if index in taken]
        scaled = scale([local_of(gradients[index]) for index in new], factor, is_foreach)
        for index, memory in zip(new, scaled, strict=True):
            raws[index] = gradients[index]
            holders[index].grad = with_local(gradients[index], memory)
        for index in indices:
            if index in raws:
                clipped = Clipped(raws[index], factor, is_foreach, versions[index])
                _keep(holders[index], clipped, index in taken)
    return total_norm


def _keep(owner: Tensor, clipped: Clipped, is_new: bool) -> None:
    assert owner.grad is not None
    _entries[owner] = _Entry(
        clipped,
        weakref.ref(owner.grad),
        weakref.ref(local_of(owner.grad)),
        _look(owner.grad),
        _versions(clipped.raw),
        is_new,
    )


def _versions(gradient: Tensor) -> tuple[int, int]:
    """A DTensor counts what is done to it, and not to its memory."""
    return gradient._version, local_of(gradient)._version


def _look(gradient: Tensor) -> _Seen:
    """To see later whether it was written to. On a CPU torch's foreach functions of DTensors count
    nowhere, so that all bytes of these are looked at."""
    memory = local_of(gradient)
    if memory is gradient or not memory.is_cpu:
        return *_versions(gradient), sample(memory)
    size = memory.nbytes
    dense = (ctypes.c_char * size).from_address(memory.data_ptr()) if size else b""
    return *_versions(gradient), xxhash.xxh3_128_digest(dense)


def _replaced_and_copied(gradients: list[Tensor]) -> tuple[list[int], list[int]]:
    """Indices of gradients to replace, and of those to copy. The rest (or all) is left to torch."""
    if torch.is_inference_mode_enabled():
        return [], []  # a new tensor would be one that autograd cannot add to
    if not all(_is_plain(local_of(gradient)) for gradient in gradients):
        return [], []
    are_parts = any(map(is_dtensor, gradients))
    if are_parts and not (kept.takes_parts() and all(map(has_known_placements, gradients))):
        return [], []
    in_buffers = owners.unshared(
        local_of(gradient) for gradient in gradients if is_dtensor(gradient)
    )
    replaced = [
        index for index in range(len(gradients)) if _is_replaceable(gradients, index, in_buffers)
    ]
    taken = set(replaced)
    rest = [index for index in range(len(gradients)) if index not in taken]
    of_buffers = [index for index in replaced if is_dtensor(gradients[index])]
    if _have_overlaps([local_of(gradients[index]) for index in (*rest, *of_buffers)]):
        return [], []  # torch scales shared memory once for each gradient
    copied = [index for index in rest if _is_dense(local_of(gradients[index]))]
    if has_room(local_of(gradients[index]) for index in copied):
        return replaced, copied
    if are_parts:
        kept.give_up_parts()
        return [], []
    return replaced, []


def _is_plain(gradient: Tensor) -> bool:
    """Whether torch's arithmetic on it is known here: no subclass, not sparse, no lazy bits."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and not gradient.is_inference()
        and not gradient.is_conj()
        and not gradient.is_neg()
    )


def _is_dense(gradient: Tensor) -> bool:
    """Whether a new tensor can have its strides: each byte of its memory is one of its own."""
    return (
        gradient.is_contiguous()
        or torch.empty_like(gradient, device="meta").stride() == gradient.stride()
    )


def _is_replaceable(gradients: list[Tensor], index: int, in_buffers: Container[int]) -> bool:
    """Whether nobody but its parameter and `gradients` holds this gradient or its memory."""
    return (
        gradients[index].is_cpu  # on CUDA it may be a graph's static memory
        and not gradients[index].requires_grad  # part of a graph: create_graph
        and owners.is_unseen(gradients, index)
        and _is_dense(local_of(gradients[index]))
        and (
            owners.is_alone(local_of(gradients[index]))
            or local_of(gradients[index]).untyped_storage()._cdata in in_buffers
        )
    )


def _have_overlaps(gradients: list[Tensor]) -> bool:
    """Whether two of them may share memory; those woven into each other count as well."""
    spans = []
    for gradient in gradients:
        if gradient.numel():
            steps = zip(gradient.shape, gradient.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in steps)
            start = gradient.data_ptr()
            spans.append((str(gradient.device), start, start + extent * gradient.element_size()))
    spans.sort()
    return any(
        here[0] == after[0] and after[1] < here[2] for here, after in itertools.pairwise(spans)
    )


def _copies(gradients: list[Tensor]) -> list[Tensor]:
    """Copies with the same strides, in few kernel launches."""
    memories = [local_of(gradient) for gradient in gradients]
    copies = [torch.empty_like(memory) for memory in memories]
    for indices in _groups(memories):
        torch._foreach_copy_(
            [copies[index] for index in indices], [memories[index] for index in indices]
        )
    return [with_local(gradient, copy) for gradient, copy in zip(gradients, copies, strict=True)]


def _groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices by device and dtype, as torch groups for its multi-tensor kernels."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    return list(groups.values())


def _in_form_of(raw: Tensor, product: Tensor) -> Tensor:
    """`product` with `raw`'s dtype and strides.

    They differ where raw is 0-d too, as then the coefficient's dtype counts: multiplying in place
    rounds the same product to raw's dtype. Strides of axes of size 1 may also differ.
    """
    if product.dtype == raw.dtype and product.stride() == raw.stride():
        return product
    return torch.empty_like(raw).copy_(product)
