"""The state after a log's last record, in memory, without the program: the optimizers are built
from what the records say, their class, which must be torch's own, and their hyperparameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from everstep.errors import Corrupt, Unsupported
from everstep.format.global_tensors import optimizers_of
from everstep.format.manifest import Manifest, Record
from everstep.format.tables import is_own, owned_names
from everstep.redo.replay import redo
from everstep.restore.choose import Candidate, Described, has_to_be_equal, moved
from everstep.restore.derived import compare, derived_names
from everstep.restore.load import Loader
from everstep.restore.records import Records, empty
from everstep.sharding.topology import ALONE
from everstep.sharding.world import World
from everstep.state.objects import decode
from everstep.state.optimizers import OptimizerState, install
from everstep.state.placement import Destination
from everstep.tiers.disk import Disk


def rebuilt(
    candidate: Candidate,
    base: Described,
    logs: Sequence[Described],
    loader: Loader,
    without_derived: bool = False,
) -> dict[str, torch.Tensor]:
    """The tensors of the state after the last record, by name, on the CPU; blocks. `logs`: with the
    base as the first, where it is spread.

    `without_derived`: what rules derive is left as it was at the base; nothing else depends on it.
    As exact as this process is like the one that wrote them (state.topology). Raises Corrupt,
    Unsupported where it takes the program: an optimizer that is not torch's own, a derived part.
    """
    records = [record for described in logs for record in described.manifest.records]
    derived = sorted({part for record in records for part in record.ruled})
    if derived and not without_derived:
        raise Unsupported(
            f"replaying {candidate.name} of {candidate.disk.root} without the program: "
            f"{', '.join(map(repr, derived))} is derived by a rule of its own (derive=). Restore "
            f"the whole step there instead"
        )
    with torch.device("cpu"):
        return _replayed(candidate, base, logs, loader)


def _replayed(
    candidate: Candidate, base: Described, logs: Sequence[Described], loader: Loader
) -> dict[str, torch.Tensor]:
    constant = _constant(base, logs)
    is_comparable = has_to_be_equal(base, logs, ALONE, is_moved=bool(moved(base)))
    with Records(candidate, logs, None, loader, is_comparable, World(0, 1)) as records:
        tensors = _tensors_of(candidate, base, loader)
        optimizers = _rebuild(base, logs, tensors, candidate.disk)
        for loaded in records:
            redo(loaded, optimizers)
            record, parts = constant.get(loaded.step, (None, {}))
            for part, keys in parts.items():
                assert record
                compare(loaded, record, part, {key: tensors[key] for key in keys})
            del loaded
    for optimizer in optimizers.values():
        for _, parameter_name, parameter, _ in optimizer.parameters():
            for key, value in optimizer.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{optimizer.name}.{parameter_name}.{key}"] = value
    return tensors if logs[-1] is base else tensors | _tensors_of(candidate, logs[-1], loader)


def _constant(
    base: Described, logs: Sequence[Described]
) -> dict[int, tuple[Record, dict[str, set[str]]]]:
    """By step its record, and the names of the tensors in each part that nobody changes."""
    optimized = {name for table in base.tables for name in owned_names(table.optimizers)}
    rows = [record for each in logs if each is not base for record in each.manifest.records]
    parts = {part for record in rows for part in record.derived}
    names = {part: derived_names(base, {part}, optimized) for part in parts}
    return {
        record.step: (
            record,
            {part: names[part] for part in record.derived if part not in record.ruled},
        )
        for record in rows
    }


def _tensors_of(
    candidate: Candidate, described: Described, loader: Loader
) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint brings itself, on the CPU; no gradients."""
    found: dict[str, torch.Tensor] = {}
    steps: dict[str, int] = {}
    for part, table in zip(described.manifest.all_parts, described.tables, strict=True):
        wanted = []
        for key, entry in table.tensors.items():
            if is_own(key):
                continue
            is_whole = bool(described.manifest.parts) or steps.get(key) == part.steps
            if key not in found or not is_whole:  # each record has its own
                found[key], steps[key] = empty(entry), part.steps
            wanted.append((entry, [Destination.whole(found[key])]))
        with candidate.sources(part) as sources:
            loader.load(part, sources, wanted, table)
    return found


def _rebuild(
    base: Described, logs: Sequence[Described], tensors: dict[str, torch.Tensor], disk: Disk
) -> dict[str, OptimizerState]:
    """The optimizers that the records call, as they were at the base."""
    classes = {
        call["optimizer"]: call["class"]
        for described in logs
        for record in described.manifest.records
        for call in record.calls
    }
    tables = optimizers_of(base.tables)
    found = {}
    for index, (key, kind) in enumerate(classes.items()):
        if key not in tables:
            raise Corrupt(f"replaying from {disk.root}: the base has no optimizer {key!r}")
        found[key] = _optimizer(key, kind, index, tables[key], base.manifest, tensors)
    return found


def _optimizer(
    name: str,
    kind: str,
    index: int,
    table: Mapping[str, Any],
    manifest: Manifest,
    tensors: dict[str, torch.Tensor],
) -> OptimizerState:
    module, _, class_name = kind.rpartition(".")
    cls = getattr(torch.optim, class_name, None)
    if not module.startswith("torch.optim") or not isinstance(cls, type):  # nothing else is run
        raise Unsupported(
            f"replaying without the program: {name!r} is a {kind}, and only torch's own optimizers "
            f"can be built then. Restore the whole step there instead"
        )
    sets = manifest.hyperparameters[name]
    if any(values.get("capturable") for values in sets):
        raise Unsupported(
            f"replaying without the program: {name!r} is capturable, and torch steps such an "
            f"optimizer on a GPU only. Restore the whole step there instead"
        )
    members: dict[int, list[str]] = {number: [] for number in range(len(sets))}
    for parameter, number in table["groups"].items():
        members[number].append(parameter)
        leaf = tensors[parameter]
        leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        if leaf.requires_grad and hasattr(leaf, "grad_dtype"):
            leaf.grad_dtype = None  # whatever the record has
    optimizer = cls([{"params": [tensors[key] for key in keys]} for keys in members.values()])

    def tensor(key: str, _: str) -> torch.Tensor:
        return tensors[key]

    for group, values in zip(optimizer.param_groups, sets, strict=True):
        install(group, {key: decode(value, tensor) for key, value in values.items()})
    plain = (manifest.objects.get(name) or {}).get("state", {})
    optimizer.state.clear()
    for parameter in table["groups"]:
        state = {
            key: tensors[f"{name}.{parameter}.{key}"] for key in table["state"].get(parameter, ())
        }
        state |= decode(plain[parameter], tensor) if parameter in plain else {}
        if state:
            optimizer.state[tensors[parameter]] = state
    found = OptimizerState(name, optimizer, index)
    found.parameter_names = {id(tensors[parameter]): parameter for parameter in table["groups"]}
    return found
