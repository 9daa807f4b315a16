"""Owners of a gradient's memory: does anybody but its parameter see it?

FSDP2 makes the gradients of a module in one buffer, the output of a reduce-scatter, a new one in
each backward. When it is done, what is left of the buffer are the gradients, which are views, and
the tensor that they are views of. So memory is *unshared* where its storage has as many owners as
are known, and nobody else holds that tensor.

How many owners an unshared one has is measured here, as torch promises no numbers.
"""

import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from everstep.sharding.layout import is_dtensor, local_of


def is_unseen(gradients: Sequence[Tensor], index: int) -> bool:
    """Whether only its parameter and this list hold the tensor object, and of a DTensor nobody else
    its local tensor. Others may have the memory."""
    if _UNSEEN is None or _holders(gradients, index) != _UNSEEN:
        return False
    return not is_dtensor(gradients[index]) or _local_holders(gradients[index]) == _UNSEEN_LOCAL


def is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor has its memory, and it all of that."""
    return _held(tensor) == _ALONE


def unshared(tensors: Iterable[Tensor]) -> set[int]:
    """The storages (by `_cdata`) that nobody has but these tensors and what they are views of."""
    found: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return {key for key, members in found.items() if _have_it_alone(members)}


def unshared_parts(parameters: Iterable[Tensor], noted: Iterable[Tensor]) -> set[int]:
    """Those of DTensors' gradients, which `noted` may share."""
    gradients = (parameter.grad for parameter in parameters)
    parts = [local_of(each) for each in gradients if each is not None and is_dtensor(each)]
    return unshared((*parts, *noted)) if parts else set()


def _have_it_alone(members: dict[int, Tensor]) -> bool:
    """Whether these, which have one storage, are all that have it."""
    if _VIEWED is None:
        return False
    views = [member for member in members.values() if member._base is not None]
    bases = {id(view._base) for view in views}
    if len(bases) != 1 or bases <= members.keys():  # not as FSDP2 makes them
        return False
    (_, python, storage), (base_python, base) = _held(views[0]), _base_holders(views[0])
    return (python, storage - len(members), base_python, base - len(views)) == _VIEWED


def _holders(gradients: Sequence[Tensor], index: int) -> tuple[int, int]:
    """Counts of what holds a tensor object: in Python, in C++."""
    return sys.getrefcount(gradients[index]), gradients[index]._use_count()  # type: ignore[attr-defined]


def _local_holders(dtensor: Any) -> tuple[int, int]:
    return sys.getrefcount(dtensor._local_tensor), dtensor._local_tensor._use_count()


def _held(tensor: Tensor) -> tuple[bool, int, int]:
    """Whether it has all of its storage; and counts of what holds that: in Python, in C++."""
    storage = tensor.untyped_storage()
    count = torch._C._storage_Use_Count(storage._cdata)
    return storage.nbytes() == tensor.nbytes, sys.getrefcount(storage), count


def _base_holders(view: Any) -> tuple[int, int]:
    return sys.getrefcount(view._base), view._base._use_count()


def _can_tell() -> bool:
    return hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


def _measure_alone() -> tuple[tuple[int, int], tuple[bool, int, int]] | None:
    """Holders of a gradient and of its storage; None where this torch cannot tell."""
    if not _can_tell():
        return None
    owner = torch.zeros(1, device="cpu", requires_grad=True)
    owner.grad = torch.zeros(1, device="cpu")
    gradients = [owner.grad]
    return _holders(gradients, 0), _held(gradients[0])


def _measure_views() -> tuple[tuple[int, int], tuple[int, int, int, int]] | None:
    """Holders of a local tensor; and of the storage and base of views, less one for each view."""
    if not _can_tell():
        return None
    with torch.no_grad():
        buffer = torch.zeros(2, device="cpu")
        views = [
            SimpleNamespace(_local_tensor=buffer.as_strided((1,), (1,), offset))
            for offset in range(2)
        ]
        del buffer
    local = views[0]._local_tensor
    (_, python, storage), (base_python, base) = _held(local), _base_holders(local)
    return _local_holders(views[1]), (python, storage - 2, base_python, base - 2)


_UNSEEN, _ALONE = _measure_alone() or (None, None)
_UNSEEN_LOCAL, _VIEWED = _measure_views() or (None, None)
