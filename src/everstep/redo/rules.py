"""Rules: how parts of the state follow from the rest of it, by functions of the user's own.

An average of the weights (EMA) is as large as they are, belongs to no optimizer, and changes at
every step. Its rule says how. everstep calls it, at each step while training and after each record
at a replay: so it is the same function at the same place both times, and a log need not hold what
it makes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from everstep.sharding.layout import local_of
from everstep.sharding.leaves import Leaf
from everstep.state.modules import ModuleState
from everstep.state.stateful import StatefulState, ValueState
from everstep.state.view import State

Rule = Callable[[int], object]
"""Brings a part from the step before to this one; what it returns is ignored."""


class Rules:
    """The rules of a run, by the parts that they derive. For the thread that trains."""

    def __init__(self, derive: Mapping[str, Rule], state: State) -> None:
        """Raises ValueError and TypeError for what is no rule, and for parts that are not there or
        hold no tensor of their own."""
        self._rules = dict(derive)
        self._state = state
        for part, rule in self._rules.items():
            if not callable(rule):
                raise TypeError(f"derive[{part!r}] must be a function of the step, not {rule!r}")
            if within := [other for other in self._rules if other.startswith(f"{part}.")]:
                raise ValueError(f"derive has rules for {part!r} and for {within[0]!r} in it")
            _check(part, state)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are derived."""
        return tuple(self._rules)

    def part_of(self, name: str) -> str | None:
        """The derived part in which a tensor of this name is."""
        return next((part for part in self._rules if is_in(name, part)), None)

    def run(self, step: int, parts: Iterable[str] | None = None) -> None:
        """Bring `parts` (None: all) to `step`. Raises what the rules raise."""
        for part in self._rules if parts is None else parts:
            try:
                self._rules[part](step)
            except Exception as error:
                error.add_note(f"everstep: in the rule that derives {part!r}, at step {step}")
                raise

    def why_no_log(self, is_alone: bool) -> str | None:
        """Names a part that no rank can derive by itself, or nobody elsewhere; None: all can be."""
        for part in self._rules:
            tensors = self._state.tensors_of(part)
            if any(self._state.mapped.split(tensor) is not None for tensor in tensors.values()):
                why = "consists of boxes of other tensors (layout=, FSDP1)"
            elif not is_alone and self._state.is_by_rank(part):
                why = "is each rank's own (by_rank=)"
            else:
                continue
            return f"derive= has {part!r}, which {why}: a replay elsewhere could not derive it"
        return None

    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        """The part's live tensors, by all names that they have in it."""
        return self._state.tensors_of(part)

    def pointers(self) -> dict[str, int]:
        """Where the tensors of the parts' values lie; not those of modules, which the walk knows,
        nor of a state_dict(), which may be made anew each time."""
        found: dict[str, int] = {}

        def sink(name: str, tensor: torch.Tensor) -> str:
            found[name] = local_of(tensor).data_ptr()
            return name

        for part in self._rules:
            for entry in self._state.entries_of(part):
                if isinstance(entry, ValueState):
                    entry.objects(sink)
        return found


def is_in(name: str, part: str) -> bool:
    """Whether the tensor or part `name` is in `part`, or is it."""
    return name == part or name.startswith(f"{part}.")


def specs_of(leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    """Names, dtypes, shapes and devices, to be compared."""
    return tuple((leaf.spec, leaf.tensor.device) for leaf in leaves)


def _check(part: str, state: State) -> None:
    entries = state.entries_of(part)
    if not entries:
        raise ValueError(
            f"derive has a rule for {part!r}, and the state has no such part, but {state.parts}"
        )
    known = (ModuleState, ValueState, StatefulState)
    if other := [entry.name for entry in entries if not isinstance(entry, known)]:
        raise ValueError(
            f"derive names {part!r}, in which {other[0]!r} is another kind. "
            f"A rule derives modules, values and objects with a state_dict"
        )
    owners = {
        id(parameter): optimizer.name
        for optimizer in state.optimizers
        for _, _, parameter, _ in optimizer.parameters()
    }
    found = state.tensors_of(part)
    owned = [name for name, tensor in found.items() if id(tensor) in owners]
    if owned:
        raise ValueError(
            f"derive has a rule for {part!r}, but {owners[id(found[owned[0]])]!r} changes "
            f"{owned[0]!r} in it. Give what the rule derives a part of its own in the state"
        )
    if not found:
        raise ValueError(
            f"derive names {part!r}, which holds no tensor. Fill it before you make the "
            f"Checkpointer, or leave it out"
        )
