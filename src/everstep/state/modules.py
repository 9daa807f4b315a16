"""nn.Module as state: parameters and persistent buffers in place,
extra state through its own methods."""

from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.errors import Unsupported
from everstep.sharding.fsdp1 import entries_of, units_of
from everstep.sharding.leaves import Guard, Leaf, canonical, check_tensor
from everstep.sharding.mapped import Mapped
from everstep.state.objects import TensorSink, as_stored, encode
from everstep.state.placement import Placement


class ModuleState:
    """A module under a name of the state."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = _unwrap(module)
        """Out of what wraps it for DDP or torch.compile."""
        self._has_own_entries = False
        self.mapped = Mapped()

    def leaves(self, guard: Guard) -> list[Leaf]:
        """Every live parameter and persistent buffer of the module's state_dict,
        tied ones repeatedly."""
        state = self._entries()  # first: its hooks reshard what FSDP2 has
        live = self._live(guard)
        found: list[Leaf] = []
        self._has_own_entries = False
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and id(value) in live:
                name = self.mapped.name_of(f"{self.name}.{canonical(key)}", value)
                check_tensor(name, value)
                found.append(Leaf(name, value))
            else:
                self._has_own_entries = True
        return found

    def objects(self, sink: TensorSink) -> Any:
        """What its state_dict holds beside live tensors: extra state,
        and what hooks made of tensors."""
        if not self._has_own_entries:
            return None
        return {
            key: encode(value, f"{self.name}.{key}", sink)
            for key, (_, value) in self._own_entries().items()
        }

    def prepare(self, placement: Placement) -> None:
        """Live tensors are filled in place; the rest goes through load_state_dict."""
        for leaf in self.leaves(Guard()):
            placement.into(leaf.name, leaf.tensor)
        with as_stored(f"restoring {self.name!r}"):
            stored = dict(placement.stored(self.name) or {})
        expected = set(self._own_entries()) if self._has_own_entries else set()
        for key in sorted(expected.symmetric_difference(stored)):
            side = "checkpoint" if key in expected else "state"
            placement.problems.append(f"missing: the {side} has no entry {self.name}.{key}")
        if stored:
            entries = {key: placement.decode(value) for key, value in stored.items()}
            placement.then(lambda: self._load(entries))

    def parameter_names(self) -> dict[int, str]:
        """The name of each parameter by id(); the first name of a tied one."""
        names: dict[int, str] = {}
        for key, parameter in self.module.named_parameters(remove_duplicate=False):
            name = f"{self.name}.{canonical(key)}"
            names.setdefault(id(parameter), self.mapped.name_of(name, parameter))
        return names

    def _live(self, guard: Guard) -> set[int]:
        live: set[int] = set()
        for module in self.module.modules():
            guard.watch_size(module._modules)
            for child in module._modules:
                guard.watch_part(module._modules, child)
            for container in (module._parameters, module._buffers):
                guard.watch_size(container)
                for key, tensor in container.items():
                    # Registered; a tensor may be put there later. What follows from others is not
                    # saved: its memory may be another at each step (DeepSpeed's ZeRO 3).
                    if tensor is None or self.mapped.split(tensor) == ():
                        guard.watch_part(container, key)
                    else:
                        guard.watch_item(container, key, tensor)
                    live.add(id(tensor))
        return live

    def _entries(self) -> dict[str, Any]:
        """Its state_dict, with the live tensors."""
        if units_of(self.module):
            return entries_of(self.module)
        return self.module.state_dict(keep_vars=True)

    def _own_entries(self) -> dict[str, tuple[str, Any]]:
        """Canonical name → (name, value) of what is no live tensor."""
        live = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        entries = self._entries().items()
        return {
            canonical(key): (key, value.detach() if isinstance(value, torch.Tensor) else value)
            for key, value in entries
            if not (isinstance(value, torch.Tensor) and id(value) in live)
        }

    def _load(self, entries: dict[str, Any]) -> None:
        if units_of(self.module):
            raise Unsupported(
                f"restoring {self.name!r}: FSDP1 gathers all parameters to load what modules keep "
                f"beside them (extra state), {sorted(entries)}. Use FSDP2"
            )
        names = {key: name for key, (name, _) in self._own_entries().items()}
        self.module.load_state_dict(
            {names[key]: value for key, value in entries.items()}, strict=False
        )


def _unwrap(module: nn.Module) -> nn.Module:
    """The user's module in what torch.compile, DistributedDataParallel and DataParallel made of
    it."""
    while True:
        if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif type(module).__name__ == "OptimizedModule":  # importing its class takes seconds
            module = cast(nn.Module, module._orig_mod)
        else:
            return module
