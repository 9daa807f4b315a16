"""A restore in the making: where each stored tensor will go,
and what is done when all have arrived."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.errors import Mismatch
from everstep.format.boxes import Box
from everstep.format.manifest import Manifest
from everstep.format.tables import Table
from everstep.format.wholes import WholeTensor, groups, optimizers_of, whole_tensors
from everstep.state.layout import shards_of
from everstep.state.leaves import dtype_name
from everstep.state.objects import decode


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds, as the state sees it: tensors under all their names, and objects."""

    tensors: Mapping[str, WholeTensor]
    objects: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]
    optimizers: Mapping[str, Any]

    @classmethod
    def of(cls, manifest: Manifest, tables: list[Table]) -> "Saved":
        """Everything in a checkpoint, of all its parts. That each tensor is all there was checked
        when it was read (restore.choose)."""
        tensors: dict[str, WholeTensor] = {}
        optimizers: dict[str, Any] = {}
        for group in groups(manifest, tables):
            for name, whole in whole_tensors(group).items():
                tensors.update(dict.fromkeys((name, *whole.aliases), whole))
            optimizers.update(optimizers_of(group))
        return cls(tensors, manifest.objects, manifest.hyperparameters, optimizers)


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory for a box of a stored tensor: a plain tensor of the box's lengths, perhaps strided."""

    box: Box
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        assert tuple(self.tensor.shape) == self.box.lengths

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> "Destination":
        """All of a stored tensor goes to this one."""
        return cls(Box.whole(tuple(tensor.shape)), tensor)


@dataclass(slots=True)
class Placement:
    """Collects destinations, problems and final actions from all parts of the state.

    Nothing of the user's is changed before `check` has passed: tensors are filled next, then
    `finish` installs objects.
    """

    saved: Saved
    destinations: dict[str, tuple[WholeTensor, list[Destination]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    _sources: dict[int, tuple[torch.Tensor, list[str]]] = field(default_factory=dict)
    _actions: list[Callable[[], None]] = field(default_factory=list)
    _last_actions: list[Callable[[], None]] = field(default_factory=list)

    def into(self, name: str, tensor: torch.Tensor) -> None:
        """Restore the stored tensor `name` into `tensor`, in place: its (global) shape and dtype
        must be equal. Of a DTensor, the boxes that lie here."""
        entry = self.saved.tensors.get(name)
        if entry is None:
            self.problems.append(f"missing: the checkpoint has no tensor {name!r}")
            return
        self.used.add(name)
        shape, shards = shards_of(tensor)
        dtype = dtype_name(tensor.dtype)
        if entry.spec.shape != shape:
            self.problems.append(
                f"shape: {name!r} is {list(shape)} in the state, {list(entry.spec.shape)} in the "
                "checkpoint"
            )
        elif entry.spec.dtype != dtype:
            self.problems.append(
                f"dtype: {name!r} is {dtype} in the state, {entry.spec.dtype} in the checkpoint"
            )
        else:
            self._add(entry, tensor, shards)

    def new(
        self,
        name: str,
        device: str | torch.device | None = None,
        like: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A new tensor for the stored tensor `name`, filled before `finish`.
        On the device on which it
        was, where that exists here, or on the one given. With the strides of `like`,
        if it has its shape; where that is a DTensor, one that lies where it does."""
        entry = self.saved.tensors.get(name)
        if entry is None:
            self.problems.append(f"missing: the checkpoint has no tensor {name!r}")
            return torch.empty(0)
        self.used.add(name)
        place = torch.device(device if device is not None else entry.device)
        if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
            place = torch.device("cpu")
        dtype: torch.dtype = getattr(torch, entry.spec.dtype)
        if like is not None and tuple(like.shape) == entry.spec.shape:
            if not _is_plain(like):
                place = like.device
            tensor = torch.empty_like(like, dtype=dtype, device=place, requires_grad=False)
        else:
            tensor = torch.empty(entry.spec.shape, dtype=dtype, device=place)
        self._add(entry, tensor, shards_of(tensor)[1])
        return tensor

    def decode(self, value: Any, live: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Tagged JSON to an object. Its tensors are those in `live`, where they are, else new ones,
        filled before `finish`."""
        known = live or {}
        return decode(value, lambda name, at: known[name] if name in known else self.new(name, at))

    def then(self, action: Callable[[], None]) -> None:
        """Do this when all tensors have arrived."""
        self._actions.append(action)

    def at_last(self, action: Callable[[], None]) -> None:
        """Do this after all other actions (random generators:
        nothing may draw from them afterwards)."""
        self._last_actions.append(action)

    def check(self, step: int, where: object) -> None:
        """Raises Mismatch with everything that does not fit."""
        if self.problems:
            listed = "\n  ".join(self.problems[:100])
            more = f"\n  and {len(self.problems) - 100} more" if len(self.problems) > 100 else ""
            raise Mismatch(
                f"restoring step {step} of {where}: state and checkpoint differ in "
                f"{len(self.problems)} places, this checkpoint changed nothing:\n  {listed}{more}\n"
                f"Build the state as it was when it was saved, or restore a part of it with "
                "only=[...]"
            )

    def finish(self) -> None:
        """Run the actions, in the order in which they came."""
        for action in (*self._actions, *self._last_actions):
            action()

    def _add(
        self, entry: WholeTensor, tensor: torch.Tensor, shards: list[tuple[Box, torch.Tensor]]
    ) -> None:
        name = entry.spec.name
        _, names = self._sources.setdefault(id(tensor), (tensor, []))  # keeps it, and so its id
        if name in names:
            return
        names.append(name)
        if len(names) > 1:
            self.problems.append(
                f"tied: {names[0]!r} and {name!r} are one tensor in the state, two in "
                "the checkpoint"
            )
        _, known = self.destinations.setdefault(name, (entry, []))
        known += (Destination(box, memory) for box, memory in shards)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
