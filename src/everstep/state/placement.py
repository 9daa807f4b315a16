"""A restore in the making: where each stored tensor will go,
and what is done when all have arrived."""

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.errors import Mismatch
from everstep.format.boxes import Box
from everstep.format.global_tensors import Described
from everstep.format.manifest import Manifest, Stream
from everstep.format.tables import TensorEntry
from everstep.sharding.layout import LocalBox, is_dtensor, shards_of
from everstep.sharding.leaves import dtype_name
from everstep.sharding.mapped import Mapped
from everstep.sharding.ranked import Adapt, Share, seed_of, values_by_index
from everstep.state.objects import as_stored, decode, device_of, references
from everstep.state.overlaps import Overlap

log = logging.getLogger("everstep")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds, as the state sees it: tensors under all their names, the optimizers
    that tables tell of, and what its manifest says of the rest."""

    tensors: Mapping[str, TensorEntry]
    optimizers: Mapping[str, Any]
    manifest: Manifest

    @classmethod
    def of(cls, described: Described) -> "Saved":
        """The state in a checkpoint, of all its parts. That each tensor is all there is checked
        when its tables are read (restore.choose)."""
        return cls(described.tensors, described.optimizers, described.manifest)

    def has(self, name: str) -> bool:
        """Whether there is an object of this name, of all ranks or of each."""
        manifest = self.manifest
        return name in manifest.objects or any(name in own for own in manifest.ranks)


@dataclass(slots=True)
class Placement:
    """Collects destinations, problems and final actions from all parts of the state.

    Nothing of the user's is changed before `check` has passed: tensors are filled next, then
    `finish` installs objects.
    """

    saved: Saved
    shares: Mapping[str, Share] = field(default_factory=dict)
    """By part, what of several ranks this one has for itself."""
    destinations: dict[str, tuple[TensorEntry, list[LocalBox]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    default_share: Share = field(default_factory=lambda: Share(0, 1))
    """This rank, for what differed between ranks though nobody had said that it would."""
    mapped: Mapped = field(default_factory=Mapped)
    """What the state's parameters are globally."""
    overlaps: Mapping[int, Overlap] = field(default_factory=dict)
    """By id() the tensors in values that lie in memory of others, which is filled for these: they
    get memory of their own."""
    settled: Container[int] = frozenset()
    """The tensors, by id(), that a replay brings to where they are to be."""
    settled_names: Set[str] = frozenset()
    """What of the checkpoint is theirs."""
    read_stream: Callable[[Stream], Iterator[tuple[str, Iterator[Any]]]] | None = None
    late: set[str] = field(default_factory=set)
    """Stored tensors that nobody needs before the first update."""
    optimized: set[tuple[str, str]] = field(default_factory=set)
    """The parameters that are here of each optimizer."""
    _absent: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    _made: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)
    _sources: dict[int, tuple[torch.Tensor, list[str]]] = field(default_factory=dict)
    _actions: list[Callable[[], None]] = field(default_factory=list)
    _last_actions: list[Callable[[], None]] = field(default_factory=list)

    def into(self, name: str, tensor: torch.Tensor) -> None:
        """Restore the stored tensor `name` into `tensor`, in place: its (global) shape and dtype
        must be equal. Of a DTensor, the boxes that lie here; of what consists of boxes of other
        tensors, those. Nothing is to be done where it is settled."""
        if id(tensor) in self.settled:
            return
        if (shards := self.mapped.pieces(tensor, tensor)) is not None:
            for shard in shards:
                self.into_box(shard.name, shard.shape, shard.box, shard.tensor)
            return
        if entry := self._entry(name, tensor):
            shape, boxes = shards_of(tensor)
            if self._is_alike(entry, name, shape, tensor.dtype):
                self._add(entry, tensor, boxes)

    def into_box(self, name: str, shape: tuple[int, ...], box: Box, memory: torch.Tensor) -> None:
        """Restore a box of the stored tensor `name`, of that shape, into plain memory."""
        entry = self._entry(name, memory)
        if entry and self._is_alike(entry, name, shape, memory.dtype) and box.count:
            _, known = self.destinations.setdefault(entry.spec.name, (entry, []))
            known.append(LocalBox(box, memory))

    def new(
        self, name: str, device: str | torch.device | None = None, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A new tensor for the stored tensor `name`, filled before `finish`. On the device on which
        it was, where that exists here, or on the one given. With the strides of `like`, if it has
        its shape, else those that it had; where that is a DTensor, one that lies where it does."""
        entry = self.saved.tensors.get(name)
        if entry is None:
            self.problems.append(f"missing: the checkpoint has no tensor {name!r}")
            return torch.empty(0)
        if (made := self.made(name)) is not None:
            return made
        self.used.add(name)
        place = device_of(entry.device if device is None else device)
        dtype: torch.dtype = getattr(torch, entry.spec.dtype)
        if like is not None and tuple(like.shape) == entry.spec.shape:
            if is_dtensor(like):
                place = like.device
            tensor = torch.empty_like(like, dtype=dtype, device=place, requires_grad=False)
        else:
            tensor = torch.empty(entry.spec.shape, dtype=dtype, device=place)
            if entry.strides is not None:
                tensor = tensor.as_strided(entry.spec.shape, entry.strides)  # they fill memory
        self._add(entry, tensor, shards_of(tensor)[1])
        self.note_made(name, tensor)
        return tensor

    def made(self, name: str) -> torch.Tensor | None:
        """What was made for the stored tensor `name` under another name of it: what was one tensor
        is one again. (Under the same name parameters that are parts of one have each their own.)"""
        known, found = self._made.get(self.saved.tensors[name].spec.name, (name, None))
        if known == name:
            return None
        self.used.add(name)
        return found

    def note_made(self, name: str, tensor: torch.Tensor) -> None:
        """Where the stored tensor `name` is from now on, in what is no module's."""
        self._made.setdefault(self.saved.tensors[name].spec.name, (name, tensor))

    def object_of(
        self,
        name: str,
        live: Mapping[str, torch.Tensor] | None = None,
        like: Callable[[str], torch.Tensor | None] | None = None,
        check: Callable[[Any], None] = lambda value: None,
    ) -> Callable[[], Any] | None:
        """What gives the object of this name when all tensors have arrived; None, and a problem,
        where there is none. Its tensors are those in `live`, where they are, else new ones that lie
        as what `like` gives for their name. `check` raises where the object, whose tensors are
        still empty, is none of its kind; one that is made of several is not looked at."""
        stored, adapt = self._object(name)
        if not stored:
            self.problems.append(f"missing: the checkpoint has no {name!r}")
            return None
        if adapt is not None:
            share = self.shares.get(name, self.default_share)
            values = [self.decode(each) for each in stored]
            return lambda: adapt(values, share.index, share.count)
        decoded = self.decode(stored[0], live, like)
        with as_stored(f"restoring {name!r}"):
            check(decoded)
        return lambda: decoded

    def stored(self, name: str) -> Any:
        """The tagged JSON of an object as this rank gets it; None where there is none, or where it
        is made of several."""
        values, adapt = self._object(name)
        return values[0] if values and adapt is None else None

    def seed(self, name: str) -> int | None:
        """For a generator that was saved by another number of ranks: what it begins with."""
        share = self.shares.get(name, self.default_share)
        values = values_by_index(self.saved.manifest.ranks, name) or [
            self.saved.manifest.objects.get(name)
        ]
        if len(values) == share.count:
            return None
        self.used.update(name for each in values for name in references(each))
        log.warning(
            "%s: saved by %s ranks, here are %s: each rank's random numbers are derived anew from "
            "them, and are not those of the run before",
            name,
            len(values),
            share.count,
        )
        return seed_of(values, share.index, share.count)

    def _object(self, name: str) -> tuple[list[Any], Adapt | None]:
        """The value of this name; none where there is none; or those of all ranks, and the user's
        rule that makes one of them."""
        share = self.shares.get(name, self.default_share)
        values = values_by_index(self.saved.manifest.ranks, name)
        if not values:
            objects = self.saved.manifest.objects
            return ([objects[name]] if name in objects else []), None
        if len(values) == share.count:
            return [values[share.index]], None
        if share.rule == "replicate":
            return [values[share.index % len(values)]], None
        if callable(share.rule):
            return values, share.rule
        self.problems.append(
            f"ranks: {name!r} was saved by {len(values)} ranks for each alone, here are "
            f"{share.count}. Say what becomes of it: by_rank={{{name!r}: 'replicate'}}, or a "
            f"function of (values, rank, ranks)"
        )
        return values[:1], None

    def decode(
        self,
        value: Any,
        live: Mapping[str, torch.Tensor] | None = None,
        like: Callable[[str], torch.Tensor | None] | None = None,
    ) -> Any:
        """Tagged JSON to an object. Its tensors are those in `live`, where they are, else new ones,
        as `like` says, filled before `finish`."""
        known = live or {}

        def tensor(name: str, device: str) -> torch.Tensor:
            return known[name] if name in known else self.new(name, device, like and like(name))

        return decode(value, tensor)

    def then(self, action: Callable[[], None], *, at_last: bool = False) -> None:
        """Do this when all tensors have arrived. `at_last`: after all other actions (random
        generators: nothing may draw from them afterwards)."""
        (self._last_actions if at_last else self._actions).append(action)

    def check(self, step: int, where: object) -> None:
        """Raises Mismatch with everything that does not fit."""
        for name, tensor in self._absent:
            # Else it has another name there: it may have been saved where these were not one
            # tensor (the last stage's head, tied to the embedding).
            if id(tensor) not in self._sources:
                self.problems.append(f"missing: the checkpoint has no tensor {name!r}")
        self._absent = []
        if self.problems:
            listed = "\n  ".join(self.problems[:100])
            count = "1 place" if len(self.problems) == 1 else f"{len(self.problems)} places"
            more = f"\n  and {len(self.problems) - 100} more" if len(self.problems) > 100 else ""
            raise Mismatch(
                f"restoring step {step} of {where}: state and checkpoint differ in "
                f"{count}, this checkpoint changed nothing:\n  {listed}{more}\n"
                f"Build the state as it was when it was saved, or restore a part of it with "
                "only=[...]"
            )

    def finish(self) -> None:
        """Run the actions, in the order in which they came."""
        for action in (*self._actions, *self._last_actions):
            action()

    def _entry(self, name: str, tensor: torch.Tensor) -> TensorEntry | None:
        """What is stored under that name, and wanted for this tensor."""
        if entry := self.saved.tensors.get(name):
            self.used.add(name)
        else:
            self._absent.append((name, tensor))
        return entry

    def _is_alike(
        self, entry: TensorEntry, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> bool:
        found = dtype_name(dtype)
        if entry.spec.shape != shape:
            self.problems.append(
                f"shape: {name!r} is {list(shape)} in the state, {list(entry.spec.shape)} in the "
                "checkpoint"
            )
        elif entry.spec.dtype != found:
            self.problems.append(
                f"dtype: {name!r} is {found} in the state, {entry.spec.dtype} in the checkpoint"
            )
        else:
            return True
        return False

    def _add(self, entry: TensorEntry, tensor: torch.Tensor, shards: list[LocalBox]) -> None:
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
        known += shards
