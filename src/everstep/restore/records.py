"""The records of a log, read and verified while the one before them is replayed."""

import mmap
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch

from everstep.format.global_tensors import Described, optimizers_of, whole_tensors
from everstep.format.manifest import Record
from everstep.format.packs import round_up
from everstep.format.tables import Table, TensorEntry, is_gradient, is_own
from everstep.redo import compression
from everstep.redo.replay import Comparison, Loaded, check, find, of_rank
from everstep.restore.chain import Chain
from everstep.restore.choose import Candidate
from everstep.restore.deliver import Delivery, empty, shaped
from everstep.restore.load import Loader
from everstep.sharding.layout import LocalBox, is_dtensor, local_of, shards_like
from everstep.sharding.ranked import own_name, unowned
from everstep.sharding.world import World
from everstep.state.optimizers import OptimizerState

_IN_FLIGHT = 2
"""Loads at once, so that a disk does not idle between two records; memory is there for as many: for
the one that is replayed, and the next."""

_TABLES_MAX = 16
"""That are remembered of a log without an end."""

_ALIGN = 64
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_UNUSED = 2
"""References to a slab that nobody uses: of the one who asks, and of getrefcount itself."""


_United = tuple[Sequence[Table], Mapping[str, TensorEntry], Mapping[str, Mapping[str, int]]]
"""The tables of a record's parts, and what they say together: tensors, and groups (see Loaded)."""


class Records:
    """The records of a chain in their order. Iterate once, in a `with`: the first is read from its
    beginning on. Who lets go of what it got before it asks for the next leaves its memory to those
    that are read then."""

    def __init__(
        self,
        candidate: Candidate,
        chain: Chain,
        optimizers: Mapping[str, OptimizerState],
        loader: Loader,
        world: World,
        *,
        comparison: Comparison | None,
    ) -> None:
        """`optimizers`: those that are to consume the gradients, by name. `world`: of the ranks
        that replay, each its part. `comparison`: with the run's bytes, if that can be."""
        self._candidate = candidate
        self._optimizers = optimizers
        self._loader = loader
        self._world = world
        self.comparison = comparison
        self._base_step = chain.base.manifest.step
        self._since = _steps_of(chain.base)
        self._rows = chain.records
        self._united: dict[tuple[int, ...], _United] = {}
        """By the id() of tables, which are held in it."""
        self._owners: dict[str, torch.Tensor] = {}
        """The parameters, by name."""
        for state in optimizers.values():
            for _, name, parameter, _ in state.parameters():
                self._owners[name] = parameter
        self._is_on_cpu = all(each.device.type == "cpu" for each in self._owners.values())
        self._slabs = Slabs()
        self._waiting = deque(self._rows)
        self._begun: deque[Future[Loaded]] = deque()
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, "everstep-records")

    def __enter__(self) -> "Records":
        self._begin(1)
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        self._waiting.clear()
        # After an error none may go on reading, and the next attempt needs the memory.
        self._pool.shutdown(wait=bool(failure), cancel_futures=True)
        self._slabs.clear()

    def __iter__(self) -> Iterator[Loaded]:
        while self._begun or self._waiting:
            if not self._is_on_cpu:  # what a device still computes with is not free yet
                wait(self._begun)
            self._begin(_IN_FLIGHT)
            loaded = self._begun.popleft().result()
            yield _used_here(loaded)
            del loaded

    def check(self) -> None:
        """Raises Mismatch where an optimizer that was called is not there, or is another, or has
        parameters together that were apart then; Corrupt where what a record says of a call is
        none. Reads nothing."""
        for record, tables in self._rows:
            self._check(record, tables)

    def take(self, record: Record, tables: tuple[Table, ...]) -> Loaded:
        """One more, which comes after all others; blocks while it is read. Raises as `check` and
        iterating do."""
        self._check(record, tables)
        return self._load(record, tables)

    def _check(self, record: Record, tables: tuple[Table, ...]) -> None:
        _, tensors, groups = self._unite(tables)
        for number, call in enumerate(record.calls):
            state = find(record.step, call, self._optimizers)
            own = groups.get(state.name, {})
            said = of_rank(call, self._world.rank, self._world.size)
            check(record.step, f"@{number}", said, own, state, tensors)

    def _unite(self, tables: Sequence[Table]) -> _United:
        key = tuple(map(id, tables))  # most steps share them
        if key not in self._united:
            if len(self._united) >= _TABLES_MAX and not self._waiting:
                self._united.clear()
            optimizers = optimizers_of(tables)
            groups = {name: found["groups"] for name, found in optimizers.items()}
            self._united[key] = tables, whole_tensors(tables), groups
        return self._united[key]

    def _begin(self, count: int) -> None:
        while self._waiting and len(self._begun) < count:
            self._begun.append(self._pool.submit(self._load, *self._waiting.popleft()))

    def _load(self, record: Record, tables: Sequence[Table]) -> Loaded:
        """Read and verify one; blocks. Raises Corrupt, Unavailable."""
        _, stored, groups = self._unite(tables)
        # The parameters that are of this step, or of a later one, already.
        ahead = {name for name, step in self._since.items() if step >= record.step}
        calls = [of_rank(call, self._world.rank, self._world.size) for call in record.calls]
        wanted = self._tensors(calls, self._needed(record, stored, ahead))
        left = {name: list(map(Delivery.to, places)) for name, (_, places) in wanted.items()}
        for part, table in zip(record.parts, tables, strict=True):
            self._loader.load(self._candidate, part, table, left)
        tensors = {name: tensor for name, (tensor, _) in wanted.items()}
        is_whole = not ahead or record.step >= self._base_step
        comparison = self.comparison if is_whole else None
        return Loaded(record.step, tuple(calls), tensors, groups, comparison)

    def _tensors(
        self, calls: Sequence[Mapping[str, Any]], needed: Iterable[tuple[str, TensorEntry]]
    ) -> dict[str, tuple[torch.Tensor, list[LocalBox]]]:
        """Memory for what is needed of a record, by name, and the boxes that go there: where its
        parameter is, and as much of a gradient as this rank has of it. Of one that is compressed,
        all: redo cuts it."""
        unlike = {
            f"@{number}.{name}"
            for number, call in enumerate(calls)
            for name, said in compression.by_parameter(call).items()
            if not compression.has_shape(said)
        }
        owners: dict[str, torch.Tensor] = {}
        places: list[tuple[str, TensorEntry, torch.device]] = []
        for name, whole in needed:
            entry, parameter = whole, name.partition(".")[2]
            owner = self._owners.get(parameter)
            is_alike = owner is not None and entry.spec.shape == tuple(owner.shape)
            if owner is not None and is_alike and is_gradient(name) and name not in unlike:
                owners[name] = owner
                if is_dtensor(owner):  # this rank needs as much as it has of the parameter
                    spec = replace(entry.spec, shape=tuple(local_of(owner).shape))
                    entry = replace(entry, spec=spec, pieces=(), strides=None)
            device = torch.device("cpu") if owner is None else owner.device
            places.append((name, entry, device))
        on_cpu = [(name, entry) for name, entry, device in places if device.type == "cpu"]
        made = self._slabs.tensors(entry for _, entry in on_cpu)
        tensors = {name: tensor for (name, _), tensor in zip(on_cpu, made, strict=True)}
        found: dict[str, tuple[torch.Tensor, list[LocalBox]]] = {}
        for name, entry, device in places:
            tensor = tensors[name] if name in tensors else empty(entry, device)
            shards = shards_like(owners.get(name, tensor), tensor)[1]
            found[name] = tensor, shards
        return found

    def _needed(
        self, record: Record, stored: Mapping[str, TensorEntry], ahead: Set[str]
    ) -> Iterator[tuple[str, TensorEntry]]:
        """The record's own tensors that this rank consumes something of."""
        size = max((len(call.get("ranks", ())) for call in record.calls), default=0)
        rank = self._world.rank
        for name, whole in stored.items():
            head, _, parameter = name.partition(".")
            is_consumed = parameter in self._owners and parameter not in ahead
            if not is_own(name) or (is_gradient(name) and not is_consumed):
                continue
            # Other ranks have clipped what is needed here.
            is_common = unowned(name) == name or head.endswith("!clip")
            is_others = not is_common and name != own_name(unowned(name), rank)
            if is_others and size == self._world.size:
                continue
            yield name, whole


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


