"""Optimizer state of a parameter that is boxes of several global tensors, out of a checkpoint."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from everstep.errors import Mismatch
from everstep.format.global_tensors import GlobalTensor
from everstep.sharding.layout import local_of
from everstep.sharding.leaves import dtype_name
from everstep.sharding.mapped import Mapped, memory_like
from everstep.state.placement import Placement

DeviceOf = Callable[[str, str, str], torch.device]
"""Where a state tensor goes: of its full name, its parameter's name, its key."""


def place_state(
    placement: Placement,
    optimizer: str,
    name: str,
    parameter: torch.Tensor,
    mapped: Mapped,
    live: Mapping[str, Any],
    device_of: DeviceOf,
) -> dict[str, Any]:
    """The new state entry of a parameter: its own shape where the global tensors' state has theirs,
    else what all of them have, which must be the same."""
    saved, names = placement.saved, mapped.names_here(name, parameter)
    keys = {each: saved.optimizers[optimizer]["state"].get(each, ()) for each in names}
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for own in keys.values() for key in own):
        full = {each: f"{optimizer}.{each}.{key}" for each in names}
        if absent := [each for each in names if full[each] not in saved.tensors]:
            present = next(each for each in names if each not in absent)
            placement.problems.append(
                f"state: {present!r} and {absent[0]!r} are in one parameter, {name!r}, and in the "
                f"checkpoint only the first has {key!r} in {optimizer!r}"
            )
            continue
        entries = {each: saved.tensors[full[each]] for each in names}
        device = device_of(full[names[0]], names[0], key)
        if _follows(entries, parameter, mapped, key):
            found[key] = _boxes(
                placement, optimizer, key, entries, parameter, mapped, live.get(key), device
            )
        else:
            found[key] = _common(placement, full, device)
    plain = (placement.stored(optimizer) or {}).get("state", {})
    values = {each: plain.get(each, {}) for each in names}
    for each in names:
        if repr(values[each]) != repr(values[names[0]]):
            placement.problems.append(
                f"state: {names[0]!r} and {each!r} are in one parameter, {name!r}, and differ in "
                f"what {optimizer!r} keeps of them"
            )
    if names:
        found.update(placement.decode(values[names[0]]))
    return found


def _follows(
    entries: Mapping[str, GlobalTensor], parameter: torch.Tensor, mapped: Mapped, key: str
) -> bool:
    """Whether these have an element for each of their parameters'."""
    shapes = {piece.name: piece.shape for piece in mapped.split(parameter) or ()}
    alike = all(entry.spec.shape == shapes[each] for each, entry in entries.items())
    return alike and not (key == "step" and not any(shapes[each] for each in entries))


def _boxes(
    placement: Placement,
    optimizer: str,
    key: str,
    entries: Mapping[str, GlobalTensor],
    parameter: torch.Tensor,
    mapped: Mapped,
    live: Any,
    device: torch.device,
) -> torch.Tensor:
    dtypes = sorted({entry.spec.dtype for entry in entries.values()})
    if len(dtypes) > 1:
        placement.problems.append(
            f"dtype: {key!r} of {sorted(entries)}, which are in one parameter, has several: "
            f"{dtypes}"
        )
    dtype: torch.dtype = getattr(torch, dtypes[0])
    if not _fits(live, parameter, dtype, device):
        # zeros: padding belongs to no tensor
        live = torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)
    memory = memory_like(parameter, live)
    for piece in mapped.split(parameter) or ():
        full = f"{optimizer}.{piece.name}.{key}"
        if dtype_name(dtype) == entries.get(piece.name, next(iter(entries.values()))).spec.dtype:
            placement.into_box(full, piece.shape, piece.box, piece.of(memory))
    assert isinstance(live, torch.Tensor)
    return live


def _fits(live: Any, parameter: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    if not isinstance(live, torch.Tensor) or (live.dtype, live.device) != (dtype, device):
        return False
    own, other = local_of(parameter), local_of(live)
    same = own.stride() == other.stride() or (own.is_contiguous() and other.is_contiguous())
    return own.shape == other.shape and same


def _common(placement: Placement, full: Mapping[str, str], device: torch.device) -> torch.Tensor:
    """One of several that must be equal: that is known when they have arrived."""
    tensors = {name: placement.new(name, device) for name in full.values()}
    placement.then(partial(_check_equal, tensors))
    return next(iter(tensors.values()))


def _check_equal(tensors: Mapping[str, torch.Tensor]) -> None:
    (first, value), *others = tensors.items()
    for name, other in others:
        if not torch.equal(value.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
            raise Mismatch(
                f"restoring {first!r}: here it is one with {name!r}, and in the checkpoint they "
                f"differ ({value} and {other}). Tensors are filled, optimizers are not restored: "
                f"restore on a layout that has these parameters apart"
            )
