"""The first and the last record of a replay in portions, the first with those of the base: the
updates of those that have come are made while the others are read. Not all of an update is left to
do after the last read, nor has the first to wait for all of the base.

A portion is half of what is left, as an update takes less time than a read; so the last is small.
On the CPU only: a GPU's updates take no time, and which kernels torch takes there for some tensors
may depend on others.
"""

from collections.abc import Iterable, Mapping, Set

from everstep.format.global_tensors import GlobalTensor
from everstep.format.manifest import Record
from everstep.format.tables import is_gradient
from everstep.redo.coupling import why_not
from everstep.state.optimizers import OptimizerState

MIN_BYTES = 8 << 20
"""Of the first portion: what is less takes longer to be told apart than to be updated."""

COUNT_MAX = 4


def portions(
    record: Record, tensors: Mapping[str, GlobalTensor], optimizers: Iterable[OptimizerState]
) -> list[Set[str]]:
    """The names of the parameters with a gradient in the record, portion by portion, in the order
    in which they are stored. One portion where they have to be updated at once, or are few."""
    sizes: dict[str, int] = {}
    for name, whole in sorted(tensors.items(), key=lambda row: _place(row[1])):
        if is_gradient(name):
            parameter = name.partition(".")[2]
            size = sum(piece.size for entry in whole.entries for piece in entry.pieces)
            sizes[parameter] = sizes.get(parameter, 0) + size
    found: list[Set[str]] = []
    left = sum(sizes.values())
    if _is_apart(record, list(optimizers)):
        while len(found) + 1 < COUNT_MAX and left >= 2 * MIN_BYTES:
            portion = _half(sizes, left)
            found.append(portion)
            left -= sum(sizes.pop(name) for name in portion)
    return [*found, set(sizes)] if sizes or not found else found


def _half(sizes: Mapping[str, int], left: int) -> set[str]:
    """The first of them that make up half of what is left."""
    portion: set[str] = set()
    size = 0
    for name, each in sizes.items():
        if 2 * size >= left:
            break
        portion.add(name)
        size += each
    return portion


def _is_apart(record: Record, optimizers: list[OptimizerState]) -> bool:
    """Whether each optimizer was called once, by a call that may be made in several."""
    called = [call["optimizer"] for call in record.calls]
    said = [each for call in record.calls for each in (call, *call.get("ranks", ()))]
    is_plain = not any(each.get("compressed") or each.get("generators") for each in said)
    return is_plain and len(set(called)) == len(called) and why_not(optimizers) is None


def _place(whole: GlobalTensor) -> tuple[int, int]:
    """Where its first bytes are."""
    return min(
        ((piece.pack, piece.offset) for entry in whole.entries for piece in entry.pieces),
        default=(0, 0),
    )
