"""Which part of a checkpoint has which boxes of a tensor, in few words: one rank of a thousand that
loads its own reads the tables of those parts that have some of it, and no others.

Where ranks hold equal boxes of a tensor one after another, as FSDP's do, a `Run` tells of all:

    Run(part=0, times=3, offsets=(0, 0), lengths=(4, 8), dim=0)
        part 0: [0:4,0:8]    part 1: [4:8,0:8]    part 2: [8:12,0:8]
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from everstep.format.boxes import Box
from everstep.format.document import natural
from everstep.format.tables import OPTIMIZERS, TENSOR, TensorEntry, tensor_from_json, tensor_to_json

INDEXED_FROM_PARTS = 16
"""A state of fewer is as soon read whole, and each of its manifests would have the index."""

Numbers = tuple[int, ...]
Placed = tuple[int, Numbers, Numbers]
"""A part, and offsets and lengths of a box that it has."""

_RUN = [natural, natural, [natural], [natural], natural]
INDEX = {"tensors": [{**TENSOR, "runs": [_RUN]}], "optimizers": OPTIMIZERS}


class Run(NamedTuple):
    """`times` parts from `part` on have a box each, the first of them that of `offsets`, each other
    one `lengths[dim]` further in `dim`."""

    part: int
    times: int
    offsets: Numbers
    lengths: Numbers
    dim: int = 0

    def parts_of(self, box: Box) -> range:
        """The parts in which there is something of a box of that tensor."""
        first, last = 0, self.times
        dims = zip(self.offsets, self.lengths, box.offsets, box.lengths, strict=True)
        for dim, (at, size, start, length) in enumerate(dims):
            if dim == self.dim and size:
                first = max(first, (start - at) // size)
                last = min(last, -(-(start + length - at) // size))
            elif start >= at + size or at >= start + length:
                return range(0)
        return range(self.part + first, self.part + max(first, last))


def runs_of(placed: Iterable[Placed]) -> list[Run]:
    """The fewest that tell of these boxes, which come by rising part."""
    found: list[Run] = []
    for part, offsets, lengths in placed:
        if found and (run := _extended(found[-1], part, offsets, lengths)):
            found[-1] = run
        else:
            found.append(Run(part, 1, offsets, lengths))
    return found


def _extended(run: Run, part: int, offsets: Numbers, lengths: Numbers) -> Run | None:
    if part != run.part + run.times or lengths != run.lengths:
        return None
    moved = [
        dim for dim, pair in enumerate(zip(run.offsets, offsets, strict=True)) if len({*pair}) > 1
    ]
    if len(moved) != 1 or (run.times > 1 and moved != [run.dim]):
        return None
    (dim,) = moved
    is_next = offsets[dim] == run.offsets[dim] + run.times * lengths[dim]
    return run._replace(times=run.times + 1, dim=dim) if is_next else None


@dataclass(frozen=True, slots=True)
class Index:
    """All tensors of a state by name, without their pieces; its optimizers, as tables have them;
    and where the tensors are."""

    tensors: Mapping[str, TensorEntry]
    optimizers: Mapping[str, Any]
    runs: Mapping[str, Sequence[Run]]

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        rows = [
            {**tensor_to_json(entry), "runs": self.runs[name]}
            for name, entry in self.tensors.items()
        ]
        return {"tensors": rows, "optimizers": self.optimizers}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], parts: int) -> "Index":
        """Of an INDEX of so many parts. Raises ValueError."""
        entries = list(map(tensor_from_json, value["tensors"]))
        runs = {
            entry.spec.name: [Run(a, b, tuple(c), tuple(d), e) for a, b, c, d, e in row["runs"]]
            for entry, row in zip(entries, value["tensors"], strict=True)
        }
        tensors = {entry.spec.name: entry for entry in entries}
        for name, entry in tensors.items():
            if not all(_fits(run, len(entry.spec.shape), parts) for run in runs[name]):
                raise ValueError(f"tensor {name!r} lies, says the index, where nothing is")
        return cls(tensors, value["optimizers"], runs)

    def parts_of(self, wanted: Mapping[str, Iterable[Box]]) -> list[int]:
        """The parts in which there is something of these boxes of tensors, rising."""
        found: set[int] = set()
        for name, boxes in wanted.items():
            found.update(*(run.parts_of(box) for box in boxes for run in self.runs[name]))
        return sorted(found)

    def tells_of(self, part: int, entry: TensorEntry) -> bool:
        """Whether it says what a part's table does of a tensor."""
        name, boxes = entry.spec.name, [piece.box for piece in entry.pieces if piece.size]
        known = self.tensors.get(name)
        is_known = known is not None and known.spec == entry.spec
        return is_known and all(part in self.parts_of({name: [box]}) for box in boxes)


def _fits(run: Run, ndim: int, parts: int) -> bool:
    is_there = run.part + run.times <= parts
    return is_there and len(run.offsets) == len(run.lengths) == ndim and run.dim < max(1, ndim)
