"""Local memory as boxes of global tensors: stages of a pipeline, experts, fused matrices, ranges.

A user's `layout` (or what knows a wrapper's own: fsdp1) says of a parameter what it is globally:
another name, or several boxes. What has the parameter's shape lies as the parameter does, its
optimizer state and its gradients: `Mapped.pieces`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from everstep.errors import Unsupported
from everstep.format.boxes import Box, flat_boxes
from everstep.sharding.layout import local_of, spread_of
from everstep.sharding.leaves import Leaf, has_elements, pieces_of


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of the global tensor `name` of that `shape`: `tensor`, a view of this rank's memory,
    begins at `offsets`, and is as long as the box in each dim. Without elements it says that the
    parameter belongs to `name`, of which nothing is here."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        object.__setattr__(self, "offsets", tuple(map(int, self.offsets)))
        lengths = self.box.lengths
        fits = len(self.shape) == len(self.offsets) == len(lengths) and all(
            0 <= offset <= offset + length <= size
            for offset, length, size in zip(self.offsets, lengths, self.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"a shard of {self.name!r}: a tensor of shape {list(lengths)} at "
                f"{list(self.offsets)} does not lie in the global shape {list(self.shape)}"
            )

    @property
    def box(self) -> Box:
        """What it has of the global tensor."""
        return Box(self.offsets, tuple(self.tensor.shape))

    @classmethod
    def flat(
        cls, name: str, shape: Sequence[int], start: int, tensor: torch.Tensor
    ) -> list["Shard"]:
        """The row-major elements from number `start` on of a global tensor, which lie one after
        another in `tensor`, of one dim. A few boxes: nothing is moved."""
        shape = tuple(map(int, shape))
        if tensor.ndim != 1 or not 0 <= start <= start + tensor.numel() <= prod(shape):
            raise ValueError(
                f"a range of {name!r}: a tensor of shape {list(tensor.shape)} from element {start} "
                f"on is no range of one dim of the {prod(shape)} elements of {list(shape)}"
            )
        memory, at = tensor.detach(), 0
        found: list[Shard] = []
        for box in flat_boxes(shape, start, start + tensor.numel()):
            view = memory[at : at + box.count].view(box.lengths)
            found.append(cls(name, shape, box.offsets, view))
            at += box.count
        if found or 0 in shape:
            return found or [cls(name, shape, (0,) * len(shape), memory.view(shape))]
        if not shape:  # a number has no empty box; as good is one of a row of numbers
            return []
        return [cls(name, shape, (0,) * len(shape), memory.view(0, *shape[1:]))]


Layout = Callable[[str, torch.Tensor], "str | Sequence[Shard] | None"]
"""What a parameter or buffer, by its name in the state, is globally: None: what its name says; its
name there; or the boxes of which its memory consists."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor, and where its items lie in a parameter's local memory."""

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    strides: tuple[int, ...]

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The same in memory that lies as the parameter's does."""
        return memory.as_strided(
            self.box.lengths, self.strides, memory.storage_offset() + self.start
        )


class StateOf(NamedTuple):
    """Of what a tensor is the state: of a parameter, in an optimizer, under a key."""

    optimizer: Optimizer
    optimizer_name: str
    name: str
    parameter: torch.Tensor
    key: str


class Place(NamedTuple):
    """A leaf that can be written, and the parameter by which its holders are known: they hold this
    box of it, if it lies `is_alike`, else some of it."""

    leaf: Leaf
    parameter: str
    is_alike: bool
    state: StateOf | None


