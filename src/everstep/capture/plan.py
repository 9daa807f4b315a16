"""Where each tensor will lie in a slot's image, cached for as long as the tensors stay alike."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import ref
from zlib import crc32

from torch.nn import Parameter

from everstep.errors import Unsupported
from everstep.format.packs import Layout, lay_out, pack_starts
from everstep.format.tables import encode_table
from everstep.sharding.leaves import Leaf, forms_of, layer_of
from everstep.state.view import Collected, Walk


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout, its table document, and the offset of each tensor (or box of one) in the image, by
    its entry."""

    layout: Layout
    table: bytes
    offsets: dict[str, int]

    def headers(self) -> list[tuple[int, bytes]]:
        """(offset in the image, bytes) of each pack's header."""
        starts = pack_starts(pack.size for pack in self.layout.packs)
        return list(zip(starts, self.layout.headers, strict=True))

    def entries_of(self, turns: Set[int]) -> Set[str]:
        """What lies in their packs, unlike what is still, which has packs that are always due."""
        rows = zip(self.layout.specs, self.layout.pieces, strict=True) if turns else ()
        return {spec.entry for spec, at in rows if self.layout.packs[at.pack].turn in turns}


STILL_BYTES_MIN = 64 << 10
"""For less a file of its own costs more than it saves."""
STILL_GROUPS = 8
"""Files of frozen layers, from STILL_GROUPS * STILL_BYTES_MIN bytes on: who unfreezes
one layer has that part of the others written anew. Each save looks each of them up."""


class Still:
    """Which tensors seem not to change: they lie in packs of their own, and where a checkpoint
    before this one has the same bytes, its files are named in place of new ones. Parameters that no
    optimizer owns, until they change; and what the keeper has seen not to change.

    It is a hint for where tensors lie, and no more: by their digests alone it is decided what is
    written (keeper/still.py). The keeper compares them from state to state, too, and tells what has
    changed all the same, and what else has not. For the thread that trains, but for `hear`.
    """

    def __init__(self) -> None:
        self._told: dict[str, bool] = {}
        """What was taken for still, and was not, is not tried again."""
        self._news = 0
        self._last: tuple[ref[Walk], int, Mapping[str, int]] | None = None

    def hear(self, seen: Mapping[str, bool]) -> None:
        """The keeper has compared these entries with those of the state before: whether they are
        still. Any thread."""
        told = {name: is_still and self._told.get(name, True) for name, is_still in seen.items()}
        if not told.items() <= self._told.items():
            self._told |= told
            self._news += 1

    def look(self, walk: Walk) -> Mapping[str, int]:
        """Return which of these leaves are still, by their entries, and in which group: of layers
        that are frozen, or 1 of what else is. What leaves a group, or joins it, has that written
        anew."""
        news = self._news
        if self._last and self._last[0]() is walk and self._last[1] == news:
            return self._last[2]
        sizes = {leaf.entry: leaf.tensor.nbytes for leaf in walk.leaves if self._is_still(leaf)}
        size = sum(sizes.values())
        groups = STILL_GROUPS if size >= STILL_GROUPS * STILL_BYTES_MIN else 1
        found = {
            entry: 1 if entry in self._told else 2 + crc32(layer_of(entry).encode()) % groups
            for entry in (sizes if size >= STILL_BYTES_MIN else ())
        }
        self._last = ref(walk), news, found
        return found

    def _is_still(self, leaf: Leaf) -> bool:
        is_frozen = leaf.owner is None and isinstance(leaf.tensor, Parameter)
        return self._told.get(leaf.entry, is_frozen and not leaf.tensor.requires_grad)


class Planner:
    """Makes plans, and makes one anew only where names, dtypes, shapes, strides, devices or
    groups differ, or what seems not to change."""

    def __init__(self, still: Still | None = None) -> None:
        """`still`: None for records, which have nothing of the kind."""
        self._look = still
        self._plan: Plan | None = None
        self._made_of: tuple[Any, ...] = ()
        self._have_form: Callable[..., bool] = lambda *tensors: True
        self._known: tuple[ref[Walk], Any] | None = None
        """By reference only: a record's walk has gradients, whose memory is not to be held."""

    def plan(self, collected: Collected, turns: Mapping[str, int] = MappingProxyType({})) -> Plan:
        """The plan for this state; the same object as the last one where nothing differs. `turns`:
        of its tensors, by name, for what is saved in turn."""
        walk = collected.walk
        still = self._look.look(walk) if self._look else {}
        beside = tuple(leaf.spec for leaf in collected.loose), collected.aliases, still, turns
        known = self._known
        if self._plan and known and known[0]() is walk and known[1] == beside:
            return self._plan
        leaves = (*walk.leaves, *collected.loose)
        said = collected.aliases, walk.optimizers, still, turns
        made_of = [(leaf.name, leaf.box, leaf.shape) for leaf in leaves], *said
        tensors = [leaf.tensor for leaf in leaves]
        is_known = made_of == self._made_of and self._have_form(*tensors)
        if self._plan is None or not is_known:
            self._plan, self._made_of = _make(leaves, *said), made_of
            self._have_form = forms_of(tensors)
        self._known = ref(walk), beside
        return self._plan


def _make(
    leaves: Sequence[Leaf],
    aliases: Mapping[str, list[str]],
    optimizers: Mapping[str, Any],
    still: Mapping[str, int],
    turns: Mapping[str, int],
) -> Plan:
    specs = [leaf.spec for leaf in leaves]
    devices = {leaf.name: str(leaf.tensor.device) for leaf in leaves}
    strides = {leaf.name: found for leaf in leaves if (found := leaf.strides) is not None}
    names = [spec.entry for spec in specs] + [name for tied in aliases.values() for name in tied]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise Unsupported(
            f"capturing: several tensors have the same name, rename parts of the state: {twice}"
        )
    of_entries = {spec.entry: turns[spec.name] for spec in specs if spec.name in turns}
    layout = lay_out(specs, still, of_entries)
    starts = pack_starts(pack.size for pack in layout.packs)
    offsets = {
        spec.entry: starts[piece.pack] + piece.offset
        for spec, piece in zip(layout.specs, layout.pieces, strict=True)
    }
    return Plan(layout, encode_table(layout, aliases, devices, optimizers, strides), offsets)
