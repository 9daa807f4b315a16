"""Derived parts: what follows from the rest of the state, by functions of the user's own.

    step(t)   untouched since step t-1? → rules → collect → watch → record: digests

An average of the weights (EMA) is as large as they are, belongs to no optimizer, and changes at
every step. Its rule says how. everstep calls it, at each step while training and after each record
at a replay: so it is the same function at the same place both times, and a log need not hold what
it makes. Its tensors are in bases only. A record has digests of them as of what optimizers own.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from everstep.format.tables import owned_names
from everstep.redo.ambient import drawn_since, generators_now
from everstep.redo.rolling_digest import DERIVED_OWNER, RollingDigests, Slice
from everstep.sharding.layout import local_of
from everstep.sharding.leaves import Leaf
from everstep.state.fingerprint import Fingerprint
from everstep.state.modules import ModuleState
from everstep.state.stateful import StatefulState, ValueState
from everstep.state.view import Collected, State, Walk, is_in

Rule = Callable[[int], object]
"""Brings a part from the step before to this one; what it returns is ignored."""


class Derived:
    """The parts that rules derive. Runs the rules, and while training watches what they derive. For
    the thread that trains."""

    def __init__(self, derive: Mapping[str, Rule], state: State, *, is_full: bool = False) -> None:
        """`is_full`: see Recorder. Raises ValueError and TypeError for what is no rule, and for
        parts that are not there or hold no tensor of their own."""
        self._rules = dict(derive)
        self._state = state
        for part, rule in self._rules.items():
            if not callable(rule):
                raise TypeError(f"derive[{part!r}] must be a function of the step, not {rule!r}")
            if within := [other for other in self._rules if other.startswith(f"{part}.")]:
                raise ValueError(f"derive has rules for {part!r} and for {within[0]!r} in it")
            _check(part, state)
        self.parts = tuple(self._rules)
        """Their names."""
        self._is_full = is_full
        owners = dict.fromkeys(self.parts, DERIVED_OWNER)
        self._rolling = RollingDigests(owners, state.world.number, is_full=is_full)
        self._done: int | None = None
        self._problem: str | None = None
        self._bound: tuple[Walk, tuple[Leaf, ...]] | None = None
        """What is derived of one walk."""
        self._fingerprint: Fingerprint | None = None
        self._pointers: dict[str, int] = {}

    def why_no_log(self) -> str | None:
        """Names a part that no rank can derive by itself, or nobody elsewhere; None: all can be."""
        for part in self.parts:
            tensors = self._state.tensors_of(part)
            if any(self._state.mapped.split(tensor) is not None for tensor in tensors.values()):
                why = "consists of boxes of other tensors (layout=, FSDP1)"
            elif not self._state.world.is_alone and self._state.is_by_rank(part):
                why = "is each rank's own (by_rank=)"
            else:
                continue
            return f"derive= has {part!r}, which {why}: a replay elsewhere could not derive it"
        return None

    def redo(self, step: int, parts: Iterable[str]) -> None:
        """Bring these parts to `step`. Raises what the rules raise."""
        for part in parts:
            try:
                self._rules[part](step)
            except Exception as error:
                error.add_note(f"everstep: in the rule that derives {part!r}, at step {step}")
                raise

    def run(self, step: int) -> None:
        """Bring the parts to `step`, once for each. Step 0 is the state before any update. Raises
        what the rules raise. What no replay would repeat, `watch` tells."""
        if not self.parts or step in (0, self._done):
            return
        if changed := self.changed():
            self._problem = (
                f"{', '.join(map(repr, changed[:5]))} changed between two steps, by something else "
                f"than the rule that derives it (derive=; everstep calls the rule at each step "
                f"itself), which no replay repeats"
            )
        self._release()
        self._done = step
        before, names = generators_now(), ", ".join(map(repr, self.parts))
        try:
            self.redo(step, self.parts)
        except BaseException:
            self._done = None
            self._problem = f"a rule raised (derive= has some for {names})"
            raise
        if drawn_since(before):
            self._problem = (
                f"the rules that derive {names} drew random numbers, which no replay repeats"
            )

    def restored(self, step: int) -> None:
        """The state is that of `step` now."""
        self._release()
        self._done = step

    def leaves(self, collected: Collected) -> tuple[Leaf, ...]:
        """What is derived of this state."""
        return (*self._bind(collected.walk), *self._loose(collected))

    def shape(self, collected: Collected) -> Any:
        """What must be as it is in the base, beside the walk: the tensors in objects, other
        names."""
        aliases = collected.aliases
        tied = {name: aliases[name] for name in aliases if self._part_of(name)}
        return [(leaf.spec, leaf.tensor.device) for leaf in self._loose(collected)], tied

    def watch(self, collected: Collected, turn: int) -> str | None:
        """From now on until the next `run` nobody may write to what is derived. `turn`: other
        numbers look at other bytes. Returns why what came since the last one is no record."""
        if not self.parts:
            return None
        sharded = [leaf for leaf in collected.walk.sharded if self._part_of(leaf.name)]
        self._fingerprint = Fingerprint(
            (*self.leaves(collected), *sharded), turn, is_full=self._is_full, follows=True
        )
        self._pointers = self._pointers_now()
        problem, self._problem = self._problem, None
        return problem

    def changed(self) -> list[str]:
        """What was written to, or replaced, since `watch`."""
        if self._fingerprint is None:
            return []
        then, now = self._pointers, self._pointers_now()
        found = [name for name in then.keys() | now.keys() if now.get(name) != then.get(name)]
        return sorted({*self._fingerprint.changed(), *found})

    def slices(self, collected: Collected, step_s: float) -> list[Slice]:
        """What of each part is digested next; since `watch`, which comes before. `step_s`: see
        RollingDigests.set."""
        if self._fingerprint is None:
            return []
        found = {
            part: [local_of(tensors[name]) for name in sorted(tensors)]
            for part, tensors in self._by_part(collected).items()
        }
        self._rolling.set(found, step_s)
        return self._rolling.next(dict.fromkeys(found, self._fingerprint))

    def _release(self) -> None:
        """Look no more, and keep no tensor alive."""
        self._fingerprint, self._pointers = None, {}

    def _pointers_now(self) -> dict[str, int]:
        """Where the tensors of the parts' values lie; not those of modules, which the walk knows,
        nor of a state_dict(), which may be made anew each time."""
        entries = (entry for part in self.parts for entry in self._state.entries_of(part))
        values = (entry.tensors() for entry in entries if isinstance(entry, ValueState))
        return {name: local_of(each).data_ptr() for own in values for name, each in own.items()}

    def _part_of(self, name: str) -> str | None:
        """The derived part in which a tensor of this name is."""
        return next((part for part in self.parts if is_in(name, [part])), None)

    def _bind(self, walk: Walk) -> tuple[Leaf, ...]:
        if self._bound is None or self._bound[0] is not walk:
            owned = set(owned_names(walk.optimizers))
            found = tuple(
                leaf
                for leaf in walk.leaves
                if leaf.owner is None and leaf.name not in owned and self._part_of(leaf.name)
            )
            self._bound = walk, found
        return self._bound[1]

    def _loose(self, collected: Collected) -> list[Leaf]:
        return [leaf for leaf in collected.loose if leaf.owner is None and self._part_of(leaf.name)]

    def _by_part(self, collected: Collected) -> dict[str, dict[str, torch.Tensor]]:
        """What this rank has of each part, whoever writes it: a replay knows no writers."""
        if self._state.world.is_alone:  # it writes all
            here = {leaf.name: leaf.tensor for leaf in self.leaves(collected)}
        else:
            live = [self._state.tensors_of(part) for part in self.parts]
            others = {name for tied in collected.aliases.values() for name in tied}
            others.update(owned_names(collected.walk.optimizers))
            here = {n: each for own in live for n, each in own.items() if n not in others}
        return {part: {n: here[n] for n in here if is_in(n, [part])} for part in self.parts}


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
