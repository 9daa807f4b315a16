"""Which part of a checkpoint has which boxes of a tensor, in few words: one rank of a thousand that
loads its own reads the tables of those parts that have some of it, and no others.

Where ranks hold equal boxes of a tensor one after another, as FSDP's do, a `Run` tells of all:

    Run(part=0, times=3, offsets=(0, 0), lengths=(4, 8), dim=0)
        part 0: [0:4,0:8]    part 1: [4:8,0:8]    part 2: [8:12,0:8]
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from everstep.errors import Corrupt
from everstep.format.boxes import Box
from everstep.format.document import find_flaw, natural
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.packs import Spec

Numbers = tuple[int, ...]
Placed = tuple[int, Numbers, Numbers]
"""A part, and offsets and lengths of a box that it has."""

_RUN = [natural, natural, [natural], [natural], natural]
_INDEX = {str: [str, [natural], [_RUN]]}


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


class Index:
    """All tensors of a checkpoint, and where they are."""

    def __init__(self, specs: Mapping[str, Spec], runs: Mapping[str, Sequence[Run]]) -> None:
        self.specs, self._runs = specs, runs

    def to_json(self) -> dict[str, Any]:
        """As it stands among a checkpoint's objects."""
        return {
            name: [spec.dtype, list(spec.shape), [_row(run) for run in self._runs[name]]]
            for name, spec in self.specs.items()
        }

    @classmethod
    def from_json(cls, value: Any, parts: int) -> "Index":
        """Of a checkpoint of so many parts. Raises Corrupt."""
        if flaw := find_flaw(value, _INDEX):
            raise Corrupt(f"reading what its writer noted of tensors: they{flaw}")
        specs, runs = {}, {}
        for name, (dtype, shape, rows) in value.items():
            specs[name] = Spec(name, dtype, tuple(shape))
            runs[name] = [Run(a, b, tuple(c), tuple(d), e) for a, b, c, d, e in rows]
            if dtype not in ITEM_SIZES or not all(
                _fits(run, len(shape), parts) for run in runs[name]
            ):
                raise Corrupt(f"reading what its writer noted of {name!r}: it cannot be so")
        return cls(specs, runs)

    def parts_of(self, name: str, boxes: Iterable[Box]) -> Iterator[int]:
        """The parts in which there is something of these boxes of a tensor."""
        for box in boxes:
            for run in self._runs[name]:
                yield from run.parts_of(box)


def _row(run: Run) -> list[Any]:
    return [run.part, run.times, list(run.offsets), list(run.lengths), run.dim]


def _fits(run: Run, ndim: int, parts: int) -> bool:
    is_there = run.part + run.times <= parts
    return is_there and len(run.offsets) == len(run.lengths) == ndim and run.dim < max(1, ndim)
