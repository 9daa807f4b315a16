"""Clipping as torch does it, bit for bit, that keeps the gradients from before it for a recorder.

Clipping fills the mantissa, so a record packs better with the raw gradient and the coefficient in
it; `scale` makes the clipped gradient of them again. While no recorder is attached, and within the
capture of a CUDA graph, `clip_grad_norm_` is torch's own function and keeps nothing.

What decides how a gradient is scaled while a recorder is attached:

* Nobody else can see the tensor, on a CPU: `p.grad` becomes a new tensor, the old one is the raw
  gradient. One pass over memory, as in torch.
* Others see it (views, as DDP's buckets; references; other parameters), or it is on an
  accelerator, where a CUDA graph may write to its address with nothing to tell: the raw gradient
  is a copy, torch scales in place.
* The device has no memory to spare for copies: torch scales in place, nothing is kept.
* torch's arithmetic could not be repeated from a copy (sparse or DTensor gradients, gaps or
  overlaps in memory, one gradient twice in the list): torch scales in place, nothing is kept.

Everything here runs in the training thread.
"""

import itertools
import sys
import types
import warnings
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import utils as torch_clipping
from torch.utils._foreach_utils import _device_has_foreach_support
from torch.utils.weak import TensorWeakRef

from everstep.state import kept
from everstep.state.graphs import is_capturing
from everstep.state.leaves import sample
from everstep.state.room import has_room

# Where the tensor behind `p.grad` may be replaced. On CUDA it may be a graph's static memory.
_REPLACED_ON = frozenset({"cpu"})


@dataclass(frozen=True, slots=True, eq=False)
class Clipped:
    """A gradient before clipping, and what it was multiplied by.

    `raw`: the gradient's shape, dtype, device and strides; shares no memory with `p.grad`. Whoever
    looked it up may hold it, and must not change it. `coefficient`: 0-d, at most 1 (or NaN), on
    `raw`'s device; its dtype follows the norm's. `foreach`: torch's multi-tensor kernel was used.
    `version`: the gradient's before clipping.
    """

    raw: Tensor
    coefficient: Tensor
    foreach: bool
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """`Clipped` and what tells whether it still holds."""

    clipped: Clipped
    gradient: TensorWeakRef
    version: int
    raw_version: int
    sample: bytes


_entries: MutableMapping[Tensor, _Entry] = kept.by_parameter()


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

    With a recorder attached, `p.grad` may be another tensor object afterwards (see the module),
    and a copy's worth of memory is held until the optimizer's step or the next clipping.
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
    if not kept.is_wanted() or torch.compiler.is_compiling() or is_capturing():
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
    sample, since some edits (`p.grad.data`, NumPy) go around version counters. So None after an
    edit in place, another gradient, a new backward or `release`.

    For the optimizer's step pre-hook; call `release` when done. Does not block or synchronise.
    """
    entry = _entries.get(parameter)
    gradient = parameter.grad
    if entry is None or gradient is None or entry.gradient() is not gradient:
        return None
    raw_changed = entry.clipped.raw._version != entry.raw_version
    changed = gradient._version != entry.version or sample(gradient) != entry.sample
    return None if raw_changed or changed else entry.clipped


def release(parameters: Iterable[Tensor]) -> None:
    """Forget the raw gradients of these parameters; unknown ones are no error.

    A recorder calls it in each step for all parameters of the optimizer, found or not. Else they
    are held until the next clipping of the same parameters, their deletion, or the last `detach`.
    """
    for parameter in parameters:
        _entries.pop(parameter, None)


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
    owners: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """`clip_grad_norm_` for tensors that have gradients; returns the total norm."""
    # Elements of this list are only reached by index: a local name would be one more holder.
    gradients = [owner.grad for owner in owners if owner.grad is not None]
    total_norm = torch_clipping.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    versions = [gradients[index]._version for index in range(len(gradients))]
    replaced, copied = _replaced_and_copied(gradients)
    raws = dict(zip(copied, _copies([gradients[index] for index in copied]), strict=True))
    # First, since it may raise: then, as in torch, part of the gradients is scaled.
    taken = set(replaced)
    rest = [owner for index, owner in enumerate(owners) if index not in taken]
    torch_clipping.clip_grads_with_norm_(rest, max_norm, total_norm, foreach)
    if not raws and not replaced:
        return total_norm  # may be a DTensor: leave it alone

    coefficient = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    for indices in _groups(gradients):
        device = gradients[indices[0]].device
        factor = coefficient.to(device)
        # foreach=True without support has raised in get_total_norm.
        is_foreach = foreach is not False and _device_has_foreach_support(device)
        new = [index for index in indices if index in taken]
        scaled = scale([gradients[index] for index in new], factor, is_foreach)
        for index, gradient in zip(new, scaled, strict=True):
            raws[index] = gradients[index]
            owners[index].grad = gradient
        for index in indices:
            if index in raws:
                clipped = Clipped(raws[index], factor, is_foreach, versions[index])
                _keep(owners[index], clipped)
    return total_norm


def _keep(owner: Tensor, clipped: Clipped) -> None:
    gradient = owner.grad
    assert gradient is not None
    _entries[owner] = _Entry(
        clipped,
        TensorWeakRef(gradient),
        gradient._version,
        clipped.raw._version,
        sample(gradient),
    )


def _replaced_and_copied(gradients: list[Tensor]) -> tuple[list[int], list[int]]:
    """Indices of gradients to replace, and of those to copy. The rest (or all) is left to torch."""
    if torch.is_inference_mode_enabled():
        return [], []  # a new tensor would be one that autograd cannot add to
    if not all(_is_plain(gradient) for gradient in gradients):
        return [], []
    replaced = [index for index in range(len(gradients)) if _is_replaceable(gradients, index)]
    taken = set(replaced)
    rest = [index for index in range(len(gradients)) if index not in taken]
    if _have_overlaps([gradients[index] for index in rest]):
        return [], []  # torch scales shared memory once for each gradient
    copied = [index for index in rest if _is_dense(gradients[index])]
    return replaced, copied if has_room(gradients[index] for index in copied) else []


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


def _is_replaceable(gradients: list[Tensor], index: int) -> bool:
    """Whether nobody but its parameter and `gradients` holds this gradient or its memory."""
    return (
        gradients[index].device.type in _REPLACED_ON
        and not gradients[index].requires_grad  # part of a graph: create_graph
        and gradients[index].untyped_storage().nbytes() == gradients[index].nbytes
        and _is_dense(gradients[index])
        and _HOLDERS_UNSHARED is not None
        and _holders(gradients, index) == _HOLDERS_UNSHARED
    )


def _holders(gradients: list[Tensor], index: int) -> tuple[int, ...]:
    """Counts of what holds it: in Python, in C++; and of what holds its storage: likewise."""
    storage = gradients[index].untyped_storage()
    return (
        sys.getrefcount(gradients[index]),
        gradients[index]._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
    )


def _holders_if_unshared() -> tuple[int, ...] | None:
    """`_holders` of a gradient that nobody else holds: measured, as torch promises no numbers.

    None if this torch cannot tell: then nothing is replaced.
    """
    if not hasattr(Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return None
    owner = torch.zeros(1, device="cpu", requires_grad=True)
    owner.grad = torch.zeros(1, device="cpu")
    return _holders([owner.grad], 0)


_HOLDERS_UNSHARED = _holders_if_unshared()


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
    copies = [torch.empty_like(gradient) for gradient in gradients]
    for indices in _groups(gradients):
        torch._foreach_copy_(
            [copies[index] for index in indices], [gradients[index] for index in indices]
        )
    return copies


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
