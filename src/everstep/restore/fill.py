"""Stored tensors into their places: out of a checkpoint's packs, or of what a replay came to."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch

from everstep.format.boxes import Box
from everstep.format.global_tensors import Version
from everstep.format.manifest import Part
from everstep.format.tables import Table, TensorEntry
from everstep.restore.choose import Candidate
from everstep.restore.deliver import Delivery, Staging, put
from everstep.restore.load import Earlier, Loader
from everstep.sharding.layout import LocalBox

Wanted = Mapping[str, tuple[TensorEntry, list[LocalBox]]]
"""Stored tensors by their first names, and where their boxes are to go."""


def fill(candidate: Candidate, versions: Sequence[Version], wanted: Wanted, loader: Loader) -> None:
    """Read each tensor as the last of the versions has it; blocks. Raises Corrupt, Unavailable,
    and Mismatch where elements share memory that were different."""
    staging = Staging()
    left = {name: list(map(staging.delivery, found)) for name, (_, found) in wanted.items()}
    for version in reversed(versions):
        names = {name for _, table in version for name in left.keys() & table.tensors.keys()}
        here = {name: left.pop(name) for name in names}
        for part, table in version:
            fill_part(candidate, part, table, here, loader)
    staging.finish()


def fill_part(
    candidate: Candidate,
    part: Part,
    table: Table,
    wanted: Mapping[str, Sequence[Delivery]],
    loader: Loader,
) -> None:
    """Read what a part has of these boxes of tensors; blocks. Raises Corrupt, Unavailable."""
    known = table.tensors
    rows = [(known[name], found) for name, found in wanted.items() if name in known]
    if rows:
        with candidate.sources(part) as sources, ExitStack() as stack:
            base = Earlier(candidate, part, table, stack)
            loader.load(part, sources, rows, table, base.read, candidate.already)


def gathered(rows: Iterable[tuple[TensorEntry, LocalBox]]) -> Wanted:
    """These boxes of stored tensors, by tensor."""
    found: dict[str, tuple[TensorEntry, list[LocalBox]]] = {}
    for entry, place in rows:
        found.setdefault(entry.spec.name, (entry, []))[1].append(place)
    return found


def boxes_of(wanted: Wanted) -> dict[str, list[Box]]:
    """Those that are wanted of each tensor."""
    return {name: [place.box for place in places] for name, (_, places) in wanted.items()}


def fill_from_live(live: Mapping[str, Sequence[LocalBox]], wanted: Wanted) -> None:
    """Copy what is here already, under any name of the stored tensor; nothing where it is not."""
    for whole, destinations in wanted.values():
        names = (whole.spec.name, *whole.aliases)
        source = next((live[name] for name in names if name in live), ())
        for box, tensor in source:
            for destination in destinations:
                common = box.intersect(destination.box)
                if common and not is_same_memory(tensor, destination.tensor):
                    inside = destination.tensor[common.slices_in(destination.box)]
                    put(inside, tensor.detach()[common.slices_in(box)])


def is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all elements of one are those of the other."""
    alike = (tensor.shape, tensor.stride()) == (other.shape, other.stride())
    return tensor is other or (alike and tensor.data_ptr() == other.data_ptr())
