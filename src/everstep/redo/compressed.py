"""Which gradients are still what a compressing communication hook made, kept for a recorder.

A gradient counts as compressed only if its form gives it back bit for bit, which is looked at here,
and if nobody has written to it since: torch's version counter and a few elements tell, as a
GradScaler unscales without the counter's knowledge. What is not sure is recorded dense.

Everything here runs in the training thread.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from everstep.redo import kept
from everstep.redo.clipping import Clipped
from everstep.redo.forms import CompressedGradient, flat_of

PROOFS = 3
"""So often is a form compared with all of its gradient; what is the same then stays the same, as
long as neither memory nor shapes change."""

_LOOKS = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A form, and what tells whether its gradient is still that."""

    form: CompressedGradient
    gradient: TensorWeakRef
    version: int
    places: Tensor
    seen: Tensor


_entries: kept.ByParameter[_Entry] = kept.by_parameter(known_by_raw=True)
_proofs: kept.ByParameter[tuple[object, int]] = kept.ByParameter()


def keep(parameter: Tensor, form: CompressedGradient, layout: object, prove: bool) -> None:
    """This is what `parameter.grad` was made of; not kept where it is not, or is not smaller.

    `layout`: what stays equal for as long as the form is made in the same memory. `prove`: compare
    all of it each time, since the gradient may be another one.
    """
    _entries.discard(parameter)
    gradient = parameter.grad
    if gradient is None or not form.fits(gradient) or form.nbytes >= gradient.nbytes:
        return
    known, proofs = _proofs.get(parameter) or (None, 0)
    if prove or known != layout or proofs < PROOFS:
        if not _are_equal(flat_of(form.expand()), flat_of(gradient.detach())):
            _proofs.discard(parameter)
            return
        _proofs[parameter] = layout, proofs + 1 if known == layout else 1
    places = _places(form)
    seen = flat_of(gradient.detach())[places]
    _entries[parameter] = _Entry(form, TensorWeakRef(gradient), gradient._version, places, seen)


def forms_of(
    gradients: Iterable[tuple[Tensor, Clipped | None]],
) -> Mapping[int, CompressedGradient]:
    """By id() of the parameter: the forms of those whose gradient, or what it was before clipping,
    is still what the hook made. Waits for the device where one has such gradients.

    For the optimizer's step pre-hook; call `release` when done. Where one of them was written to
    behind the version counter's back, all may have been: none counts then.
    """
    if not _entries:
        return {}
    found: dict[int, CompressedGradient] = {}
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for parameter, clipped in gradients:
        entry = _entries.get(parameter)
        made = _as_made(parameter, clipped, entry) if entry else None
        if entry is None or made is None:
            continue
        found[id(parameter)] = entry.form
        before, now = groups.setdefault((made.device, made.dtype), ([], []))
        before.append(entry.seen)
        now.append(flat_of(made.detach())[entry.places])
    same = all(_are_equal(torch.cat(before), torch.cat(now)) for before, now in groups.values())
    return found if same else {}


def release(parameters: Iterable[Tensor]) -> None:
    """Forget the forms of these parameters' gradients; unknown ones are no error."""
    for parameter in parameters if _entries else ():
        _entries.discard(parameter)


def _as_made(parameter: Tensor, clipped: Clipped | None, entry: _Entry) -> Tensor | None:
    """The gradient before clipping, where it is the one of the entry, at its version."""
    noted, gradient = entry.gradient(), parameter.grad
    if noted is None or gradient is None:
        return None
    if clipped is None:
        is_same = noted is gradient and gradient._version == entry.version
        return gradient if is_same else None
    is_same = any(noted is tensor for tensor in (clipped.raw, gradient))
    return clipped.raw if is_same and clipped.version == entry.version else None


def _places(form: CompressedGradient) -> Tensor:
    """Of a few elements. Of those that are not zero, where the form knows them: else they would
    look the same after a scaling."""
    places = _spaced(prod(form.shape), form.tensor.device)
    if form.indices is None:
        return places
    return torch.cat([places, form.indices[:, :_LOOKS].reshape(-1).long()])


@cache
def _spaced(count: int, device: torch.device) -> Tensor:
    looks = min(_LOOKS, count)
    return torch.arange(looks, device=device) * (count - 1) // max(1, looks - 1)


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """Bit for bit: nan equals itself, 0.0 differs from -0.0."""
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
