"""State: the user's dict of models, optimizers and values as leaves,
objects and hyperparameters."""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from everstep.errors import Mismatch, Unsupported
from everstep.format.document import digest_of
from everstep.sharding.fsdp1 import flat_parameters, units_of
from everstep.sharding.layout import is_dtensor
from everstep.sharding.leaves import (
    Guard,
    Leaf,
    bytes_of,
    check_tensor,
    find_aliases,
    has_elements,
    pieces_of,
)
from everstep.sharding.mapped import Layout, Mapped, described
from everstep.sharding.ranked import ByRank, Share, own_name, unowned
from everstep.sharding.redundancy import class_of
from everstep.sharding.topology import ALONE, PADDED
from everstep.sharding.world import World
from everstep.sharding.writers import (
    Holders,
    Twins,
    check_twins,
    shapes_of,
    shared_out,
    without_twins,
)
from everstep.state.entries import Entry, entries_of, overlaps_of, places_in, shares_of
from everstep.state.modules import ModuleState
from everstep.state.objects import tensors_in
from everstep.state.optimizers import OptimizerState
from everstep.state.overlaps import Memory, memory_of
from everstep.state.placement import Placement, Saved
from everstep.state.recorded import RecordShares
from everstep.state.stateful import GlobalGenerators, StatefulState, ValueState
from everstep.state.streams import StreamState

log = logging.getLogger("everstep")

_TORN_MAX = 2
_COMPARED_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Walk:
    """What changes rarely: the leaves, other names of theirs,
    and the optimizers' part of the table.

    The same object is returned for as long as nothing has changed. `names`: of the leaves, by id()
    (of a record's none).
    Of several ranks `leaves` are those that this one writes. `sharded`: the DTensors that leaves
    are parts of, which count what torch writes to them, and their parts do not.
    """

    leaves: tuple[Leaf, ...]
    names: Mapping[int, str]
    aliases: Mapping[str, list[str]]
    optimizers: Mapping[str, Any]
    sharded: tuple[Leaf, ...] = ()


@dataclass(frozen=True, slots=True)
class Collected:
    """The state at one call: the walk, tensors met in objects (copied at the call),
    and the objects; `own`: those of this rank alone."""

    walk: Walk
    loose: tuple[Leaf, ...]
    aliases: Mapping[str, list[str]]
    objects: dict[str, Any]
    hyperparameters: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """Of small tensors that all ranks should have alike, since the first one's count."""


class NestedTensors:
    """A TensorSink: gathers the tensors met in objects, which are copied at the call. One that is
    known already gets another name."""

    def __init__(
        self, names: Mapping[int, str], owners: Mapping[int, int | None], mapped: Mapped
    ) -> None:
        self._mapped = mapped
        self.leaves: dict[str, Leaf] = {}
        self.spread: list[Leaf] = []
        """Those that are DTensors, whole."""
        self.aliases: dict[str, list[str]] = {}
        self._names = names
        self._owners = owners
        self._seen: dict[int, tuple[str, torch.Tensor]] = {}
        """Keeps them alive, so that ids stay theirs."""

    def __call__(self, name: str, tensor: torch.Tensor) -> str:
        """Take it; raises Unsupported for one that cannot be stored."""
        key = id(tensor)
        known = self._names.get(key) or self._seen.get(key, (None,))[0]
        if known is not None:
            if known != name and name not in self.aliases.setdefault(known, []):
                self.aliases[known].append(name)
            return name
        check_tensor(name, tensor)
        if self._mapped.split(tensor) is not None:
            raise Unsupported(
                f"capturing {name!r}: it is a parameter that consists of boxes of other tensors "
                f"(layout=, FSDP), and cannot be part of an object as well"
            )
        if name in self.leaves:
            raise Unsupported(
                f"capturing {name!r}: two tensors are found under this name; rename one"
            )
        self._seen[key] = name, tensor
        whole = Leaf(name, tensor.detach(), self._owners.get(key))
        if is_dtensor(tensor):
            self.spread.append(whole)
        for leaf in pieces_of(whole):
            if has_elements(leaf):
                self.leaves[leaf.entry] = leaf
        return name

    def of_rank(self, rank: int) -> Callable[[str, torch.Tensor], str]:
        """The same, where tensors are one rank's own, and named so."""
        return lambda name, tensor: self(own_name(name, rank), tensor)

    def all_aliases(self, others: Mapping[str, list[str]]) -> Mapping[str, list[str]]:
        """More names of tensors, and these."""
        names = dict.fromkeys((*others, *self.aliases))
        found = {name: [*others.get(name, ()), *self.aliases.get(name, ())] for name in names}
        return found if self.aliases else others


