"""Leaves: the tensors of a state under their names; which tensors can be stored at all; and the
Guard that tells when a walk is out of date."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter, getitem, is_
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from everstep.errors import Unsupported
from everstep.format.boxes import Box
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.packs import Spec, entry_name
from everstep.format.tables import is_dense
from everstep.sharding.layout import is_dtensor, local_of, shards_of

_local = attrgetter("_local_tensor")
_GUARDS_TRIED = 2, 13
"""The newest torch with whose own guards `forms_of` was tried."""
_LAYER = re.compile(r"(.*?\.\d+)(\.|$)")
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def layer_of(name: str) -> str:
    """What a tensor belongs to: "model.blocks.3" of "model.blocks.3.mlp.weight"; without a number,
    what its module is called."""
    found = _LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0] or name


class Leaf(NamedTuple):  # each step makes some hundreds: a frozen dataclass takes thrice as long
    """A tensor to be captured, or a box of one (`box`) of that global `shape`.

    `owner` is the index of the one optimizer that may change it in its step() and nobody else: such
    a tensor is copied lazily. None: it is copied at the call.
    """

    name: str
    tensor: torch.Tensor
    owner: int | None = None
    box: Box | None = None
    shape: tuple[int, ...] | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of all of it."""
        return tuple(self.tensor.shape) if self.shape is None else self.shape

    @property
    def spec(self) -> Spec:
        """As the format sees it."""
        return Spec(self.name, dtype_name(self.tensor.dtype), self.whole_shape, self.box)

    @property
    def entry(self) -> str:
        """Its name among the captured: a tensor's, or that of a box of it."""
        return self.name if self.box is None else entry_name(self.name, self.whole_shape, self.box)

    @property
    def strides(self) -> tuple[int, ...] | None:
        """None for row-major tensors, for those with gaps or overlaps (nobody could make such a one
        again), and for boxes."""
        if self.box is not None:
            return None
        if self.tensor.is_contiguous() or not fills_memory(self.tensor):
            return None
        return self.tensor.stride()


def fills_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements have neither gaps nor overlaps, in whatever order of dims."""
    return tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride())


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 → "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements here, one after another on the CPU. Waits for its device."""
    plain = local_of(tensor).detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # one element has any stride


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raises Unsupported for a tensor whose bytes are not simply its elements."""
    tensor = local_of(tensor)
    reason = None
    if is_lazy(tensor):
        reason = "it has no shape yet; run a forward pass through the lazy module first"
    elif tensor.layout is not torch.strided:
        reason = f"it has layout {tensor.layout}; store it as dense tensors (indices and values)"
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        reason = f"it is a {type(tensor).__name__}; store its plain tensors, or its to_local()"
    elif tensor.device.type not in ("cpu", "cuda"):
        reason = f"it lies on device {tensor.device}; move it to the CPU or a CUDA device"
    elif dtype_name(tensor.dtype) not in ITEM_SIZES:
        reason = f"it has dtype {tensor.dtype}; store it under another one"
    if reason:
        raise Unsupported(f"capturing tensor {name!r}: {reason}")


def canonical(name: str) -> str:
    """A parameter's name without what torch.compile, FSDP and activation checkpointing put into
    it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class _Attributes:
    """Of an object, to be looked up as items."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def __getitem__(self, name: str) -> Any:
        return getattr(self._holder, name, None)


@dataclass(slots=True)
class Guard:
    """Tells cheaply whether the tensors found in a walk are still the ones that a walk would find.

    Watches the sizes of the containers, the identity of what is in them, and of each tensor all
    that `tensor.data = other` or a resize in place can change.
    """

    # Columns, so that `holds` runs in C: it is the longest part of a call with many tensors.
    _sized: list[Any] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _containers: list[Any] = field(default_factory=list)
    _keys: list[Any] = field(default_factory=list)
    _parts: list[object] = field(default_factory=list)
    _tensors: list[torch.Tensor] = field(default_factory=list)
    _pointers: list[int] = field(default_factory=list)
    _have_form: Callable[[], bool] = lambda: True
    _sharded: list[torch.Tensor] = field(default_factory=list)
    _locals: list[torch.Tensor] = field(default_factory=list)
    _watched: set[int] = field(default_factory=set)

    def watch_size(self, container: Any) -> None:
        """The container has the same number of items."""
        self._sized.append(container)
        self._sizes.append(len(container))

    def watch_part(self, container: Any, key: Any) -> None:
        """container[key] is the object that it is now."""
        self._containers.append(container)
        self._keys.append(key)
        self._parts.append(container[key])

    def watch_attribute(self, holder: Any, name: str) -> None:
        """Likewise holder.name, which may be a property (of optimizers that wrap others)."""
        own = vars(holder)
        self.watch_part(own if name in own else _Attributes(holder), name)

    def watch_item(self, container: Any, key: Any, tensor: torch.Tensor) -> None:
        """container[key] is this tensor, in this memory, of this shape, strides and dtype."""
        self.watch_part(container, key)
        if id(tensor) in self._watched:
            return
        if is_dtensor(tensor):
            self._watched.add(id(tensor))
            self._sharded.append(tensor)
            tensor = local_of(tensor)
            self._locals.append(tensor)
        try:
            pointer = tensor.data_ptr()
        except (RuntimeError, ValueError):  # it has no storage: sparse, or not initialised
            return
        self._watched.add(id(tensor))  # which the list below keeps alive
        self._tensors.append(tensor)
        self._pointers.append(pointer)

    def begin(self) -> None:
        """All is watched that was found, in the form that it has now."""
        self._have_form = partial(forms_of(self._tensors), *self._tensors)

    def holds(self) -> bool:
        """Whether all is as it was at `begin`. About 0.3 µs per tensor."""
        try:
            parts = map(getitem, self._containers, self._keys)
            return (
                list(map(len, self._sized)) == self._sizes
                and all(map(is_, parts, self._parts))
                and all(map(is_, map(_local, self._sharded), self._locals))
                and list(map(torch.Tensor.data_ptr, self._tensors)) == self._pointers
                and self._have_form()
            )
        except (KeyError, IndexError):
            return False


def forms_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return what tells whether tensors have the shapes, strides, dtypes and devices that these
    have now, which it does not keep alive: what torch.compile has for that, as to ask each tensor
    for each takes four times as long. It is not public: so it is used up to the newest torch with
    which it was tried."""
    if tuple(map(int, torch.__version__.split(".")[:2])) > _GUARDS_TRIED:
        forms = list(map(_form, tensors))
        return lambda *now: list(map(_form, now)) == forms
    from torch._C._dynamo.guards import TensorGuards

    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def has_elements(leaf: Leaf) -> bool:
    """Whether there is anything of it here, or nowhere."""
    return bool(leaf.tensor.numel()) or 0 in leaf.whole_shape


def pieces_of(leaf: Leaf) -> list[Leaf]:
    """The leaf itself, or the boxes of a DTensor that are here."""
    if not is_dtensor(leaf.tensor):
        return [leaf]
    shape, shards = shards_of(leaf.tensor)
    return [Leaf(leaf.name, tensor, leaf.owner, box, shape) for box, tensor in shards]


def find_aliases(leaves: Iterable[Leaf]) -> tuple[list[Leaf], dict[str, list[str]]]:
    """Leaves without repetition, and for each name the other names of the same tensor (tied
    weights)."""
    first: dict[int, Leaf] = {}
    aliases: dict[str, list[str]] = {}
    for leaf in leaves:
        known = first.setdefault(id(leaf.tensor), leaf)
        if known is not leaf:
            aliases.setdefault(known.name, []).append(leaf.name)
    return list(first.values()), aliases
