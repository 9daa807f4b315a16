"""A checkpoint → the live state: fill and install the state that it goes on from, then replay its
log, then place what no optimizer changes.

Nothing of the user's is changed before everything has been found to fit.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import torch

from everstep.errors import Corrupt, Unsupported
from everstep.format.manifest import Manifest, Record
from everstep.format.tables import Table, TensorEntry, is_own
from everstep.replay import selftest
from everstep.replay.redo import Loaded, find, redo
from everstep.restore.choose import Candidate, Described
from everstep.restore.derived import Derivation
from everstep.restore.load import Loader
from everstep.restore.slabs import Slabs, dtype_of
from everstep.state.optimizers import OptimizerState, owned_names
from everstep.state.placement import Placement, Saved
from everstep.state.rules import Rules
from everstep.state.topology import differences
from everstep.state.view import State

log = logging.getLogger("everstep")


@torch.inference_mode(False)  # whoever restores in it: what is made here is to be trained
def apply(
    candidate: Candidate,
    state: State,
    only: list[str] | None,
    must_be_exact: bool = False,
    rules: Rules | None = None,
) -> Manifest:
    """Put the checkpoint into the state; blocks. Returns its manifest. `rules`: of derived parts.

    Raises Mismatch (nothing was changed then), Corrupt (the state is half filled then), Unsupported
    for a part of a log, and for a log whose replay might not be exact where it must be.
    """
    base, *logs = candidate.describe()
    replayed = [base, *logs] if base.manifest.is_spread else logs
    differing = {
        text for described in replayed for text in differences(described.manifest.topology)
    }
    if must_be_exact and differing:
        optimizers = {optimizer.name: optimizer for optimizer in state.optimizers}
        found = selftest.describe(selftest.compare(replayed[-1].manifest.topology, optimizers))
        raise Unsupported(
            f"restoring step {candidate.name.step} exactly: it has to be replayed from step "
            f"{_first_step(base)}, and was recorded under {'; '.join(sorted(differing))}"
            f"{found and f' ({found})'}. Restore it there, or with exact='allow'"
        )
    if replayed and only is not None:
        elsewhere = (
            "" if base.manifest.is_spread else f", or only={only} of step {base.manifest.step}"
        )
        raise Unsupported(
            f"restoring only={only} of step {candidate.name.step}: it is stored with the redo "
            f"records since step {_first_step(base)}, which take the whole state. Restore all of "
            f"it, or make it whole first (everstep materialize {candidate.disk.root} "
            f"{candidate.name.step}){elsewhere}"
        )
    optimized = {name for table in base.tables for name in owned_names(table.optimizers)}
    derivation = Derivation(base, logs, rules, state, optimized)
    optimized |= derivation.names
    placement = _place(
        state,
        Saved.of(base.manifest, base.tables),
        state.parts_of(optimized) if replayed else only,
    )
    placement.check(base.manifest.step, candidate.disk.root)
    with Loader() as loader:
        if not replayed:
            _fill(candidate, base, placement, loader)
            placement.finish()
            return base.manifest
        return _replay(candidate, base, replayed, state, placement, optimized, loader, derivation)


def _replay(
    candidate: Candidate,
    base: Described,
    logs: Sequence[Described],
    state: State,
    placement: Placement,
    optimized: Set[str],
    loader: Loader,
    derivation: Derivation,
) -> Manifest:
    """The base first, for which `placement` is ready, then the records: its own, where it is spread
    over several steps, and its log's. Returns the last manifest."""
    optimizers = {optimizer.name: optimizer for optimizer in state.optimizers}
    _check_calls(logs, optimizers)
    saved = _saved_after(base, logs[-1], optimized)
    _place(state, saved, None).check(candidate.name.step, candidate.disk.root)
    _fill(candidate, base, placement, loader)
    placement.finish()
    devices = {
        name: parameter.device
        for optimizer in optimizers.values()
        for _, name, parameter, _ in optimizer.parameters()
    }

    def fill(
        record: Record, table: Table, here: list[tuple[TensorEntry, list[torch.Tensor]]]
    ) -> None:
        with candidate.sources(record.part) as sources:
            loader.load(record.part, sources, here, table)

    live = state.live_tensors()
    for loaded in prefetched(candidate, logs, devices, loader):
        redo(loaded, optimizers)
        derivation.after(loaded, live, fill)
        del loaded  # its gradients' memory is for the one after the next
    rest = _place(state, saved, None)
    _fill(candidate, logs[-1], rest, loader, optimized)
    _fill_from_live(rest, state.live_tensors() | derivation.live(), logs[-1], optimized)
    rest.finish()
    for name, optimizer in optimizers.items():
        for index, values in enumerate(logs[-1].manifest.hyperparameters[name]):
            if index < len(optimizer.optimizer.param_groups):
                optimizer.prune(index, values)
    return logs[-1].manifest


