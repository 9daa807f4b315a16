"""What differs between two checkpoints: tensors, hyperparameters, objects.

Chunks that have the same digest in both are not read; of the others some are in memory at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from math import prod
from typing import Any

import torch

from everstep.format.boxes import Box, flat_boxes
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.packs import CHUNK_BYTES
from everstep.restore.whole import BATCH_BYTES, Whole, kind_of
from everstep.state.objects import plain_json
from everstep.store.copy import Progress

_ELEMENTS = 1 << 20
"""So many are compared at a time, in float64."""


@dataclass(slots=True)
class Change:
    """How far a tensor differs. `norm`: of the change, as of one vector; `norm_before`: of what it
    was, None where parts of it were not read, as they are equal. `changed`: elements that have
    other bits; `largest`: change of one of them. Not numbers where one of the two is none."""

    name: str
    elements: int
    changed: int = 0
    largest: float = 0.0
    squares: float = 0.0
    squares_before: float | None = 0.0

    @property
    def norm(self) -> float:
        """Of the change."""
        return math.sqrt(self.squares)

    @property
    def norm_before(self) -> float | None:
        """Of the tensor in the first checkpoint."""
        return None if self.squares_before is None else math.sqrt(self.squares_before)

    @property
    def rms(self) -> float:
        """Of the change of an element."""
        return math.sqrt(self.squares / max(1, self.elements))

    def to_json(self) -> dict[str, Any]:
        """For programs. What is no number is a text."""
        names = "name", "elements", "changed", "norm", "norm_before", "rms", "largest"
        found: dict[str, Any] = plain_json({n: getattr(self, n) for n in names}, self.name)
        return found


@dataclass(slots=True)
class Difference:
    """What a comparison came to. `other`: tensors of another dtype or shape: both, as text."""

    compared: list[Change] = field(default_factory=list)
    other: dict[str, tuple[str, str]] = field(default_factory=dict)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    hyperparameters: list[dict[str, Any]] = field(default_factory=list)
    """`optimizer`, `key`, both values, and the `parameters` of which they are."""
    objects: list[dict[str, Any]] = field(default_factory=list)
    """`path`, and both values, as tagged JSON; None where there is none."""
    bytes_compared: int = 0

    @property
    def changes(self) -> list[Change]:
        """Of tensors that differ."""
        return [change for change in self.compared if change.changed]

    @property
    def equal(self) -> list[str]:
        """The names of the others."""
        return [change.name for change in self.compared if not change.changed]

    @property
    def is_empty(self) -> bool:
        """Whether the two are the same state."""
        sides = (self.other, self.only_first, self.only_second, self.hyperparameters, self.objects)
        return not any((self.changes, *sides))

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        said = {key: value for key, value in asdict(self).items() if key != "compared"}
        return {"changed": [each.to_json() for each in self.changes], "equal": self.equal, **said}


def compare(
    first: Whole, second: Whole, progress: Progress = lambda done, total: None
) -> Difference:
    """Compare two checkpoints; blocks. Takes memory for some blocks; of a log for all of it. Raises
    Corrupt, Unavailable."""
    found = Difference()
    found.hyperparameters = _changed_hyperparameters(first, second)
    found.objects = list(_changed_objects("", _objects(first), _objects(second)))
    pairs = _paired(first, second, found)
    changes = {name: Change(name, prod(first.entries[name].spec.shape)) for name in pairs}
    rows: list[tuple[str, Box]] = []
    for name, change in changes.items():
        ranges = _ranges(first, second, name, pairs[name], change.elements)
        if sum(end - start for start, end in ranges) < change.elements:
            change.squares_before = None
        shape = first.entries[name].spec.shape
        rows += [(name, box) for start, end in ranges for box in flat_boxes(shape, start, end)]
    total = sum(first.size(*row) for row in rows)
    others = second.read_boxes((pairs[name], box) for name, box in rows)
    for (name, box, before), (_, _, after) in zip(first.read_boxes(rows), others, strict=True):
        _add(changes[name], before.flatten(), after.flatten())
        found.bytes_compared += first.size(name, box)
        progress(found.bytes_compared, total)
    found.compared = list(changes.values())
    return found


def _paired(first: Whole, second: Whole, found: Difference) -> dict[str, str]:
    """The tensors that can be compared, by their names in the first: those in the second. What
    cannot be is noted."""
    pairs = {}
    for name, entry in first.entries.items():
        called = (name, *entry.aliases)
        other = next(filter(None, map(second.firsts.get, called)), None)
        if other is None:
            found.only_first.append(name)
        elif (said := kind_of(entry)) != (told := kind_of(second.entries[other])):
            found.other[name] = said, told
        else:
            pairs[name] = other
    known = first.firsts.keys()
    found.only_second = [
        name for name, entry in second.entries.items() if known.isdisjoint((name, *entry.aliases))
    ]
    return pairs


def _ranges(
    first: Whole, second: Whole, name: str, other: str, elements: int
) -> list[tuple[int, int]]:
    """The elements, as ranges in row-major order, that may differ."""
    item = ITEM_SIZES[first.entries[name].spec.dtype]
    step = BATCH_BYTES // item
    pieces, others = first.contents.get(name), second.contents.get(other)
    if pieces and others and pieces.keys() == others.keys():
        pairs = (zip(pieces[box], others[box], strict=True) for box in pieces)
        if all(_are_equal(*pair) for pair in chain.from_iterable(pairs)):
            return []
        if len(pieces) == 1:
            step = CHUNK_BYTES // item
            (chunks,), (own,) = pieces.values(), others.values()
            differing = [
                n for n, pair in enumerate(zip(chunks, own, strict=True)) if not _are_equal(*pair)
            ]
            return [(n * step, min(elements, (n + 1) * step)) for n in differing]
    return [(start, min(elements, start + step)) for start in range(0, elements, step)]


def _are_equal(digest: str | None, other: str | None) -> bool:
    return digest == other is not None


def _add(change: Change, before: torch.Tensor, after: torch.Tensor) -> None:
    """These elements, too."""
    for a, b in zip(before.split(_ELEMENTS), after.split(_ELEMENTS), strict=True):
        differs = (_bits(a) != _bits(b)).any(-1)
        change.changed += int(differs.sum())
        a, b = _numbers(a), _numbers(b)
        delta = torch.where(differs, torch.linalg.vector_norm(b - a, dim=-1), 0.0)
        change.squares += float(delta.square().sum())
        change.largest = float(torch.tensor([change.largest, *delta.max()[None]]).max())
        if change.squares_before is not None:
            change.squares_before += float(a.square().sum())


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """By element, as bytes or words."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
    return flat.view(word).view(len(flat), -1)


