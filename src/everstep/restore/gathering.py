"""Which tensors of a record come together in one gradient: those of which one parameter here is
boxes.

A parameter has one gradient or none, so all of its tensors must have been updated by a call, or
none of them.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from everstep.errors import Mismatch
from everstep.format.global_tensors import GlobalTensor, whole_tensors
from everstep.format.manifest import Record
from everstep.format.packs import Spec
from everstep.format.tables import Table, TensorEntry, raw_name
from everstep.redo import compression
from everstep.redo.gathered import gathered_name
from everstep.sharding.layout import local_of
from everstep.sharding.mapped import Piece
from everstep.sharding.redundancy import is_here
from everstep.state.optimizers import OptimizerState
from everstep.state.placement import Destination


@dataclass(frozen=True, slots=True)
class Boxed:
    """A parameter of an optimizer, by its local name, and the boxes that it has of other tensors;
    of each there is something here."""

    optimizer: str
    name: str
    parameter: torch.Tensor
    pieces: tuple[Piece, ...]

    @property
    def names(self) -> list[str]:
        """Of its tensors."""
        return list(dict.fromkeys(piece.name for piece in self.pieces))


@dataclass(frozen=True, slots=True)
class Gathered:
    """One gradient that is to be read: its name in memory, and what it is. `at`: its call's
    prefix."""

    at: str
    name: str
    entry: TensorEntry
    sources: tuple[tuple[str, Piece], ...]
    """Of the record's tensors."""
    of: Boxed

    def into(self, memory: torch.Tensor) -> Iterator[tuple[str, Destination]]:
        """Where the record's tensors go, each by its name; the rest of the memory is made zeros."""
        if sum(piece.box.count for piece in self.of.pieces) < memory.numel():
            memory.zero_()
        for name, piece in self.sources:
            yield name, Destination(piece.box, piece.of(memory))

    def views(self, memory: torch.Tensor, names: Container[str]) -> Iterator[torch.Tensor]:
        """What of its memory is of the gradients of these."""
        return (piece.of(memory) for piece in self.of.pieces if piece.name in names)


@dataclass(frozen=True, slots=True)
class Consumers:
    """The parameters that this rank updates: by name, and those that are boxes of others."""

    plain: Mapping[str, torch.Tensor]
    boxed: Sequence[Boxed]

    @classmethod
    def of(cls, optimizers: Iterable[OptimizerState]) -> "Consumers":
        """All of these optimizers' that are here."""
        plain: dict[str, torch.Tensor] = {}
        boxed: list[Boxed] = []
        for optimizer in optimizers:
            for _, name, parameter, _ in optimizer.parameters():
                pieces = optimizer.mapped.split(parameter)
                if not is_here(optimizer.optimizer, parameter):
                    continue
                if pieces is None:
                    plain[name] = parameter
                elif here := tuple(piece for piece in pieces if piece.box.count):
                    boxed.append(Boxed(optimizer.name, name, parameter, here))
        return cls(plain, boxed)

    @property
    def are_on_cpu(self) -> bool:
        """All of them."""
        owners = [*self.plain.values(), *(each.parameter for each in self.boxed)]
        return all(each.device.type == "cpu" for each in owners)


def check(
    records: Sequence[tuple[Record, Sequence[Table]]],
    boxed: Sequence[Boxed],
    since: Mapping[str, int],
) -> None:
    """Raises Mismatch where a record has a gradient for a part of a parameter alone. `since`: the
    step of each tensor at the base, where it has several."""
    known: set[tuple[int, ...]] = set()
    for record, tables in records if boxed else ():
        ahead = {name for name, step in since.items() if step >= record.step}
        key = (*map(id, tables), len(record.calls), len(ahead))
        if key not in known:
            known.add(key)
            plan(record.step, record.calls, whole_tensors(tables), boxed, ahead)


def plan(
    step: int,
    calls: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, GlobalTensor],
    boxed: Sequence[Boxed],
    ahead: Container[str],
) -> tuple[list[Gathered], Set[str]]:
    """What is read of a record for parameters that are boxes; and the names of its tensors that are
    to be read whole instead, since they are compressed. Raises Mismatch."""
    found: list[Gathered] = []
    apart: set[str] = set()
    for number, call in enumerate(calls) if boxed else ():
        at, compressed = f"@{number}", compression.by_parameter(call)
        for each in boxed:
            if each.optimizer != call["optimizer"]:
                continue
            names = each.names
            keys = {name: gradient_key(tensors, at, name) for name in names}
            there = [name for name in names if keys[name] in tensors and name not in ahead]
            if not there:
                continue
            if absent := [name for name in names if name not in there]:
                raise Mismatch(
                    f"replaying step {step}: {there[0]!r} and {absent[0]!r} are in one parameter "
                    f"here, {each.name!r}, and only the first of them is updated there. Restore on "
                    f"a layout that has them apart"
                )
            if any(name in compressed for name in names):
                apart.update(keys.values())
                continue
            entry = _local(step, each, [tensors[key] for key in keys.values()])
            sources = tuple((keys[piece.name], piece) for piece in each.pieces)
            found.append(Gathered(at, gathered_name(at, each.name), entry, sources, each))
    return found, apart


def gradient_key(tensors: Container[str], at: str, name: str) -> str:
    """Under which a record has the gradient, if it has one: from before clipping, perhaps."""
    raw = raw_name(at, name)
    return raw if raw in tensors else f"{at}.{name}"


def _local(step: int, boxed: Boxed, entries: Sequence[GlobalTensor]) -> TensorEntry:
    """What they make up. Raises Mismatch."""
    shapes = {piece.name: piece.shape for piece in boxed.pieces}
    for name, entry in zip(boxed.names, entries, strict=True):
        spec = entry.spec
        if spec.shape != shapes[name] or spec.dtype != entries[0].spec.dtype:
            raise Mismatch(
                f"replaying step {step}: the gradient of {name!r} is {spec.dtype}"
                f"{list(spec.shape)}; in {boxed.name!r} here it takes {entries[0].spec.dtype}"
                f"{list(shapes[name])}. Restore on a layout that has its tensors apart"
            )
    local = local_of(boxed.parameter)
    strides = None if local.is_contiguous() else tuple(local.stride())
    return TensorEntry(
        Spec(boxed.name, entries[0].spec.dtype, tuple(local.shape)), (), (), "", strides
    )