def _check_calls(logs: Sequence[Described], optimizers: Mapping[str, OptimizerState]) -> None:
    """Raises Mismatch where an optimizer that was called is not there, or is another."""
    for described in logs:
        for record in described.manifest.records:
            for call in record.calls:
                try:
                    find(record.step, call, optimizers)
                except (KeyError, TypeError) as error:
                    raise Corrupt(f"reading the record of step {record.step}: {error!r}") from error


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


def _first_step(base: Described) -> int:
    """Of what has to be there before anything is replayed."""
    return min(part.steps for part in base.manifest.parts)


def _place(state: State, saved: Saved, only: list[str] | None) -> Placement:
    placement = Placement(saved)
    state.prepare(placement, only)
    return placement


def _fill(
    candidate: Candidate,
    described: Described,
    placement: Placement,
    loader: Loader,
    but: Set[str] = frozenset(),
) -> None:
    """Load what the checkpoint has of its own, but for those names; the rest is there already."""
    for part, table in zip(described.manifest.all_parts, described.tables, strict=True):
        here = [
            (entry, tensors)
            for name, (entry, tensors) in placement.destinations.items()
            if table.tensors.get(name) is entry and but.isdisjoint((name, *entry.aliases))
        ]
        with candidate.sources(part) as sources:
            loader.load(part, sources, here, table)


def _saved_after(base: Described, last: Described, optimized: Set[str]) -> Saved:
    """What the state has after the last record: of the base what optimizers change, by all its
    names, and all else as the record has it."""
    before = Saved.of(base.manifest, base.tables)
    after = Saved.of(last.manifest, last.tables)
    kept = {
        name: entry
        for name, entry in before.tensors.items()
        if not optimized.isdisjoint((entry.spec.name, *entry.aliases))
    }
    own = {name: entry for name, entry in after.tensors.items() if not is_own(name)}
    return replace(after, tensors={**kept, **own})


def _fill_from_live(
    placement: Placement, live: Mapping[str, torch.Tensor], last: Described, optimized: Set[str]
) -> None:
    """Where an object refers to what an optimizer changes: it gets what the replay came to."""
    own = {
        name
        for table in last.tables
        for name, entry in table.tensors.items()
        if optimized.isdisjoint((name, *entry.aliases))
    }
    with torch.no_grad():
        for name, (entry, tensors) in placement.destinations.items():
            source = next((live[key] for key in (name, *entry.aliases) if key in live), None)
            if name in own or source is None:
                continue
            for tensor in tensors:
                if tensor is not source:
                    tensor.copy_(source)


def prefetched(
    candidate: Candidate,
    logs: Sequence[Described],
    devices: dict[str, torch.device],
    loader: Loader,
) -> Iterator[Loaded]:
    """The records in order, each read and verified while the one before it is replayed; of the
    first, if it is a base that is spread, those that bring its pieces together. `devices`: of the
    parameters, to which their gradients go."""
    records = [row for described in logs for row in described.records]
    slabs = Slabs()
    base = logs[0]
    since = _steps_of(base)

    def load(record: Record, table: Table) -> Loaded:
        ahead = {name for name, step in since.items() if step >= record.step}
        loaded = _load(candidate, record, table, devices, loader, slabs, ahead)
        return replace(loaded, is_whole=not ahead or record.step >= base.manifest.step)

    with ThreadPoolExecutor(1, "everstep-records") as reader:
        futures = [reader.submit(load, *records[0])]
        for _, following in pairwise(records):
            current = futures.pop()
            loaded = current.result()
            futures.append(reader.submit(load, *following))
            yield loaded
            del current, loaded  # and with them the gradients' memory, which the next takes
        yield futures.pop().result()


def _load(
    candidate: Candidate,
    record: Record,
    table: Table,
    devices: dict[str, torch.device],
    loader: Loader,
    slabs: Slabs,
    ahead: Set[str],
) -> Loaded:
    """`ahead`: parameters that are of this step, or of a later one, already."""
    on_cpu: list[TensorEntry] = []
    wanted: list[tuple[TensorEntry, list[torch.Tensor]]] = []
    for name, entry in table.tensors.items():
        head, _, parameter = name.partition(".")
        if not is_own(name) or ("!" not in head and parameter in ahead):
            continue
        device = devices.get(parameter, torch.device("cpu"))
        if device.type == "cpu":
            on_cpu.append(entry)
        else:
            wanted.append((entry, [empty(entry, device)]))
    wanted += zip(on_cpu, ([tensor] for tensor in slabs.tensors(on_cpu)), strict=True)
    with candidate.sources(record.part) as sources:
        loader.load(record.part, sources, wanted, table)
    tensors = {entry.spec.name: found[0] for entry, found in wanted}
    groups = {name: found["groups"] for name, found in table.optimizers.items()}
    return Loaded(record.step, record.calls, tensors, groups)


def empty(entry: TensorEntry, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor as that one was, but for its elements."""
    shape, dtype = entry.spec.shape, dtype_of(entry)
    if entry.strides is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, entry.strides, dtype=dtype, device=device)
