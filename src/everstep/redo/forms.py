"""Compressed forms of a gradient, and what training made of them, bit for bit.

A communication hook leaves less than a dense gradient: numbers of fewer bits, two thin matrices, or
a few elements. Training and replay go through the same `expand`, so that a record may hold the form
in place of what the optimizer consumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from everstep.format.tables import is_dense, raw_name

Kind = Literal["cast", "low rank", "sparse"]


@dataclass(frozen=True, slots=True, eq=False)
class CompressedGradient:
    """A gradient in compressed form. Nobody may change its tensors.

    `tensor`: "cast": the gradient in another dtype, same shape and strides. "low rank": the
    elements of P [rows, rank], then those of Q [columns, rank]. "sparse": values [ranks, count],
    with `indices` of that shape into the gradient's memory. `dtype`, `shape`, `strides`: of the
    gradient, which has neither gaps nor overlaps.
    """

    kind: Kind
    tensor: Tensor
    indices: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.tensor.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def fits(self, gradient: Tensor) -> bool:
        """Whether a gradient of that dtype, shape and strides may come of it."""
        return (
            gradient.dtype == self.dtype
            and tuple(gradient.shape) == self.shape
            and gradient.stride() == self.strides
        )

    def tensors(self, at: str, name: str) -> dict[str, Tensor]:
        """Under their names in a record; `at` is the call's prefix."""
        found = {f"{at}.{name}": self.tensor}
        if self.indices is not None:
            found[_indices_name(at, name)] = self.indices
        return found

    def expand(self) -> Tensor:
        """The gradient: a new tensor."""
        return expand(self.kind, self.tensor, self.indices, self.dtype, self.shape, self.strides)


def expand(
    kind: str,
    tensor: Tensor,
    indices: Tensor | None,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """The gradient of a form, on its device. Raises ValueError, IndexError and RuntimeError for
    what is no form."""
    with torch.no_grad():
        if kind == "cast":
            return tensor.to(dtype)
        if not is_dense(shape, strides):
            raise ValueError(f"a gradient of shape {shape} cannot have {strides=}")
        gradient = torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device)
        flat = flat_of(gradient)
        if kind == "low rank" and flat.numel():
            flat.copy_(product(tensor, shape[0], flat.numel() // shape[0]))
        elif kind == "sparse" and indices is not None:
            scatter(tensor, indices, flat)
        else:
            raise ValueError(f"{kind!r} is no form of a gradient")
        return gradient


def scatter(values: Tensor, indices: Tensor, flat: Tensor) -> None:
    """The mean over ranks of what each of them sent, into `flat`, rank by rank: no element is added
    to twice at a time, so that the sums have one order. `values`, `indices`: [ranks, count]."""
    flat.zero_()
    for row, places in zip(values, indices, strict=True):
        flat.index_add_(0, places, row)
    flat.div_(len(values))


def product(factors: Tensor, rows: int, columns: int) -> Tensor:
    """P times Q transposed, flat, by the kernel that torch's PowerSGD hook uses. Both lie in one
    tensor, the same way wherever this is called, since kernels round by alignment."""
    rank = factors.numel() // (rows + columns)
    p, q = factors.split([rows * rank, columns * rank])
    return torch.bmm(p.view(1, rows, rank), q.view(1, columns, rank).transpose(1, 2)).view(-1)


def flat_of(tensor: Tensor) -> Tensor:
    """A view of its elements in the order of memory; it must have neither gaps nor overlaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def describe(forms: Mapping[str, CompressedGradient]) -> list[dict[str, Any]]:
    """What a record's call says of its compressed gradients, by name of the parameter."""
    groups: dict[tuple[str, torch.dtype], dict[str, Any]] = {}
    for name, form in forms.items():
        dtype = str(form.dtype).removeprefix("torch.")
        group = groups.setdefault(
            (form.kind, form.dtype), {"form": form.kind, "dtype": dtype, "names": []}
        )
        group["names"].append(name)
        if form.kind != "cast" and form.strides != _row_major(form.shape):
            group.setdefault("strides", {})[name] = list(form.strides)
    return list(groups.values())


def by_parameter(said: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Of a call: what it says of each compressed gradient, by name of the parameter."""
    return {name: group for group in said.get("compressed", ()) for name in group["names"]}


def has_shape(said: Mapping[str, Any]) -> bool:
    """Whether what is recorded in this form has the gradient's shape, so that ranks can read what
    they have of it; else they read it whole."""
    return bool(said["form"] == "cast")


def gradient_of(
    tensors: Mapping[str, Tensor],
    at: str,
    name: str,
    shape: tuple[int, ...],
    device: torch.device,
    compressed: Mapping[str, Mapping[str, Any]],
) -> Tensor | None:
    """The gradient that a record has for a parameter of that shape, dense, on that device; None
    where it has none. `compressed`: of `by_parameter`."""
    tensor = tensors.get(f"{at}.{name}", tensors.get(raw_name(at, name)))
    if tensor is None:
        return None
    tensor = tensor.to(device)
    if name not in compressed:
        return tensor
    group = compressed[name]
    indices = tensors.get(_indices_name(at, name))
    return expand(
        group["form"],
        tensor,
        None if indices is None else indices.to(device),
        getattr(torch, group["dtype"]),
        shape,
        group.get("strides", {}).get(name, _row_major(shape)),
    )


def _indices_name(at: str, name: str) -> str:
    return f"{at}!indices.{name}"


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.empty(tuple(shape), device="meta").stride())