def _used_here(loaded: Loaded) -> Loaded:
    """Its memory was taken on the reader's stream, and is free again only when this thread's stream
    is done with it."""
    for tensor in loaded.tensors.values():
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return loaded


class Slabs:
    """Regions in which CPU tensors are placed, of one record after another: the first touch of new
    memory takes longer than all else that is done with a gradient there. In small pages: on a
    virtual machine whose host takes free memory back, huge ones cost five times as much at their
    first touch (docs/results.md). Thread-safe."""

    def __init__(self) -> None:
        self._slabs: list[memoryview] = []
        self._lock = threading.Lock()

    def tensors(self, entries: Iterable[TensorEntry]) -> list[torch.Tensor]:
        """New tensors as those were, but for their elements; on the CPU.

        Their memory is used again when none of them, and nothing that shares memory with them, is
        left: each storage holds a reference to its slab (torch.frombuffer).
        """
        chosen = list(entries)
        starts, end = [], 0
        for entry in chosen:
            starts.append(end)
            end += round_up(entry.spec.size, _ALIGN)
        with self._lock:
            slab = self._slab(end)
            return [_place(entry, slab, start) for entry, start in zip(chosen, starts, strict=True)]

    def clear(self) -> None:
        """Let go of all that nobody uses."""
        with self._lock:
            self._slabs.clear()

    def _slab(self, size: int) -> memoryview:
        kept, self._slabs = self._slabs, []
        found = None
        while kept:
            slab = kept.pop()
            is_free = sys.getrefcount(slab) == _UNUSED
            if is_free and found is None and len(slab) >= size:
                found = slab
            if slab is found or not is_free:
                self._slabs.append(slab)
        if found is None:
            found = memoryview(mmap.mmap(-1, max(size, 1), flags=_PRIVATE))
            self._slabs.append(found)
        return found


def _place(entry: TensorEntry, slab: memoryview, start: int) -> torch.Tensor:
    if not entry.spec.size:  # which frombuffer refuses
        return empty(entry)
    flat = torch.frombuffer(slab, dtype=torch.uint8, count=entry.spec.size, offset=start)
    return shaped(flat, entry)
