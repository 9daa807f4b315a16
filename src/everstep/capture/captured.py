"""What is captured for a step: a whole state, or a part of one, as a state of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from everstep.format.tables import is_own
from everstep.redo.rolling_digest import Slice
from everstep.sharding.layout import local_of
from everstep.sharding.leaves import Leaf
from everstep.state.fingerprint import Fingerprint
from everstep.state.view import Collected, Walk

RECORD_OWNER = -1
"""No optimizer: its tensors are copied lazily, and no update is held for them."""

_FREE_BYTES = 64 << 10
"""Of tensors in objects: generators have some in each state."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What is to be captured for a step: a whole state; or the record that leads to it; or a share
    of a window (keeper/window.py), which is some pieces and the record for those before."""

    collected: Collected
    record: dict[str, Any] | None = None
    share: dict[str, Any] | None = None
    slices: Sequence[Slice] = ()
    """What is digested meanwhile; the digests are among its leaves."""
    is_awaited: bool = False
    """A whole state that is worth waiting for memory, because records go on from it."""

    @property
    def continues(self) -> bool:
        """Whether it goes on from what was captured before, which would be in vain without it."""
        return self.record is not None or bool(self.share and self.share["calls"] is not None)

    @property
    def commits(self) -> bool:
        """Whether it is a checkpoint, and not only a share of a later one."""
        return self.record is not None or self.share is None or self.share["ends"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a capture had beside what optimizers own, to tell later whether it is still so."""

    objects: dict[str, Any]
    hyperparameters: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    fingerprint: Fingerprint

    @classmethod
    def of(cls, collected: Collected) -> "Seen":
        """Of a state, or of a part of one."""
        leaves = (*unowned(collected.walk.leaves), *collected.loose)
        tensors = {leaf.entry: leaf.tensor for leaf in leaves}
        return cls(
            collected.objects, collected.hyperparameters, tensors, Fingerprint(leaves, follows=True)
        )

    def is_still(self, collected: Collected, *, is_alone: bool) -> bool:
        """Whether the state has all of that as it was. May wait for a device. Of several ranks each
        has other tensors of these, and they would not agree: there they are not looked at."""
        said = self.objects, self.hyperparameters
        if said != (collected.objects, collected.hyperparameters):
            return False
        if not is_alone:
            return True
        now = {
            leaf.entry: leaf.tensor for leaf in (*unowned(collected.walk.leaves), *collected.loose)
        }
        return not self.fingerprint.changed() and all(
            name in now and _are_equal(tensor, now[name]) for name, tensor in self.tensors.items()
        )


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it is the same memory, or has the same bytes."""
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    rows = [
        tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for tensor in (local_of(one), local_of(other))
    ]
    return rows[0].data_ptr() == rows[1].data_ptr() or torch.equal(*rows)


def shape_of(walk: Walk) -> tuple[Any, ...]:
    """What has to be as it was for records to go on from a base, to be compared: which tensors, and
    where those of optimizers lie. The others may be made anew at each step (`self.mean = ...`):
    records hold them whole, or rules derive them."""
    leaves = [
        (
            leaf.spec,
            leaf.strides,
            leaf.tensor.device,
            leaf.owner,
            None if leaf.owner is None else (id(leaf.tensor), local_of(leaf.tensor).data_ptr()),
        )
        for leaf in walk.leaves
    ]
    return leaves, walk.aliases, walk.optimizers


def moved(before: tuple[Any, ...], now: tuple[Any, ...]) -> list[str]:
    """Of two such shapes: the names of what optimizers own in both, and is in other memory now."""
    then = {spec: place for spec, *_, place in before[0] if place}
    rows = ((spec, place) for spec, *_, place in now[0] if place)
    return [spec.name for spec, (_, at) in rows if then.get(spec, (None, at))[1] != at]


def part_of(
    collected: Collected,
    leaves: tuple[Leaf, ...],
    loose: tuple[Leaf, ...],
) -> Collected:
    """Those leaves as a state of their own, and of those in objects these."""
    names = {id(leaf.tensor): leaf.name for leaf in leaves}
    kept = {leaf.name for leaf in (*leaves, *loose)}
    aliases = {name: found for name, found in collected.aliases.items() if name in kept}
    sharded = tuple(leaf for leaf in collected.walk.sharded if leaf.name in kept)
    walk = Walk(leaves, names, {}, collected.walk.optimizers, sharded)
    return replace(collected, walk=walk, loose=loose, aliases=aliases)


def reserved(leaves: Iterable[Leaf]) -> list[str]:
    """Names that a record could not tell from its own."""
    return [leaf.name for leaf in leaves if not leaf.name or is_own(leaf.name)]


def unowned(leaves: Iterable[Leaf]) -> list[Leaf]:
    """What no optimizer owns."""
    return [leaf for leaf in leaves if leaf.owner is None]


def size_of(collected: Collected) -> int:
    """Bytes of a whole state."""
    return sum(leaf.tensor.nbytes for leaf in collected.walk.leaves) + loose_bytes(collected.loose)


def loose_bytes(leaves: Iterable[Leaf]) -> int:
    """Of tensors met in objects (a state_dict(), a value), which no walk has, where they are
    many."""
    return max(0, sum(leaf.tensor.nbytes for leaf in leaves) - _FREE_BYTES)
