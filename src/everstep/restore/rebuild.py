"""The state after a log's last record, in memory, without the program: the optimizers are built
from what the records say, their class, which must be torch's own, and their hyperparameters.
"""

from collections.abc import Mapping
from typing import Any

import torch

from everstep.errors import Corrupt, Unsupported
from everstep.format.global_tensors import optimizers_of
from everstep.redo.replay import redo
from everstep.restore.buffer_pool import empty
from everstep.restore.chain import Chain, is_brought
from everstep.restore.choose import Candidate
from everstep.restore.fill import Wanted, fill
from everstep.restore.load import Loader
from everstep.restore.records import Records
from everstep.sharding.layout import LocalBox
from everstep.sharding.topology import ALONE
from everstep.sharding.world import World
from everstep.state.objects import decode
from everstep.state.optimizers import OptimizerState, install
from everstep.state.placement import Saved


def rebuilt(candidate: Candidate, chain: Chain, loader: Loader) -> dict[str, torch.Tensor]:
    """The tensors of the state after the last record, by name, on the CPU; blocks. What rules
    derive is left as it was at the base: nothing else depends on it.

    As exact as this process is like the one that wrote them (sharding.topology). Raises Corrupt;
    Unsupported for an optimizer that is not torch's own.
    """
    with torch.device("cpu"):
        wanted = _places(Saved.of(chain.base))
        tensors = {name: destination.tensor for name, (_, (destination,)) in wanted.items()}
        optimizers = _optimizers(candidate, chain, tensors)
        comparison = chain.comparison(ALONE, is_moved=bool(chain.moved()))
        with Records(
            candidate, chain, optimizers, loader, World(0, 1), comparison=comparison
        ) as records:
            records.check()
            fill(candidate, chain.base.versions, wanted, loader)
            for loaded in records:
                redo(loaded, optimizers)
                del loaded
        saved = chain.saved(chain.optimized)
        rest = _places(saved, chain.later_names, but=chain.optimized)
        fill(candidate, chain.versions, rest, loader)
    kept = {whole.spec.name for whole in saved.tensors.values()}
    found = {name: tensor for name, tensor in tensors.items() if name in kept}
    found |= {name: destination.tensor for name, (_, (destination,)) in rest.items()}
    for optimizer in optimizers.values():
        for _, parameter_name, parameter, _ in optimizer.parameters():
            for key, value in optimizer.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{optimizer.name}.{parameter_name}.{key}"] = value
    return found


def _places(
    saved: Saved, names: set[str] | None = None, but: set[str] | frozenset[str] = frozenset()
) -> Wanted:
    """New tensors for these (None: all), whole."""
    return {
        whole.spec.name: (whole, [LocalBox.whole(empty(whole))])
        for whole in {each.spec.name: each for each in saved.tensors.values()}.values()
        if (names is None or whole.spec.name in names) and not is_brought(whole, but)
    }


def _optimizers(
    candidate: Candidate, chain: Chain, tensors: Mapping[str, torch.Tensor]
) -> dict[str, OptimizerState]:
    """Those that the records call, as they are at the base once `tensors` are filled."""
    calls = [call for record, _ in chain.records for call in record.calls]
    classes = {call["optimizer"]: call["class"] for call in calls}
    tables = optimizers_of(chain.base.tables)
    found = {}
    for index, (key, kind) in enumerate(classes.items()):
        if key not in tables:
            raise Corrupt(f"replaying {candidate.name}: its base has no optimizer {key!r}")
        found[key] = _optimizer(key, kind, index, tables[key], chain, tensors)
    return found


def _optimizer(
    name: str,
    kind: str,
    index: int,
    table: Mapping[str, Any],
    chain: Chain,
    tensors: Mapping[str, torch.Tensor],
) -> OptimizerState:
    manifest = chain.base.manifest
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
