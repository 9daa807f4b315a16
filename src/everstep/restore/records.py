"""The records of a log, read and verified while the one before them is replayed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from everstep.format.global_tensors import GlobalTensor, optimizers_of, whole_tensors
from everstep.format.manifest import Record
from everstep.format.tables import Table, TensorEntry, is_gradient, is_own
from everstep.redo import compression
from everstep.redo.replay import Clip, Loaded, as_stored, clip, of_rank
from everstep.redo.samples import updated_name
from everstep.restore import gathering
from everstep.restore.buffer_pool import Slabs, dtype_of
from everstep.restore.choose import Candidate, Described
from everstep.restore.gathering import Consumers, Gathered, gradient_key
from everstep.restore.load import Loader
from everstep.restore.portions import COUNT_MAX, portions
from everstep.restore.prefetch import Ahead, Queued, Read
from everstep.sharding.layout import is_dtensor, local_of, shards_like
from everstep.sharding.ranked import own_name, unowned
from everstep.sharding.world import World
from everstep.state.optimizers import OptimizerState
from everstep.state.placement import Destination

_LOADS_IN_FLIGHT = 2
"""So that reads of the next wait where those of this one end: a disk that idles in between loses a
tenth. Memory is there for two anyway: for the one that is replayed, and the next; and for half as
much again of portions, which are taken in any order. On the CPU."""
_UNDIVIDED: Sequence[Set[str]] = (frozenset(),)


class Records:
    """The records of a log in their order, each read and verified while what comes before it is
    replayed; the first of them as soon as this is entered. Of a base that is spread, those that
    bring its pieces together. The first and the last come in portions, where that can be: the
    first with those of the base that it changes, so that its updates begin before all is read."""

    def __init__(
        self,
        candidate: Candidate,
        logs: Sequence[Described],
        optimizers: Iterable[OptimizerState] | None,
        loader: Loader,
        is_comparable: bool,
        world: World,
    ) -> None:
        """`logs`: with the base as the first, where it is spread. `optimizers`: that are to consume
        the gradients; None: all is read whole, to the CPU. `is_comparable`: whether a replay has to
        come to the run's own bytes. `world`: of the ranks that replay, each its part. Raises
        Mismatch."""
        self._world = world
        self._is_comparable = is_comparable
        self._candidate = candidate
        records = [row for described in logs for row in described.records]
        self._base_step = logs[0].manifest.step
        self._since = _steps_of(logs[0])
        self._united: dict[tuple[int, ...], United] = {}
        self._consumers = None if optimizers is None else Consumers.of(optimizers)
        if self._consumers:
            gathering.check(records, self._consumers.boxed, self._since)
        self._is_on_cpu = self._consumers is None or self._consumers.are_on_cpu
        self._loader = loader
        self._slabs = Slabs()
        self.portions = self._portions(*records[0], optimizers)
        """Of the first record: of which parameters each has the gradients."""
        reads = []
        for number, (record, tables) in enumerate(records):
            found = self.portions
            if number:
                is_last = number == len(records) - 1
                found = self._portions(record, tables, optimizers) if is_last else _UNDIVIDED
            for part in _parts(record, tables, found):
                reads.append(Read(partial(self._load, part), record.step))
        threads = _LOADS_IN_FLIGHT - 1 + 2 * COUNT_MAX  # all portions at once, and the base's
        self._ahead = Ahead(reads, _LOADS_IN_FLIGHT, threads, is_on_cpu=self._is_on_cpu)

    def __enter__(self) -> "Records":
        self._ahead.begin()
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        if failure:  # none may go on reading, and the next attempt needs the memory
            self._ahead.close(is_failed=True)
            self._slabs.release()
        else:  # not before: who takes new memory would wait for it
            self._ahead.later(self._slabs.release)
            self._ahead.close(is_failed=False)

    def read_base(self, loads: Sequence[Callable[[Queued], None]]) -> None:
        """Read these too, once, before iterating: each before the portion of the first record of
        the same number is given out. They run in other threads, several at once."""
        self._ahead.put_between(loads)

    def __iter__(self) -> Iterator[Loaded]:
        """Once. Who lets go of what it got before it asks for the next leaves its memory to those
        that are read then."""
        for loaded in self._ahead:
            yield _used_here(loaded)
            del loaded

    def _portions(
        self, record: Record, tables: Sequence[Table], optimizers: Iterable[OptimizerState] | None
    ) -> Sequence[Set[str]]:
        if optimizers is None or not self._is_on_cpu:  # a GPU's updates take no time
            return _UNDIVIDED
        return portions(record, self._unite(tables).tensors, optimizers)

    def _unite(self, tables: Sequence[Table]) -> "United":
        key = tuple(map(id, tables))  # most steps share them
        if key not in self._united:
            self._united[key] = United.of(tables)
        return self._united[key]

    def _load(self, part: "_Part", queued: Queued) -> Loaded:
        record = part.record
        ahead = {name for name, step in self._since.items() if step >= record.step}
        loaded = load_record(
            self._candidate,
            record,
            self._unite(part.tables),
            self._consumers,
            self._loader,
            self._slabs,
            self._world,
            ahead | part.without,
            queued,
        )
        is_whole = part.is_last and (not ahead or record.step >= self._base_step)
        is_comparable = is_whole and self._is_comparable
        return clip(replace(loaded, is_last=part.is_last, is_comparable=is_comparable))


@dataclass(frozen=True, slots=True)
class _Part:
    """What is read at once of a record: all of it, or it `without` the gradients of these."""

    record: Record
    tables: Sequence[Table]
    without: Set[str]
    is_last: bool


def _parts(record: Record, tables: Sequence[Table], found: Sequence[Set[str]]) -> Iterator[_Part]:
    """The record in these portions."""
    names = set().union(*found)
    for number, each in enumerate(found, 1):
        yield _Part(record, tables, names - each, is_last=number == len(found))


def _used_here(loaded: Loaded) -> Loaded:
    """Its memory was taken on the reader's stream, and is free again only when this thread's stream
    is done with it."""
    for tensor in loaded.tensors.values():
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return loaded


@dataclass(frozen=True, slots=True)
class United:
    """What the tables of a record's parts say together. `groups`: see Loaded."""

    tables: Sequence[Table]
    tensors: Mapping[str, GlobalTensor]
    groups: Mapping[str, Mapping[str, int]]

    @classmethod
    def of(cls, tables: Sequence[Table]) -> "United":
        """Of these."""
        optimizers = optimizers_of(tables)
        groups = {name: found["groups"] for name, found in optimizers.items()}
        return cls(tables, whole_tensors(tables), groups)


