"""What differs between two checkpoints: tensors, hyperparameters, objects.

Chunks that have the same digest in both are not read; of the others some are in memory at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from everstep.format.boxes import Box, flat_boxes
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.packs import CHUNK_BYTES, chunk_count
from everstep.restore.whole import Whole, kind_of
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
    norm: float = 0.0
    norm_before: float | None = 0.0
    largest: float = 0.0


def compare(
    first: Whole, second: Whole, progress: Progress = lambda done, total: None
) -> tuple[list[Change], dict[str, Any]]:
    """Compare two checkpoints; blocks. Returns how each tensor that both have has changed, or not;
    and what differs beside that:

        other                       tensors of another dtype or shape: both, as text
        only_first, only_second     names
        hyperparameters             optimizer, key, both values, the parameters of which they are
        objects                     path, and both values, as tagged JSON; None where there is none

    Takes memory for some blocks; of a log for all of it. Raises Corrupt, Unavailable."""
    pairs, others = _paired(first, second)
    changes = {name: Change(name, prod(first.entries[name].spec.shape)) for name in pairs}
    rows: list[tuple[str, Box]] = []
    for name, change in changes.items():
        boxes = list(_differing(first, second, name, pairs[name]))
        if sum(box.count for box in boxes) < change.elements:
            change.norm_before = None
        rows += [(name, box) for box in boxes]
    done, total = 0, sum(first.size(*row) for row in rows)
    told = second.read_boxes((pairs[name], box) for name, box in rows)
    for (name, box, before), (_, _, after) in zip(first.read_boxes(rows), told, strict=True):
        _add(changes[name], before.flatten(), after.flatten())
        done += first.size(name, box)
        progress(done, total)
    others["hyperparameters"] = _changed_hyperparameters(first, second)
    others["objects"] = list(_changed_objects("", _objects(first), _objects(second)))
    return list(changes.values()), {**others, "bytes_compared": done}


def _paired(first: Whole, second: Whole) -> tuple[dict[str, str], dict[str, Any]]:
    """The tensors that can be compared, by their names in the first: those in the second; and what
    cannot be."""
    pairs, other, only_first = {}, {}, []
    for name, entry in first.entries.items():
        called = (name, *entry.aliases)
        twin = next(filter(None, map(second.firsts.get, called)), None)
        if twin is None:
            only_first.append(name)
        elif (said := kind_of(entry)) != (told := kind_of(second.entries[twin])):
            other[name] = said, told
        else:
            pairs[name] = twin
    known = first.firsts.keys()
    only_second = [
        name for name, entry in second.entries.items() if known.isdisjoint((name, *entry.aliases))
    ]
    return pairs, {"other": other, "only_first": only_first, "only_second": only_second}


def _differing(first: Whole, second: Whole, name: str, other: str) -> Iterator[Box]:
    """The boxes of a tensor that may differ: of chunks whose digests do, or are not known."""
    spec = first.entries[name].spec
    pieces, others = first.contents.get(name, {}), second.contents.get(other, {})
    if not pieces or pieces.keys() != others.keys():
        pieces = others = {Box.whole(spec.shape): (None,) * chunk_count(spec.size)}
    step = CHUNK_BYTES // ITEM_SIZES[spec.dtype]
    for piece, digests in pieces.items():
        for n, (digest, own) in enumerate(zip(digests, others[piece], strict=True)):
            if digest is None or digest != own:
                boxes = flat_boxes(piece.lengths, n * step, min(piece.count, (n + 1) * step))
                yield from (box.shifted(piece.offsets) for box in boxes)


def _add(change: Change, before: torch.Tensor, after: torch.Tensor) -> None:
    for a, b in zip(before.split(_ELEMENTS), after.split(_ELEMENTS), strict=True):
        differs = (_bits(a) != _bits(b)).any(-1)
        change.changed += int(differs.sum())
        a, b = _numbers(a), _numbers(b)
        delta = torch.where(differs, torch.linalg.vector_norm(b - a, dim=-1), 0.0)
        change.norm = math.hypot(change.norm, torch.linalg.vector_norm(delta))
        change.largest = float(torch.tensor([change.largest, *delta.max()[None]]).max())
        if change.norm_before is not None:
            change.norm_before = math.hypot(change.norm_before, torch.linalg.vector_norm(a))


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
    both = first.hyperparameters, second.hyperparameters
    for optimizer in sorted(set().union(*both)):
        sets, others = (each.get(optimizer, {}) for each in both)
        for parameter in sorted({*sets, *others}):
            for said in _changed_objects("", sets.get(parameter, {}), others.get(parameter, {})):
                row = {"optimizer": optimizer, "key": said.pop("path"), **said}
                rows.setdefault(repr(row), {**row, "parameters": []})["parameters"] += [parameter]
    return list(rows.values())


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