def _numbers(flat: torch.Tensor) -> torch.Tensor:
    """By element, in float64: one number, or of a complex one two. Of what torch cannot convert,
    none is known."""
    if flat.is_complex():
        return torch.view_as_real(flat).double()
    if flat.dtype is torch.float4_e2m1fn_x2:
        return torch.full((len(flat), 1), math.nan, dtype=torch.float64)
    return flat.double()[:, None]


def _changed_hyperparameters(first: Whole, second: Whole) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for optimizer in sorted({*first.optimizers, *second.optimizers}):
        sets, others = _by_parameter(first, optimizer), _by_parameter(second, optimizer)
        for parameter in sorted({*sets, *others}):
            before, after = sets.get(parameter, {}), others.get(parameter, {})
            for key in sorted({*before, *after}):
                values = before.get(key), after.get(key)
                if values[0] != values[1]:
                    row = {"optimizer": optimizer, "key": key, "first": values[0]}
                    row |= {"second": values[1], "parameters": []}
                    rows.setdefault(repr((optimizer, key, values)), row)["parameters"] += [
                        parameter
                    ]
    return list(rows.values())


def _by_parameter(whole: Whole, optimizer: str) -> dict[str, Any]:
    """The set of hyperparameters of each."""
    sets = whole.manifest.hyperparameters.get(optimizer, [])
    groups = whole.optimizers.get(optimizer, {}).get("groups", {})
    return {name: sets[index] for name, index in groups.items() if index < len(sets)}


def _objects(whole: Whole) -> dict[str, Any]:
    """All that is no tensor, the ranks' own too; of streams what names their content."""
    said = whole.manifest
    ranks = {f"rank {rank}": own for rank, own in enumerate(said.ranks)}
    streams = {name: stream.part.digest for name, stream in said.streams.items()}
    return {**said.objects, **ranks, **({"streams": streams} if streams else {})}


def _changed_objects(path: str, first: Any, second: Any) -> Iterator[dict[str, Any]]:
    if first == second and repr(first) == repr(second):  # 1 is not 1.0, nor True
        return
    if not all(isinstance(each, dict) and "$" not in each for each in (first, second)):
        yield {"path": path, "first": first, "second": second}
        return
    for key in sorted({*first, *second}):
        below = f"{path}.{key}" if path else key
        yield from _changed_objects(below, first.get(key), second.get(key))