def load_record(
    candidate: Candidate,
    record: Record,
    united: United,
    consumers: Consumers | None,
    loader: Loader,
    slabs: Slabs,
    world: World,
    ahead: Set[str] = frozenset(),
    queued: Queued | None = None,
) -> Loaded:
    """Read and verify one; blocks. `consumers`: of its gradients; None: all is read, whole.
    `ahead`: parameters that are of this step, or of a later one, already. Raises Corrupt,
    Unavailable."""
    calls = tuple(of_rank(call, world.rank, world.size) for call in record.calls)
    plain, boxed = (consumers.plain, consumers.boxed) if consumers else ({}, ())
    gathered, apart = gathering.plan(record.step, calls, united.tensors, boxed, ahead)
    taken = None if consumers is None else {*plain, *apart}
    unlike = {
        f"@{number}.{name}"
        for number, call in enumerate(calls)
        for name, said in compression.by_parameter(call).items()
        if not compression.has_shape(said)
    }
    places: list[tuple[str, TensorEntry, torch.Tensor | None]] = []
    owners: dict[str, torch.Tensor] = {}
    for name, whole in _needed(record, united, world, ahead, taken):
        here = entry = whole.entries[0]
        owner = plain.get(name.partition(".")[2])
        is_part = is_gradient(name) and name not in unlike
        if owner is not None and is_part and entry.spec.shape == tuple(owner.shape):
            owners[name] = owner
            here = _part_of(entry, owner)
        places.append((name, here, owner))
    places += [(each.name, each.entry, each.of.parameter) for each in gathered]
    tensors = _memory(places, slabs)
    wanted: dict[str, list[Destination]] = {}
    for each in gathered:
        for name, destination in each.into(tensors[each.name]):
            wanted.setdefault(name, []).append(destination)
    for name, _, _ in places[: len(places) - len(gathered)]:
        tensor = tensors[name]
        shards = shards_like(owners.get(name, tensor), tensor)[1]
        wanted.setdefault(name, []).extend(Destination(box, memory) for box, memory in shards)
    for part, table in zip(record.parts, united.tables, strict=True):
        own = table.tensors
        rows = [(own[name], to) for name, to in wanted.items() if name in own]
        with candidate.sources(part) as sources:
            loader.load(part, sources, rows, table, queued)
    rank = None if world.is_alone else world.rank
    optimizers = {name: updated_name(name, rank) for name in united.groups}
    updated = {name: tensors[own] for name, own in optimizers.items() if own in tensors}
    clips = tuple(_clips(record.step, calls, tensors, gathered))
    return Loaded(record.step, calls, tensors, united.groups, updated=updated, clips=clips)