class Mapped:
    """What the parameters and buffers of a state are globally. Asked for each time when the state
    is walked anew, and then known by the tensors."""

    def __init__(self, layout: Layout | None = None) -> None:
        self._layout = layout
        # With the tensors, so that ids stay theirs.
        self._names: dict[tuple[int, str], tuple[torch.Tensor, str]] = {}
        self._split: dict[int, tuple[torch.Tensor, tuple[Piece, ...]]] = {}

    def forget(self) -> None:
        """Tensors are others now."""
        self._names, self._split = {}, {}

    @property
    def is_empty(self) -> bool:
        """Whether each is the tensor of its name."""
        return not self._split

    def note(self, name: str, tensor: torch.Tensor, shards: Iterable[Shard]) -> None:
        """A wrapper's own shards of a parameter. The user's layout may rename their tensors."""
        named = [replace(shard, name=self._renamed(shard)) for shard in shards]
        self._split[id(tensor)] = tensor, _pieces(name, tensor, named)

    def name_of(self, name: str, tensor: torch.Tensor) -> str:
        """Its global name; its own where it is split. Asks the user's layout, once."""
        key = id(tensor), name
        if self._layout is None or id(tensor) in self._split:
            return name
        if key not in self._names:
            found = self._layout(name, tensor)
            if found is not None and not isinstance(found, str):
                self._split[id(tensor)] = tensor, _pieces(name, tensor, found)
                return name
            self._names[key] = tensor, name if found is None else found
        return self._names[key][1]

    def split(self, tensor: torch.Tensor) -> tuple[Piece, ...] | None:
        """The boxes of a parameter or buffer; None for one that is the tensor of its name."""
        return self._split[id(tensor)][1] if id(tensor) in self._split else None

    def names(self, name: str, parameter: torch.Tensor, *, only_here: bool = False) -> list[str]:
        """The global names of a parameter that is called `name`. `only_here`: those of which there
        are elements here."""
        pieces = self.split(parameter)
        if pieces is None:
            return [name]
        if only_here:
            pieces = tuple(piece for piece in pieces if piece.box.count or 0 in piece.shape)
        return list(dict.fromkeys(piece.name for piece in pieces))

    def pieces(self, parameter: torch.Tensor, tensor: torch.Tensor) -> list[Shard] | None:
        """The boxes of a tensor that has the shape of a parameter (a gradient, a moment), as views;
        None where it is the tensor of the parameter's name. Raises Unsupported."""
        found = self.split(parameter)
        if found is None:
            return None
        memory = memory_like(parameter, tensor)
        return [Shard(each.name, each.shape, each.box.offsets, each.of(memory)) for each in found]

    def places(self, leaf: Leaf, state: StateOf | None) -> list[Place]:
        """What is to be written for a leaf, box by box; `state`: of an optimizer's state tensor.
        Raises Unsupported."""
        base, name = (leaf.tensor, leaf.name) if state is None else (state.parameter, state.name)
        found: list[Place] = []
        if self.split(base) is None:
            is_alike = spread_of(base) == spread_of(leaf.tensor)
            found = [Place(piece, name, is_alike, state) for piece in pieces_of(leaf)]
        elif state is None or (
            leaf.tensor.shape == base.shape and not (state.key == "step" and base.ndim == 0)
        ):  # with an element for each of the parameter's: `step` is one for all
            for shard in self.pieces(base, leaf.tensor) or ():
                piece = Leaf(shard.name, shard.tensor, leaf.owner, shard.box, shard.shape)
                found.append(Place(_named(piece, shard.name, state), shard.name, True, state))
        elif leaf.tensor.numel() > 1:
            raise Unsupported(
                f"capturing {leaf.name!r}: its parameter is several boxes of global tensors, and "
                f"it has another shape ({list(leaf.tensor.shape)}) than that, so that nobody can "
                f"tell what belongs to which. Use an optimizer whose state has its parameters' "
                f"shapes, or do without layout="
            )
        else:
            names = self.names(name, base, only_here=True)
            found = [Place(_named(leaf, each, state), each, False, state) for each in names]
        return [place for place in found if has_elements(place.leaf)]

    def _renamed(self, shard: Shard) -> str:
        found = self._layout(shard.name, shard.tensor) if self._layout else None
        if not (found is None or isinstance(found, str)):
            raise Unsupported(
                f"capturing {shard.name!r}: FSDP has it in a flat parameter, of which it knows the "
                f"boxes; layout= can only give another name to it"
            )
        return found or shard.name


def described(parameters: Iterable[torch.Tensor], mapped: Mapped) -> tuple[list[Any], bool]:
    """How parameters consist of boxes of other tensors, as JSON: what an update depends on that
    does not go by single elements; and whether some have elements that are of none."""
    rows, is_padded = [], False
    for parameter in parameters:
        if (pieces := mapped.split(parameter)) is None:
            continue
        local = local_of(parameter)
        boxes = [[e.name, e.box.offsets, e.box.lengths, e.start, e.strides] for e in pieces]
        rows.append([list(local.shape), local.stride(), boxes])
        is_padded |= sum(piece.box.count for piece in pieces) < local.numel()
    return rows, is_padded


def lies_like(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the local memory of a tensor lies as the parameter's does."""
    own, other = local_of(parameter), local_of(tensor)
    is_same = own.stride() == other.stride() or (own.is_contiguous() and other.is_contiguous())
    return own.shape == other.shape and is_same


def memory_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The local memory of a tensor, which lies as the parameter's does. Raises Unsupported."""
    own, other = local_of(parameter), local_of(tensor).detach()
    if not lies_like(own, other):
        raise Unsupported(
            f"capturing shards: a tensor of shape {list(other.shape)} and strides "
            f"{list(other.stride())} does not lie as its parameter does, of shape "
            f"{list(own.shape)} and strides {list(own.stride())}. Make both contiguous"
        )
    return other


def _named(leaf: Leaf, name: str, state: StateOf | None) -> Leaf:
    return leaf._replace(name=f"{state.optimizer_name}.{name}.{state.key}" if state else name)


def _pieces(name: str, parameter: torch.Tensor, shards: Iterable[Shard]) -> tuple[Piece, ...]:
    """Raises ValueError for what is not the parameter's memory."""
    memory = local_of(parameter).detach()
    pointer, size = memory.untyped_storage().data_ptr(), reach(memory)
    found, count = [], 0
    for shard in shards:
        view = shard.tensor
        if not view.numel():
            start = 0
        else:
            start = int(view.storage_offset() - memory.storage_offset())
            inside = view.untyped_storage().data_ptr() == pointer and view.dtype == memory.dtype
            if not inside or start < 0 or start + reach(view) > size:
                raise ValueError(
                    f"layout({name!r}): the shard {shard.box} of {shard.name!r} is no view of this "
                    f"tensor's memory. Take parts of it: tensor[:4], tensor.view(...)"
                )
        count += view.numel()
        found.append(Piece(shard.name, shard.shape, shard.box, start, view.stride()))
    if count > memory.numel():
        raise ValueError(
            f"layout({name!r}): its shards have {count} elements, it has {memory.numel()} here"
        )
    return tuple(found)


def reach(tensor: torch.Tensor) -> int:
    """How many items its memory extends over."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((length - 1) * stride for length, stride in steps)
