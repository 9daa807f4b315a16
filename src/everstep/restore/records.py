"""The records of a log, each read and verified while the one before it is replayed."""

from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import torch

from everstep.format.manifest import Record
from everstep.format.tables import Table, TensorEntry, is_own
from everstep.replay.redo import Loaded
from everstep.restore.choose import Candidate, Described
from everstep.restore.load import Loader
from everstep.restore.slabs import Slabs, dtype_of


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