def _clips(
    step: int,
    calls: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, torch.Tensor],
    gathered: Sequence[Gathered],
) -> Iterator[Clip]:
    """What training clipped of these, but for what is compressed."""
    with as_stored(step):
        for number, call in enumerate(calls):
            at, compressed = f"@{number}", compression.by_parameter(call)
            for said in call.get("clips", ()):
                names = dict.fromkeys(name for name in said["names"] if name not in compressed)
                keys = (gradient_key(tensors, at, name) for name in names)
                memory = [tensors[key] for key in keys if key in tensors]
                for each in gathered:
                    if each.at == at:
                        memory += each.views(tensors[each.name], names)
                yield Clip(memory, tensors[said["coefficient"]], said["foreach"])


def _needed(
    record: Record, united: United, world: World, ahead: Set[str], taken: Set[str] | None
) -> Iterator[tuple[str, GlobalTensor]]:
    """The record's own tensors that this rank needs as they are. `taken`: parameters, or tensors,
    of the gradients among them; None: all."""
    size = max((len(call.get("ranks", ())) for call in record.calls), default=0)
    for name, whole in united.tensors.items():
        head, _, rest = name.partition(".")
        if not is_own(name) or (is_gradient(name) and rest in ahead):
            continue
        if is_gradient(name) and not (taken is None or rest in taken or name in taken):
            continue
        # Other ranks have clipped what is needed here.
        is_common = unowned(name) == name or head.endswith("!clip")
        if not is_common and size == world.size and name != own_name(unowned(name), world.rank):
            continue
        yield name, whole


def _memory(
    places: Iterable[tuple[str, TensorEntry, torch.Tensor | None]], slabs: Slabs
) -> dict[str, torch.Tensor]:
    """New tensors by name, each where its owner is; on the CPU where it has none."""
    on_cpu: dict[str, TensorEntry] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, entry, owner in places:
        if owner is None or owner.device.type == "cpu":
            on_cpu[name] = entry
        else:
            tensors[name] = empty(entry, owner.device)
    return tensors | dict(zip(on_cpu, slabs.tensors(on_cpu.values()), strict=True))


def _part_of(entry: TensorEntry, parameter: torch.Tensor) -> TensorEntry:
    """What of a gradient this rank needs: as much as it has of the parameter."""
    if not is_dtensor(parameter):
        return entry
    local = tuple(local_of(parameter).shape)
    return replace(entry, spec=replace(entry.spec, shape=local), pieces=(), strides=None)


def _steps_of(base: Described) -> dict[str, int]:
    """Where a base is spread: the step of each tensor in it."""
    if not base.manifest.is_spread:
        return {}
    return {
        name: part.steps
        for part, table in zip(base.manifest.parts, base.tables, strict=True)
        for entry in table.tensors.values()
        for name in (entry.spec.name, *entry.aliases)
        if not is_own(name)
    }


def empty(entry: TensorEntry, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor as that one was, but for its elements."""
    shape, dtype = entry.spec.shape, dtype_of(entry)
    if entry.strides is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, entry.strides, dtype=dtype, device=device)