def _hash_of(tensor: torch.Tensor) -> str:
    return digest_of(bytes_of(tensor).numpy().data)


def _digests_of(leaves: Iterable[Leaf]) -> dict[str, str]:
    """Of those that are whole, no rank's own, small, and on the CPU."""
    return {
        leaf.name: _hash_of(tensor)
        for leaf in leaves
        for tensor in [leaf.tensor]
        if leaf.box is None and unowned(leaf.name) == leaf.name
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj()
        if tensor.nbytes <= _COMPARED_BYTES_MAX and not tensor.is_neg()
    }


class State:
    """The state of a run. Not thread-safe: for the thread that trains."""

    def __init__(
        self,
        state: dict[str, Any],
        world: World | None = None,
        by_rank: Mapping[str, ByRank] | None = None,
        check_replicas: bool = False,
        layout: Layout | None = None,
    ) -> None:
        """`world`: None for one process alone. `by_rank`: parts that each rank has for itself, and
        what becomes of them on other ranks. `check_replicas`: `held` has digests.
        `layout`: what parameters and buffers are globally.
        Raises TypeError and ValueError for what is no state."""
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise TypeError("state must be a dict of names to models, optimizers and values")
        self._places = places_in(state)
        self._entries: list[Entry] = [*entries_of(self._places), GlobalGenerators()]
        if twice := sorted(name for name, count in Counter(self.parts).items() if count > 1):
            raise ValueError(
                f"several parts of the state have the same name, rename them: {twice} ('rng' is "
                f"that of the random generators)"
            )
        self.optimizers = [each for each in self._entries if isinstance(each, OptimizerState)]
        """By their index."""
        self.streams = [each for each in self._entries if isinstance(each, StreamState)]
        modules = [each for each in self._entries if isinstance(each, ModuleState)]
        self.modules: dict[str, nn.Module] = {each.name: each.module for each in modules}
        """The models, by their names."""
        stateful = [each for each in self._entries if isinstance(each, StatefulState)]
        self.in_bases_alone = [each.name for each in stateful if each.says("is_in_bases_alone")]
        """The parts whose tensors records may do without."""
        self.world = world or World(0, 1)
        if self.streams and not self.world.is_alone:
            raise Unsupported(
                f"capturing {self.streams[0].name!r}: streams of several ranks are not saved. Give "
                f"each rank's a store of its own (ranks=everstep.Ranks(alone=True))"
            )
        self._shares = shares_of(self._entries, by_rank or {}, self.world)
        self._holders = Holders(self.world)
        self._loose_holders = Holders(self.world, "objects")
        self._layout = ALONE
        self._records: RecordShares | None = None
        self._compares = check_replicas and not self.world.is_alone
        self._held: list[Leaf] = []
        self.mapped = Mapped(layout)
        self._is_renamed = layout is not None
        """Whether what is in a model may have any name."""
        for entry in self._entries:
            if isinstance(entry, ModuleState | OptimizerState):
                entry.mapped = self.mapped
        if layout or any(units_of(module) for module in self.modules.values()):
            self.name_parameters()  # whoever looks at parameters before the first walk
        self._check_overlaps()
        self._walk: Walk | None = None
        self._twins: Twins = []
        self._guard = Guard()
        self._owners: dict[int, int | None] = {}
        self._graphed: set[int] = set()
        self._memories: set[Memory | None] = set()
        self._overlapping: set[str] = set()
        self._torn: Counter[str] = Counter()
        self._late: Future[None] | None = None
        """What fills tensors of a restored state while training goes on."""
        self.user_seconds = 0.0
        """Spent in state_dict() methods that are not ours."""

    def parts_of(self, names: Iterable[str]) -> list[str]:
        """The optimizers, and the parts in which these tensors are."""
        heads = tuple(names)
        return [
            entry.name
            for entry in self._entries
            if isinstance(entry, OptimizerState)
            or (isinstance(entry, ModuleState) and self._is_renamed)
            or any(is_in(name, [entry.name]) for name in heads)
        ]

    @property
    def parts(self) -> list[str]:
        """The names of all parts, the nested ones too."""
        return [entry.name for entry in self._entries]

    def entries_of(self, part: str) -> list[Entry]:
        """What has this name, or a name in it."""
        return [entry for entry in self._entries if is_in(entry.name, [part])]

    def tensors_of(self, part: str) -> dict[str, torch.Tensor]:
        """The tensors of a part as it is now, by all names that they have in it; not those of
        optimizers' state."""
        found: dict[str, torch.Tensor] = {}
        for entry in self.entries_of(part):
            if not isinstance(entry, OptimizerState):
                found |= {leaf.name: leaf.tensor for leaf in entry.leaves(Guard())}
                found |= tensors_in(entry.objects)
        return {name: tensor for name, tensor in found.items() if is_in(name, [part])}

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """The state's own tensors, by all their names; of several ranks as they are here."""
        self.name_parameters()
        leaves = (leaf for entry in self._entries for leaf in entry.leaves(Guard()))
        return {leaf.name: leaf.tensor for leaf in leaves}

    def is_by_rank(self, part: str) -> bool:
        """Whether each rank has its own of something in this part."""
        return any(is_in(name, [part]) for name in self._shares)

    def collect(self) -> Collected:
        """The state at this moment, by reference: tensors are not copied here, objects are. Raises
        Unsupported where it has other parts than it was given with."""
        for place in self._places:
            place.check()
        graphed = {optimizer.index for optimizer in self.optimizers if optimizer.is_graphed}
        if self._walk is None or graphed != self._graphed or not self._guard.holds():
            self._graphed = graphed
            self._walk = self._walk_anew()
        walk = self._walk
        check_twins(self._twins)
        sink = NestedTensors(walk.names, self._owners, self.mapped)
        objects: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for entry in self._entries:
            began = time.perf_counter()
            share = None if self.world.is_alone else self._shares.get(entry.name)
            value = entry.objects(sink.of_rank(self.world.rank) if share else sink)
            if value is not None or isinstance(entry, ValueState | StatefulState):  # theirs is None
                if share:
                    own[entry.name] = share.to_json(value)
                else:
                    objects[entry.name] = value
            if isinstance(entry, StatefulState):
                self.user_seconds += time.perf_counter() - began
        hyperparameters = {entry.name: entry.hyperparameters(sink) for entry in self.optimizers}
        self._warn_of_overlaps(sink.leaves.values())
        aliases = sink.all_aliases(walk.aliases)
        loose = self._loose_shared_out(sink)
        digests = {} if self.world.is_alone else _digests_of(sink.leaves.values())
        return Collected(walk, loose, aliases, objects, hyperparameters, own, digests)

    @property
    def held_count(self) -> int:
        """How many `held` has; after `collect`."""
        return len(self._held)

    def held(self) -> dict[str, str]:
        """Digests of the tensors, or boxes of them, that this rank holds at this moment, by entry,
        where replicas are to be compared. Blocks while it reads them. After `collect`."""
        return {leaf.spec.entry: _hash_of(leaf.tensor) for leaf in self._held}

    def _check_overlaps(self) -> None:
        """Raises Unsupported for values in the memory of models and optimizers."""
        for each in overlaps_of(self._entries).values():
            if not each.is_of_values:
                raise Unsupported(
                    f"capturing {each.name!r}: it lies in memory of {each.other_name!r}, so that "
                    f"training or a restore of one changes the other. Clone it (tensor.clone(), "
                    f"copy.deepcopy(model.state_dict())), or leave it out of the state"
                )

    def _warn_of_overlaps(self, nested: Iterable[Leaf]) -> None:
        """Say it once where a value has come to lie in other memory: it is saved as it is."""
        values = [entry.name for entry in self._entries if isinstance(entry, ValueState)]
        found = {
            leaf.name
            for leaf in nested
            if memory_of(leaf.tensor) in self._memories and is_in(leaf.name, values)
        }
        if found <= self._overlapping:
            return
        self._overlapping |= found
        for each in overlaps_of(self._entries).values():
            if not each.is_of_values:
                log.warning(
                    "%r lies in memory of %r. It is saved as it is now, and has memory of its own "
                    "after a restore. If it is to be a copy, clone it",
                    each.name,
                    each.other_name,
                )

    def _loose_shared_out(self, sink: NestedTensors) -> tuple[Leaf, ...]:
        """What this rank writes of the tensors that were met in objects: what is no rank's own is
        the first one's, but for DTensors, which are shared out as all others are."""
        if self.world.is_alone:
            return tuple(sink.leaves.values())
        rank, own = self.world.rank, own_name("", self.world.rank)
        spread = [leaf for leaf in sink.spread if not leaf.name.endswith(own)]
        self._loose_holders.ask(shapes_of(spread, self.mapped))
        places = [place for leaf in spread for place in self.mapped.places(leaf, None)]
        written, _ = shared_out(places, self._loose_holders, rank)
        others = (
            leaf
            for leaf in sink.leaves.values()
            if leaf.name.endswith(own) or (rank == 0 and leaf.box is None)
        )
        return (*others, *written)

    def layout(self) -> str:
        """How the tensors are spread over the ranks, as a digest. All ranks ask."""
        if self.world.is_alone and self.mapped.is_empty:
            return ALONE
        if self._walk is None:
            self._walk_anew()
        return self._layout if self.world.is_alone else self._holders.digest

    @property
    def is_common(self) -> bool:
        """Whether all ranks have the same tensors, or a part of each; once it was collected."""
        return self.world.is_alone or self._holders.is_common

    def suspect(self, names: Iterable[str]) -> None:
        """These were written to while they were being copied, by something that is no optimizer.

        Once may be a mistake. A model that does so by itself (nn.Embedding with max_norm rewrites
        its weight in forward) does it again: from the second time on they are copied at the call.
        """
        again = []
        for name in names:
            self._torn[name] += 1
            if self._torn[name] == _TORN_MAX:
                self._walk = None
                again.append(name)
        if again:
            log.warning(
                "%s written to outside of optimizer.step() for the second time while being copied: "
                "from now on copied at the call, which takes longer",
                ", ".join(again[:5]) + (f" and {len(again) - 5} more" if len(again) > 5 else ""),
            )

    def place(self, saved: Saved) -> Placement:
        """A restore of that, on this rank."""
        share = Share(self.world.rank, self.world.size)
        return Placement(saved, self._shares, default_share=share, mapped=self.mapped)

    def place_rest(
        self, saved: Saved, names: Set[str], derived: Iterable[torch.Tensor]
    ) -> Placement:
        """What a replay does not bring: it brings optimizers' tensors and `derived`, which are
        `names` in the checkpoint, and must have been found to fit before."""
        settled = {id(tensor) for each in self.optimizers for _, tensor, *_ in each.tensors()}
        settled |= {id(tensor) for tensor in derived}
        return replace(self.place(saved), settled=settled, settled_names=names)

    def fill_later(self, fill: Callable[[], None]) -> None:
        """Do it beside training, in a thread of its own: `restore(first=...)`. One at a time."""
        executor = ThreadPoolExecutor(1, "everstep-late")
        self._late = executor.submit(fill)
        executor.shutdown(wait=False)

    def settle(self) -> None:
        """Before anybody reads or changes tensors: block until what was to follow is there. Raises
        what went wrong, each time until something else is restored."""
        if self._late:
            self._late.result()
            self._late = None

    def forget_late(self) -> None:
        """Block until nothing is filled any more; something else is restored, or nothing."""
        if self._late:
            self._late.exception()
            self._late = None

    def classes(self, only: list[str] | None = None) -> dict[str, str]:
        """Those of the optimizers, module and qualified name. `only`: names of parts."""
        return {
            each.name: class_of(each.optimizer)
            for each in self.optimizers
            if only is None or is_in(each.name, only)
        }

    def prepare(self, placement: Placement, only: list[str] | None) -> None:
        """Let each part say where its tensors go. `only`: names of parts; others are left alone."""
        offers = self.world.together("matching", lambda: self._prepare(placement, only))
        taken = self.world.gather("matching", "".join("01"[is_taken] for _, is_taken in offers))
        rows = zip(offers, zip(*taken, strict=True), strict=True)
        placement.problems += [problem for (problem, _), said in rows if "1" not in said]

    def check_chosen(self, only: list[str]) -> None:
        """Raises Mismatch where the state has no parts of these names. With all ranks."""
        self.world.together("matching", lambda: self._chosen(only))

    def _chosen(self, only: list[str]) -> list[Entry]:
        chosen = [entry for entry in self._entries if is_in(entry.name, only)]
        unknown = [part for part in only if not any(is_in(e.name, [part]) for e in chosen)]
        if not chosen or (unknown and self.world.is_alone):  # another rank may have it
            raise Mismatch(f"restoring {unknown}: the state has no such part, but {self.parts}")
        return chosen

    def _prepare(self, placement: Placement, only: list[str] | None) -> list[tuple[str, bool]]:
        for place in self._places:
            place.check()
        self.name_parameters()
        chosen = self._entries if only is None else self._chosen(only)
        placement.overlaps = overlaps_of(self._entries)
        for entry in chosen:
            entry.prepare(placement)
        self._walk = None
        return sorted(self._offers(placement, only))

    def _offers(self, placement: Placement, only: list[str] | None) -> Iterator[tuple[str, bool]]:
        """What the checkpoint has, of the parts to be restored: some rank's state must have it.
        The problem if none does, and whether this one does; the problems are the same on all."""
        saved, known = placement.saved, set(self.parts)

        def is_wanted(name: str) -> bool:
            return only is None or is_in(name, only)

        parts = saved.manifest.objects.keys() | saved.optimizers.keys()
        parts |= {name for own in saved.manifest.ranks for name in own}
        for name in filter(is_wanted, sorted(parts - known - {"rng"})):
            placement.problems.append(f"extra: the state has no {name!r}")
        for part in filter(is_wanted, known & saved.optimizers.keys()):
            for name in saved.optimizers[part]["groups"]:
                problem = f"missing: the state's {part} does not have {name!r}"
                yield problem, (part, name) in placement.optimized
        for name, entry in saved.tensors.items():
            names = (name, entry.spec.name, *entry.aliases)
            is_common = not name.startswith("rng.") and unowned(name) == name
            if is_common and is_wanted(name) and placement.settled_names.isdisjoint(names):
                is_used = not placement.used.isdisjoint(names)
                yield f"extra: the state has no tensor {name!r}", is_used

    def _walk_anew(self) -> Walk:
        self._guard = Guard()
        self.name_parameters()
        found = [leaf for entry in self._entries for leaf in entry.leaves(self._guard)]
        self._guard.begin()
        self._owners = owners = self._find_owners()
        self._memories = {memory_of(leaf.tensor) for leaf in found} - {None}
        leaves, aliases = find_aliases(
            Leaf(leaf.name, leaf.tensor, owners.get(id(leaf.tensor), leaf.owner)) for leaf in found
        )
        table = {entry.name: entry.table() for entry in self.optimizers}
        split = {leaf.name for leaf in leaves if self.mapped.split(leaf.tensor) is not None}
        names = {id(leaf.tensor): leaf.name for leaf in leaves if leaf.name not in split}
        aliases = {name: others for name, others in aliases.items() if name not in split}
        own, others = self._shared_out(leaves)
        self._held = [*own, *others] if self._compares else []
        held = _own_storages(
            [leaf._replace(owner=None) if self._is_eager(leaf) else leaf for leaf in own]
        )
        here = {leaf.name: leaf.owner for leaf in held}
        sharded = tuple(
            Leaf(leaf.name, leaf.tensor, here[leaf.name])
            for leaf in leaves
            if is_dtensor(leaf.tensor) and leaf.name in here
        )
        return Walk(tuple(held), names, aliases, table, sharded)

    def _shared_out(self, leaves: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        """What of them this rank writes, box by box, and what others write of them."""
        owned = (row for optimizer in self.optimizers for row in optimizer.owned())
        states = {id(leaf.tensor): state for leaf, state in owned if state}
        places, self._twins = without_twins(
            place
            for leaf in leaves
            for place in self.mapped.places(leaf, states.get(id(leaf.tensor)))
        )
        parameters = [p for each in self.optimizers for _, _, p, _ in each.parameters()]
        rows, is_padded = described(parameters, self.mapped)
        boxes = digest_of(json.dumps(rows).encode()) if rows else ""
        if self.world.is_alone:
            self._layout = f"{ALONE} {boxes}".strip() + (PADDED if is_padded else "")
            return [place.leaf for place in places], []
        self._records = None
        asked = (leaf for leaf in leaves if id(leaf.tensor) not in states)
        self._holders.ask(shapes_of(asked, self.mapped), boxes + (PADDED if is_padded else ""))
        return shared_out(places, self._holders, self.world.rank)

    def record_shares(self) -> RecordShares:
        """What this rank of several writes of a record; after `collect`."""
        if self._records is None:
            self._records = RecordShares(self.optimizers, self._holders, self.world.rank)
        return self._records

    def _is_eager(self, leaf: Leaf) -> bool:
        """Whether nobody can hold what writes to it: it is copied at the call."""
        return self._torn[leaf.name] >= _TORN_MAX or leaf.owner in self._graphed

    def name_parameters(self) -> None:
        """Tell optimizers and layouts what their parameters are called now."""
        names: dict[int, str] = {}
        self.mapped.forget()
        for entry in self._entries:
            if isinstance(entry, ModuleState):
                for name, parameter, shards in flat_parameters(entry.module, entry.name):
                    self.mapped.note(name, parameter, shards)
                for key, name in entry.parameter_names().items():
                    names.setdefault(key, name)
            elif isinstance(entry, ValueState):
                for name, tensor in entry.tensors().items():
                    names.setdefault(id(tensor), name)
        for optimizer in self.optimizers:
            optimizer.parameter_names = names

    def _find_owners(self) -> dict[int, int | None]:
        """The optimizer of each parameter; None where several have it:
        it is copied at the call then."""
        owners: dict[int, int | None] = {}
        for optimizer in self.optimizers:
            for _, _, parameter, _ in optimizer.parameters():
                several = owners.get(id(parameter), optimizer.index) != optimizer.index
                owners[id(parameter)] = None if several else optimizer.index
        return owners


def _own_storages(leaves: list[Leaf]) -> list[Leaf]:
    """The leaves, without an owner where others write to the same memory (views): copied at the
    call, and all of them in the last step of a window."""
    rows = [(leaf, leaf.tensor.untyped_storage().data_ptr()) for leaf in leaves]
    owners: dict[int, set[int | None]] = {}
    for leaf, pointer in rows:
        owners.setdefault(pointer, set()).add(leaf.owner)
    return [
        leaf._replace(owner=None) if pointer and len(owners[pointer]) > 1 else leaf
        for leaf, pointer in rows
    ]


def is_in(name: str, parts: Iterable[str]) -> bool:
    """Whether the tensor or part `name` is in one of these parts, or is it."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)
