"""What a log says of derived parts (redo/rules.py), and whether only their rules change them.

    step(t)   untouched since step t-1? → rules → collect → watch → record: digests

Their tensors are in bases only. A record has digests of them as of what optimizers own.
"""

from typing import Any, Literal

import torch

from everstep.format.tables import owned_names
from everstep.redo.ambient import drawn_since, generators_now
from everstep.redo.rolling_digest import DERIVED_OWNER, RollingDigests, Slice
from everstep.redo.rules import Rules, specs_of
from everstep.sharding.layout import local_of
from everstep.sharding.leaves import Leaf
from everstep.state.fingerprint import Fingerprint
from everstep.state.view import Collected, Walk


class Derived:
    """Runs the rules while training, and watches what they derive. For the thread that trains."""

    def __init__(self, rules: Rules, is_full: bool = False, rank: int | None = None) -> None:
        """`is_full`: see Recorder. `rank`: of several, each of which says it of what it has."""
        self._rank = rank
        self._rules = rules
        self._is_full = is_full
        owners = dict.fromkeys(rules.parts, DERIVED_OWNER)
        self._rolling = RollingDigests(owners, rank, is_full=is_full)
        self._done: int | None = None
        self._problem: str | None = None
        self._bound: tuple[Walk, tuple[Leaf, ...]] | None = None
        """What is derived of one walk."""
        self._fingerprint: Fingerprint | None = None
        self._pointers: dict[str, int] = {}

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are derived."""
        return self._rules.parts

    def why_no_log(self, is_alone: bool) -> str | None:
        """See Rules."""
        return self._rules.why_no_log(is_alone)

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
        before, names = generators_now(), ", ".join(map(repr, self._rules.parts))
        try:
            self._rules.run(step)
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
        self.release()
        self._done = step

    def leaves(self, collected: Collected) -> tuple[Leaf, ...]:
        """What is derived of this state."""
        return (*self._bind(collected.walk), *self._loose(collected))

    def shape(self, collected: Collected) -> Any:
        """What must be as it is in the base, beside the walk: the tensors in objects, other
        names."""
        aliases = collected.aliases
        tied = {name: aliases[name] for name in aliases if self._rules.part_of(name)}
        return specs_of(self._loose(collected)), tied

    def watch(self, collected: Collected, turn: int) -> str | None:
        """From now on until the next `run` nobody may write to what is derived. `turn`: other
        numbers look at other bytes. Returns why what came since the last one is no record."""
        if not self.parts:
            return None
        sharded = [leaf for leaf in collected.walk.sharded if self._rules.part_of(leaf.name)]
        depth: Literal["sample", "all"] = "all" if self._is_full else "sample"
        self._fingerprint = Fingerprint(
            (*self.leaves(collected), *sharded), turn, depth=depth, follows=True
        )
        self._pointers = self._rules.pointers()
        problem, self._problem = self._problem, None
        return problem

    def changed(self) -> list[str]:
        """What was written to, or replaced, since `watch`."""
        if self._fingerprint is None:
            return []
        pointers = self._rules.pointers()
        names = self._pointers.keys() | pointers.keys()
        found = [name for name in names if pointers.get(name) != self._pointers.get(name)]
        return sorted({*self._fingerprint.changed(), *found})

    def release(self) -> None:
        """Look no more, and keep no tensor alive."""
        self._fingerprint, self._pointers = None, {}

    def describe(self) -> dict[str, Any]:
        """What a record says of each part."""
        return {part: {"rule": True, "digest": None} for part in self.parts}

    def slices(self, collected: Collected, step_s: float) -> list[Slice]:
        """What of each part is digested next; since `watch`, which comes before. `step_s`: see
        Recorder.roll."""
        if self._fingerprint is None:
            return []
        found = {
            part: [local_of(tensors[name]) for name in sorted(tensors)]
            for part, tensors in self._by_part(collected).items()
        }
        self._rolling.set(found, step_s)
        return self._rolling.next(dict.fromkeys(found, self._fingerprint))

    def _bind(self, walk: Walk) -> tuple[Leaf, ...]:
        if self._bound is None or self._bound[0] is not walk:
            owned = set(owned_names(walk.optimizers))
            found = tuple(
                leaf
                for leaf in walk.leaves
                if leaf.owner is None and leaf.name not in owned and self._rules.part_of(leaf.name)
            )
            self._bound = walk, found
        return self._bound[1]

    def _loose(self, collected: Collected) -> tuple[Leaf, ...]:
        return tuple(
            leaf
            for leaf in collected.loose
            if leaf.owner is None and self._rules.part_of(leaf.name)
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
