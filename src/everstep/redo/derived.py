"""What a log says of derived parts (state/rules.py), and whether only their rules change them.

    step(t)   untouched since step t-1? → rules → collect → watch → record: a sample, or a digest

Their tensors are in bases only. A record has a sample of their bytes, or with audit="full" a digest
of all, which the replay compares with what the rules came to there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from everstep.format.tables import owned_names
from everstep.redo.rules import Rules, digest_of, is_in, own_sample, specs_of
from everstep.redo.samples import sample_of
from everstep.sharding.leaves import Leaf
from everstep.state.fingerprint import Tripwire, sample_places
from everstep.state.view import Collected, Walk


@dataclass(frozen=True, slots=True)
class _Bound:
    """What is derived of one walk."""

    walk: Walk
    leaves: tuple[Leaf, ...]
    watched: tuple[Leaf, ...]
    places: list[tuple[int, int, int]]


class Derived:
    """Runs the rules while training, and watches what they derive. For the thread that trains."""

    def __init__(self, rules: Rules, audit: bool = False, rank: int | None = None) -> None:
        """`audit`: look at all bytes instead of a sample. `rank`: of several, each of which says it
        of what it has."""
        self._rank = rank
        self._rules = rules
        self._audit = audit
        self._done: int | None = None
        self._problem: str | None = None
        self._bound: _Bound | None = None
        self._leaves: tuple[Leaf, ...] = ()
        self._kept: tuple[torch.Tensor, ...] = ()
        self._tripwire: Tripwire | None = None
        self._plain: Any = None
        self._pointers: dict[str, int] = {}
        self._digests: dict[str, str] = {}

    def check_log(self, is_alone: bool) -> None:
        """See Rules."""
        self._rules.check_log(is_alone)

    def run(self, step: int) -> None:
        """Bring the parts to `step`, once for each. Step 0 is the state before any update. Raises
        what the rules raise. What no replay would repeat, `watch` tells."""
        if not self._rules.parts or step in (0, self._done):
            return
        if changed := self.changed():
            self._problem = (
                f"{', '.join(map(repr, changed[:5]))} changed between two steps, by something else "
                f"than the rule that derives it (derive=; everstep calls the rule at each step "
                f"itself), which no replay repeats"
            )
        self.release()
        self._done = step
        if not self._rules.ruled:
            return
        before, names = _generators(), ", ".join(map(repr, self._rules.ruled))
        try:
            self._rules.run(step)
        except BaseException:
            self._done = None
            self._problem = f"a rule raised (derive= has some for {names})"
            raise
        if not all(map(torch.equal, before, _generators())):
            self._problem = (
                f"the rules that derive {names} drew random numbers, which no replay repeats"
            )

    def restored(self, step: int) -> None:
        """The state is that of `step` now."""
        self.release()
        self._done = step

    def leaves(self, collected: Collected) -> tuple[Leaf, ...]:
        """What is derived of this state."""
        return (*self._bind(collected.walk).leaves, *self._loose(collected))

    def shape(self, collected: Collected) -> Any:
        """What must be as it is in the base, beside the walk: the tensors in objects, other
        names."""
        aliases = collected.aliases
        tied = {name: aliases[name] for name in aliases if self._rules.part_of(name)}
        return specs_of(self._loose(collected)), tied

    def watch(self, collected: Collected, turn: int) -> str | None:
        """From now on until the next `run` nobody may write to what is derived. `turn`: other
        numbers look at other bytes. Returns why what came since the last one is no record."""
        bound, loose = self._bind(collected.walk), _watchable(self._loose(collected))
        self._leaves = (*bound.watched, *loose)
        # Detached: they keep the memory that is looked at, whatever `.data` becomes.
        self._kept = tuple(leaf.tensor.detach() for leaf in self._leaves)
        shift = len(bound.watched)
        places = [(at, size, index + shift) for at, size, index in sample_places(loose)]
        places = [*bound.places, *places]
        sharded = [leaf for leaf in collected.walk.sharded if self._rules.part_of(leaf.name)]
        counted = (*self._kept, *(leaf.tensor for leaf in sharded))
        self._tripwire = Tripwire((*self._leaves, *sharded), counted, places, turn)
        self._plain, self._pointers = self._rules.plain(), self._rules.pointers()
        if self._audit:
            self._digests = {part: self._digest(part) for part in self._rules.parts}
        problem, self._problem = self._problem, None
        return problem

    def changed(self) -> list[str]:
        """What was written to, or replaced, since `watch`."""
        if self._tripwire is None:
            return []
        found = self._tripwire.changed()
        found += [
            leaf.name
            for leaf, known in zip(self._leaves, self._kept, strict=True)
            if leaf.tensor.data_ptr() != known.data_ptr()
        ]
        pointers = self._rules.pointers()
        found += [name for name, at in self._pointers.items() if pointers.get(name) != at]
        found += sorted(pointers.keys() - self._pointers.keys())
        if not found:
            plain = self._rules.plain()
            found = [f"a value in {name}" for name in plain if plain[name] != self._plain.get(name)]
        if not found:
            found = [
                f"a tensor of {part}"
                for part, digest in self._digests.items()
                if self._digest(part) != digest
            ]
        return sorted(set(found))

    def release(self) -> None:
        """Look no more, and keep no tensor alive."""
        self._leaves, self._kept, self._tripwire = (), (), None
        self._pointers, self._digests, self._plain = {}, {}, None

    def describe(
        self, step: int, collected: Collected
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Of the record of `step`: its own tensors, and for each part whether it has a rule, and a
        digest or None."""
        samples: dict[str, torch.Tensor] = {}
        said: dict[str, Any] = {}
        for part, tensors in self._by_part(collected).items():
            samples[own_sample(part, self._rank)] = sample_of(tensors, step)
            said[part] = {
                "rule": part in self._rules.ruled,
                "digest": digest_of(tensors) if self._audit else None,
            }
        return samples, said

    def _bind(self, walk: Walk) -> "_Bound":
        if self._bound is None or self._bound.walk is not walk:
            owned = set(owned_names(walk.optimizers))
            found = tuple(
                leaf
                for leaf in walk.leaves
                if leaf.owner is None and leaf.name not in owned and self._rules.part_of(leaf.name)
            )
            watched = _watchable(found)
            places = sample_places(watched)
            self._bound = _Bound(walk, found, watched, places)
        return self._bound

    def _loose(self, collected: Collected) -> tuple[Leaf, ...]:
        return tuple(
            leaf
            for leaf in collected.loose
            if leaf.owner is None and self._rules.part_of(leaf.name)
        )

    def _digest(self, part: str) -> str:
        """Of a part as it is now: a rule's wherever its tensors are, others' where they were."""
        if part in self._rules.ruled:
            return digest_of(self._rules.tensors(part))
        return digest_of(
            {leaf.name: leaf.tensor for leaf in self._leaves if is_in(leaf.name, part)}
        )

    def _by_part(self, collected: Collected) -> dict[str, dict[str, torch.Tensor]]:
        if self._rank is not None:
            return self._held_by_part(collected)
        found: dict[str, dict[str, torch.Tensor]] = {part: {} for part in self._rules.parts}
        for leaf in self.leaves(collected):
            if part := self._rules.part_of(leaf.name):
                found[part][leaf.name] = leaf.tensor
        return found

    def _held_by_part(self, collected: Collected) -> dict[str, dict[str, torch.Tensor]]:
        """What this rank has of each part, whoever writes it: a replay knows no writers."""
        walk = collected.walk
        others = {name for tied in collected.aliases.values() for name in tied}
        others.update(owned_names(walk.optimizers))
        return {
            part: {
                name: tensor
                for name, tensor in self._rules.tensors(part).items()
                if name not in others
            }
            for part in self._rules.parts
        }


def _watchable(leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
    """Without inference tensors, which have no versions."""
    return tuple(leaf for leaf in leaves if not leaf.tensor.is_inference())


def _generators() -> list[torch.Tensor]:
    """The states of torch's generators."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpus]
