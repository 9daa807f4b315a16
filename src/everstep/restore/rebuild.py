"""The state after a log's last record, in memory, without the program: the optimizers are built
from what the records say, their class, which must be torch's own, and their hyperparameters.
"""

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext

import torch

from everstep.errors import Corrupt, Unsupported
from everstep.format.global_tensors import Described, Version
from everstep.format.tables import TensorEntry
from everstep.offload.optimizer import OffloadedOptimizer
from everstep.redo.replay import redo
from everstep.restore.chain import Chain, is_brought
from everstep.restore.choose import Candidate
from everstep.restore.deliver import empty
from everstep.restore.load import Loader, fill
from everstep.restore.records import Records
from everstep.sharding.layout import LocalBox
from everstep.sharding.redundancy import OFFLOADED
from everstep.sharding.topology import ALONE, adopted
from everstep.sharding.world import World
from everstep.state.objects import as_stored
from everstep.state.optimizers import OptimizerState
from everstep.state.placement import Placement, Saved


class Rebuilt:
    """The tensors of a state after a log's last record, on the CPU, without the program; it can be
    brought on by the records that come after. What rules derive is left as it was at the base:
    nothing else depends on it.

    It is as exact as this process is like the one that wrote the log (sharding.topology), whose
    settings it takes on meanwhile. For one thread, whose methods block.
    """

    def __init__(
        self, candidate: Candidate, chain: Chain, loader: Loader, *, goes_on: bool = False
    ) -> None:
        """Reads the base, and replays the records. `goes_on`: others may come, by optimizers that
        no record has called yet. Raises Corrupt; Unsupported for an optimizer that is not torch's
        own."""
        self._candidate = candidate
        self._loader = loader
        self._base = chain.base
        self._optimized = chain.optimized
        self._logs = {_key_of(log): log for log in chain.logs}
        with adopted(chain.last.manifest.topology):
            placement = Placement(Saved.of(chain.base))
            classes = {call["optimizer"]: call["class"] for call in chain.calls}
            if goes_on:
                classes |= chain.last.manifest.classes
            self._optimizers = self._built(classes, placement)
            for entry in placement.saved.tensors.values():
                if entry.spec.name not in placement.destinations:
                    placement.new(entry.spec.name, "cpu")
            placement.check(chain.base.manifest.step, candidate.disk.root)
            wanted = placement.destinations
            self._tensors = {name: places[0].tensor for name, (_, places) in wanted.items()}
            with _on_cpu():
                self._records = Records(
                    candidate,
                    chain,
                    self._optimizers,
                    loader,
                    World(0, 1),
                    comparison=chain.comparison(ALONE, is_moved=bool(chain.moved())),
                )
                with self._records as records:
                    records.check()
                    fill(candidate, chain.base.versions, wanted, loader)
                    placement.finish()
                    for loaded in records:
                        redo(loaded, self._optimizers)
                        del loaded
                rest = chain.saved(self._optimized).tensors
                self._fill_rest(rest, chain.later_names, chain.versions)

    @property
    def chain(self) -> Chain:
        """Where it began, and of what came since all that is still needed: of records that have
        the same tables, the last."""
        return Chain(self._base, sorted(self._logs.values(), key=lambda log: log.manifest.step))

    def advance(self, log: Described) -> None:
        """Bring it from before the records of a log step to after them. Raises Mismatch; Corrupt,
        after which it is worth nothing."""
        chain = Chain(self._base, [log])
        with _on_cpu(), adopted(log.manifest.topology):
            self._records.comparison = chain.comparison(ALONE, is_moved=bool(chain.moved()))
            for record, tables in log.records:
                redo(self._records.take(record, tables), self._optimizers)
            self._fill_rest(log.tensors, log.tensors.keys(), log.versions)
        self._logs[_key_of(log)] = log

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the state, by name."""
        saved = self.chain.saved(self._optimized)
        kept = {whole.spec.name for whole in saved.tensors.values()}
        found = {name: tensor for name, tensor in self._tensors.items() if name in kept}
        for optimizer in self._optimizers.values():
            found |= {leaf.name: leaf.tensor for leaf in optimizer.tensors()}
        return found

    def _built(self, classes: Mapping[str, str], placement: Placement) -> dict[str, OptimizerState]:
        """Optimizers of these classes, by name, as they are at the base once that is placed."""
        tables = placement.saved.optimizers
        if lost := sorted(classes.keys() - tables.keys()):
            raise Corrupt(
                f"replaying {self._candidate.name}: its base has no optimizer {lost[0]!r}"
            )
        found = {}
        for index, (key, kind) in enumerate(classes.items()):
            tensors = {name: placement.new(name, "cpu") for name in tables[key]["groups"]}
            with _on_cpu(), as_stored(f"replaying {self._candidate.name}"):
                found[key] = self._optimizer(key, kind, index, tensors)
            found[key].prepare(placement)
        return found

    def _optimizer(
        self, name: str, kind: str, index: int, tensors: Mapping[str, torch.Tensor]
    ) -> OptimizerState:
        """`tensors`: its parameters, by name."""
        module, _, class_name = kind.removeprefix(OFFLOADED).rpartition(".")
        cls = getattr(torch.optim, class_name, None)
        if not module.startswith("torch.optim") or not isinstance(cls, type):  # nothing else is run
            raise Unsupported(
                f"replaying without the program: {name!r} is a {kind}, and only torch's own "
                f"optimizers can be built then. Restore the whole step there instead"
            )
        sets = self._base.manifest.hyperparameters[name]
        if any(values.get("capturable") for values in sets):
            raise Unsupported(
                f"replaying without the program: {name!r} is capturable, and torch steps such an "
                f"optimizer on a GPU only. Restore the whole step there instead"
            )
        members: dict[int, list[str]] = {number: [] for number in range(len(sets))}
        for parameter, number in self._base.optimizers[name]["groups"].items():
            members[number].append(parameter)
            leaf = tensors[parameter]
            leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
            if leaf.requires_grad and hasattr(leaf, "grad_dtype"):
                leaf.grad_dtype = None  # whatever the record has
        groups = [{"params": [tensors[key] for key in keys]} for keys in members.values()]
        optimizer = cls(groups)
        if kind.startswith(OFFLOADED):
            optimizer = OffloadedOptimizer(cls, groups)
            optimizer.in_process = True
        found = OptimizerState(name, optimizer, index)
        found.parameter_names = {id(tensor): parameter for parameter, tensor in tensors.items()}
        return found

    def _fill_rest(
        self, tensors: Mapping[str, TensorEntry], names: Set[str], versions: Sequence[Version]
    ) -> None:
        """Read what of these no optimizer changes, where a tensor of that kind is already to
        there."""
        wanted: dict[str, tuple[TensorEntry, list[LocalBox]]] = {}
        for whole in tensors.values():
            if (name := whole.spec.name) in names and not is_brought(whole, self._optimized):
                new = empty(whole)
                here = self._tensors.setdefault(name, new)
                if (here.dtype, here.shape, here.stride()) != (new.dtype, new.shape, new.stride()):
                    here = self._tensors[name] = new
                wanted[name] = whole, [LocalBox.whole(here)]
        fill(self._candidate, versions, wanted, self._loader)


def _on_cpu() -> AbstractContextManager[object]:
    """What torch makes within it lies on the CPU. torch's device mode looks at each operation, and
    takes a quarter of a replay of many tensors: it is used only where another device was set."""
    is_so = torch.get_default_device().type == "cpu"
    return nullcontext() if is_so else torch.device("cpu")


def _key_of(log: Described) -> tuple[str | None, ...]:
    """The same of steps that have the same tables."""
    return tuple(part.table.digest for part in log.manifest.all_parts)
