"""What an optimizer changes, looked after between its calls: the tensors of one walk, and how they
were after the last call."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from everstep.sharding.leaves import Leaf
from everstep.state.fingerprint import Tripwire, sample_places
from everstep.state.optimizers import OptimizerState


@dataclass(slots=True)
class Watched:
    """One optimizer's. For the thread that trains."""

    leaves: tuple[Leaf, ...]
    live: tuple[torch.Tensor, ...]
    addresses: list[int]
    tensors: tuple[torch.Tensor, ...]
    """Detached: they keep the memory that is looked at, whatever `.data` becomes."""
    sharded: tuple[Leaf, ...]
    """The DTensors that they are parts of, which count what torch writes to them."""
    places: list[tuple[int, int, int]]
    parameters: Sequence[torch.Tensor]
    """Those of them that a replay has to come to, likewise; ..."""
    state: Sequence[torch.Tensor]
    """... and their state."""
    tripwire: Tripwire | None = None
    digests: Sequence[tuple[str, str]] = ()
    """Where all bytes are looked at."""
    plain: Any = None
    _states: list[dict[Any, Any]] = field(default_factory=list)
    _keys: list[Any] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _values: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, optimizer: OptimizerState) -> "Watched":
        """As they are now."""
        leaves, sharded = tuple(optimizer.tensors()), tuple(optimizer.sharded())
        tensors = tuple(leaf.tensor.detach() for leaf in leaves)
        places, live = sample_places(leaves), tuple(leaf.tensor for leaf in leaves)
        parameters, state = optimizer.parameters_here(), optimizer.state_here()
        found = cls(leaves, live, _addresses(live), tensors, sharded, places, parameters, state)
        for _, name, parameter, _ in optimizer.parameters():
            kept = optimizer.state.get(parameter, {})
            if not isinstance(kept, dict):
                continue
            for key, value in kept.items():
                if isinstance(value, torch.Tensor):
                    found._states.append(kept)
                    found._keys.append(key)
                    found._names.append(f"{optimizer.name}.{name}.{key}")
                    found._values.append(value)
        return found

    @property
    def of_state(self) -> Sequence[torch.Tensor]:
        """Those that are no parameters, as they are in the state."""
        return self._values

    def replaced(self) -> list[str]:
        """The names in the state under which another tensor is now, or none."""
        now = map(dict.get, self._states, self._keys)
        if all(map(is_, now, self._values)):
            return []
        rows = zip(self._names, self._states, self._keys, self._values, strict=True)
        return [name for name, kept, key, value in rows if kept.get(key) is not value]

    def arm(self, turn: int) -> None:
        """Look after them from now on. `turn`: other numbers look at other bytes."""
        counted = (*self.tensors, *(leaf.tensor for leaf in self.sharded))
        self.tripwire = Tripwire((*self.leaves, *self.sharded), counted, self.places, turn)

    def moved(self) -> list[str]:
        """The names of those that have other memory now (`.data = ...`)."""
        addresses = _addresses(self.live)
        if addresses == self.addresses:
            return []
        rows = zip(self.leaves, addresses, self.addresses, strict=True)
        return [leaf.name for leaf, address, known in rows if address != known]


def first_that_differs(
    known: Sequence[tuple[str, str]], found: Sequence[tuple[str, str]]
) -> list[str]:
    """Its name: of running digests all that come after it differ, too."""
    pairs = itertools.zip_longest(known, found)
    return next(([(now or then)[0]] for then, now in pairs if now != then), [])


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))
