"""A checkpoint → the live state: match → fill → replay → place.

Everything is found to fit before anything of the user's is changed. What is filled is the state
that a log goes on from; its records are replayed; and then what no optimizer changes is put in
place, as the last record has it.
"""

import contextlib
import logging
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from everstep.errors import KINDS, Corrupt, EverstepError, Mismatch, Unsupported, kind_of
from everstep.format.global_tensors import Described, Version, stored
from everstep.format.manifest import Manifest, Record
from everstep.format.tables import Table
from everstep.redo.derived import Derived
from everstep.redo.replay import Comparison, Loaded, redo
from everstep.redo.rolling_digest import known_digests
from everstep.restore.chain import Chain, is_brought
from everstep.restore.choose import Candidate
from everstep.restore.load import Loader, Wanted, boxes_of, fill, fill_from_live, is_same_memory
from everstep.restore.rebuild import Rebuilt
from everstep.restore.records import Records
from everstep.sharding.layout import local_of, shards_of
from everstep.sharding.leaves import Leaf
from everstep.sharding.redundancy import is_here, is_same_class, offloaded_of
from everstep.sharding.topology import ALONE, differences
from everstep.sharding.world import World
from everstep.state.placement import Placement, Saved
from everstep.state.view import State, is_in

log = logging.getLogger("everstep")

_RULED = (
    "Its rule is another one now, or depends on something beside the weights, the buffers, the "
    "part itself and the step"
)


@dataclass(frozen=True, slots=True)
class Scope:
    """What is asked of a restore. `only`: these parts (None: all). `first`: what is in other parts
    than these, and not needed before the first update, follows (State.fill_later), where nothing is
    replayed."""

    only: list[str] | None
    first: list[str] | None
    must_be_exact: bool


@dataclass(frozen=True, slots=True)
class Restore:
    """A checkpoint on its way into the live state. `derived`: parts, with their rules."""

    candidate: Candidate
    state: State
    derived: Derived
    loader: Loader
    scope: Scope

    @torch.inference_mode(False)  # whoever restores in it: what is made here is to be trained
    def apply(self) -> tuple[Manifest, list[str]]:
        """Put it there; blocks. Returns its manifest, and what is other here than where it, and
        what was replayed, was written.

        Raises Mismatch (nothing was changed then), Corrupt (the state is half filled then),
        Unsupported for a log whose replay might not be exact where it must be, and for a part of a
        log that cannot be replayed beside the state.
        """
        state, world = self.state, self.state.world
        chain = world.together("reading the manifest", self.candidate.describe)
        if not chain.replayed:
            self._check_exact(chain, [])
            self._place(chain.base)
            return chain.base.manifest, differences(chain.base.manifest.topology)
        state.name_parameters()
        if self.scope.only is not None or _is_beside(state):
            differing = [*chain.differences(ALONE), *chain.moved()]  # on the CPU
            self._check_exact(chain, differing)
            world.together("replaying", partial(self._replay_beside, chain))
            return chain.last.manifest, differing
        kinds = {
            name: parameter.device.type
            for optimizer in state.optimizers
            for _, name, parameter, _ in optimizer.parameters()
        }
        moved = world.gather("comparing devices", chain.moved(kinds))
        differing = chain.differences(state.layout())
        differing += sorted({text for found in moved for text in found})
        self._check_exact(chain, differing)
        since = self._replay(chain, is_moved=any(moved))
        differing += [] if since is None else [f"other bytes than the run's since step {since}"]
        return chain.last.manifest, differing

    def _check_exact(self, chain: Chain, differing: Sequence[str]) -> None:
        """Raises Unsupported where it might not be exact, and must be; else tells what of that is
        stored so. What is `differing` here is told once it is restored."""
        step, base = self.candidate.name.step, chain.base.manifest
        only, must_be_exact = self.scope.only, self.scope.must_be_exact
        problems = []
        if not base.exact and "thin" in base.capture:
            problems.append(
                "some of its tensors are of earlier steps, as it was thinned (exact: false); "
                "Store.restore_plan() tells which. A step with a tag has all of its own"
            )
        elif not base.exact and base.capture.get("strategy") == "merge":
            problems.append("it is merged of what is not exact itself (exact: false)")
        elif not base.exact:
            what = "It" if not chain.logs else f"Step {base.step}, from which it goes on,"
            problems.append(
                f"what is stored of it is the run's own but for last bits (exact: false). {what} "
                f"was made whole by a replay elsewhere, in place of its log"
            )
        if parts := [part for part in chain.left_out if only is None or part in only]:
            problems.append(
                f"records do without the tensors of {', '.join(map(repr, parts))} (exact: false); "
                f"compress(..., residual='records') has them in each. All else is exact"
            )
        if not must_be_exact:
            for problem in problems:
                log.warning("restoring step %s: %s", step, problem)
            return
        if differing:
            first = min(part.steps for part in base.parts)
            problems.append(
                f"it has to be replayed from step {first}, and was recorded under "
                f"{'; '.join(differing)}"
            )
        if problems:
            raise Unsupported(
                f"restoring step {step} exactly: {'; '.join(problems)}. Restore it there, another "
                f"step that is whole, or exact='allow'"
            )

    def _place(self, base: Described) -> None:
        """Where nothing has to be replayed."""
        placement, versions = self._match(base, self.scope.only)
        self._tell_classes(base)
        now, late, first = placement.destinations, {}, self.scope.first
        if first is not None:
            at_once = tuple(f"{part}." for part in first)
            late = {
                name: row
                for name, row in now.items()
                if name in placement.late and not name.startswith(at_once)
            }
            now = {name: row for name, row in now.items() if name not in late}
        fill_now = partial(fill, self.candidate, versions, now, self.loader)
        self.state.world.together("reading", fill_now)
        placement.finish()
        if late:
            self.state.fill_later(partial(self._fill_late, versions, late))

    def _fill_late(self, versions: Sequence[Version], late: Wanted) -> None:
        try:
            with Loader() as loader:
                fill(self.candidate, versions, late, loader)
        except EverstepError as error:
            step, root = self.candidate.name.step, self.candidate.disk.root
            raise KINDS[kind_of(error)](
                f"restoring step {step} of {root}: what was to follow is not there, and the state "
                f"is half filled: {error}. Restore without first=, which goes back to the newest "
                f"that verifies"
            ) from error

    def _match(
        self, base: Described, only: list[str] | None
    ) -> tuple[Placement, Sequence[Version]]:
        """Where the base goes, or these parts of it, and what has that. Raises Mismatch,
        Corrupt."""
        candidate, state = self.candidate, self.state
        placement = self._prepared(state.place(Saved.of(base)), only)

        def fit() -> Sequence[Version]:
            placement.check(candidate.name.step, candidate.disk.root)
            return candidate.versions(base, boxes_of(placement.destinations))

        versions = state.world.together("fitting", fit)
        candidate.is_shared = _is_shared(state.world, placement)
        offloaded = ((each.name, offloaded_of(each.optimizer)) for each in state.optimizers)
        kept = [f"{name}." for name, found in offloaded if found and found.has_adopted]
        candidate.already = {
            name for name in placement.destinations if name.startswith(tuple(kept))
        }
        return placement, versions

    def _prepared(self, placement: Placement, only: list[str] | None) -> Placement:
        """With the destinations of these parts, and what does not fit."""
        placement.read_stream = self.candidate.read_stream
        self.state.prepare(placement, only)
        return placement

    def _replay(self, chain: Chain, *, is_moved: bool) -> int | None:
        """In the live state, by its own optimizers. Returns the first step after which it had other
        bytes than the run, as far as that is compared and allowed."""
        candidate, state, loader = self.candidate, self.state, self.loader
        together = state.world.together
        derivation = Derivation(chain, self.derived, state)
        names = chain.optimized | derivation.names
        placement, _ = self._match(chain.base, state.parts_of(names))
        saved = chain.saved(names)
        optimizers = {optimizer.name: optimizer for optimizer in state.optimizers}

        def match_rest() -> Placement:
            live = derivation.live().values()
            return self._prepared(state.place_rest(saved, names, live), None)

        comparison = chain.comparison(state.layout(), state.world.number, is_moved=is_moved)

        def replay() -> None:
            records = stack.enter_context(
                Records(candidate, chain, optimizers, loader, state.world, comparison=comparison)
            )
            records.check()
            match_rest().check(candidate.name.step, candidate.disk.root)
            fill(candidate, chain.base.versions, placement.destinations, loader)
            placement.finish()
            derivation.filled = placement.destinations.keys()
            for loaded in records:
                redo(loaded, optimizers)
                derivation.after(loaded, candidate, loader)
                del loaded

        # The records are closed last: the system takes a while to take their memory back.
        with contextlib.ExitStack() as stack, _keeping_gradients(state):
            together("replaying", replay)
            rest = match_rest()

            def place() -> None:
                tensors = derivation.live()
                for optimizer in state.optimizers:
                    tensors |= {leaf.name: leaf.tensor for leaf in optimizer.tensors()}
                live = {name: shards_of(each)[1] for name, each in tensors.items()}
                wanted = rest.destinations  # a replay brings what an object refers to, too
                brought = {name: row for name, row in wanted.items() if is_brought(row[0], names)}
                others = {name: row for name, row in wanted.items() if name not in brought}
                fill(candidate, chain.versions, _unfilled(others, chain, placement), loader)
                fill_from_live(live, brought)

            together("reading what came after", place)
            rest.finish()
        return comparison.first if comparison else None

    def _replay_beside(self, chain: Chain) -> None:
        """Replay the log beside the live state, and place these parts of the result (None: all).
        Takes memory for all of it."""
        saved = chain.saved(chain.optimized)
        candidate, only = self.candidate, self.scope.only
        placement = self._prepared(self.state.place(saved), only)
        placement.check(candidate.name.step, candidate.disk.root)
        wanted = placement.destinations
        names = {name for whole, _ in wanted.values() for name in (whole.spec.name, *whole.aliases)}
        what = "" if only is None else f"only={only} of "
        if taken := sorted(part for part in chain.ruled if any(is_in(n, [part]) for n in names)):
            raise Unsupported(
                f"restoring {what}step {candidate.name.step}: {taken[0]!r} is derived by a rule of "
                f"its own (derive=), which runs in the whole state alone, where no parameter is "
                f"several tensors. Restore all of it there, or parts without {taken[0]!r}"
            )
        found = Rebuilt(candidate, chain, self.loader).tensors
        fill_from_live({name: shards_of(tensor)[1] for name, tensor in found.items()}, wanted)
        placement.finish()

    def _tell_classes(self, base: Described) -> None:
        """A replay refuses another class; a whole state fits into it, whatever that makes of it."""
        for name, then in base.manifest.classes.items():
            now = self.state.classes(self.scope.only).get(name, then)
            if not is_same_class(now, then):
                log.warning(
                    "restoring step %s: %r was a %s, and is a %s now, which has its state and its "
                    "hyperparameters from here on. To restore the weights alone: only=",
                    self.candidate.name.step,
                    name,
                    then,
                    now,
                )


def _unfilled(wanted: Wanted, chain: Chain, placement: Placement) -> Wanted:
    """But for what the base brought, for which `placement` was, and no record has."""
    later = chain.later_names

    def is_filled(name: str) -> bool:
        _, before = placement.destinations.get(name, (None, []))
        now = wanted[name][1]
        return (
            name not in later
            and len(before) == len(now)
            and all(map(is_same_memory, (to.tensor for to in before), (to.tensor for to in now)))
        )

    return {name: row for name, row in wanted.items() if not is_filled(name)}


def _is_beside(state: State) -> bool:
    """Whether a log is replayed beside the state. Records have a gradient for each tensor: no
    parameter is updated by one that is boxes of other tensors, nor one of which another rank makes
    the updates."""
    is_apart = any(
        optimizer.mapped.split(parameter) is not None or not is_here(optimizer.optimizer, parameter)
        for optimizer in state.optimizers
        for _, _, parameter, _ in optimizer.parameters()
    )
    return any(state.world.gather("comparing parameters", is_apart))


def _is_shared(world: World, placement: Placement) -> bool:
    """Whether other ranks of this node want just what this one does (replicas, whose tensors are
    whole): what is read directly would be read off the disk again for each."""
    rows = placement.destinations.values()
    are_whole = all(
        place.box.lengths == each.spec.shape for each, places in rows for place in places
    )
    return len(world.local) > 1 and are_whole


@contextlib.contextmanager
def _keeping_gradients(state: State) -> Iterator[None]:
    """What a parameter has as its gradient is the same tensor after it: the loop may have views of
    one buffer there."""
    parameters = [row[2] for optimizer in state.optimizers for row in optimizer.parameters()]
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


class Derivation:
    """What rules derive in the replay of one log: they run after each record, and what they come to
    is compared with the run's. A rule may look at what no optimizer owns, buffers say, which a
    record has as it was after its step, if it has changed since the base: that is put back before
    the rule runs. Optimizers' tensors are there already."""

    def __init__(self, chain: Chain, derived: Derived, state: State) -> None:
        """Raises Mismatch where a part that a rule derived has none here."""
        self._rows: dict[int, tuple[Described, Record, Table]] = {
            record.step: (described, record, tables[0])  # nothing is derived on several nodes
            for described in chain.logs
            for record, tables in described.records
        }
        self._optimized = chain.optimized
        names = {name for table in chain.base.tables for name in table.tensors} - self._optimized
        self._names = {part: {n for n in names if is_in(n, [part])} for part in chain.ruled}
        self._derived = derived
        self._state = state
        self._base = chain.base
        self.filled: Container[str] = ()
        """Of the base, once it is in place."""
        if missing := sorted(self._names.keys() - set(derived.parts)):
            base = chain.base.manifest.step
            raise Mismatch(
                f"restoring step {chain.last.manifest.step}: its log has to be replayed from step "
                f"{base}, and {', '.join(map(repr, missing))} was derived by a rule that this "
                f"Checkpointer does not have. Give it derive={{{missing[0]!r}: ...}} as the run "
                f"did, or restore step {base}, which is whole"
            )
        self.names = {name for names in self._names.values() for name in names}
        """Of the tensors that rules derive."""
        self._tensors: dict[str, torch.Tensor] | None = None

    def live(self) -> dict[str, torch.Tensor]:
        """The derived tensors as they are now, by all their names."""
        live = map(self._state.tensors_of, self._names)
        return {name: found for own in live for name, found in own.items()}

    def after(self, loaded: Loaded, candidate: Candidate, loader: Loader) -> None:
        """Its optimizer calls are made: let the rules follow. Raises Corrupt where one came to
        other bytes than in the run, and what the rules raise."""
        if loaded.step not in self._rows:  # of a base that is spread: what is derived came last
            return
        described, record, table = self._rows[loaded.step]
        if not record.ruled:
            return
        self._put_back(described, [(record.part, table)], candidate, loader)
        self._derived.redo(record.step, record.ruled)
        if comparison := loaded.comparison:
            for part in record.ruled:
                self._compare(loaded, record, part, comparison)

    def _put_back(
        self, described: Described, version: Version, candidate: Candidate, loader: Loader
    ) -> None:
        """What no optimizer owns and no rule derives, as it was then: at the first record also what
        only the base has."""
        versions, tensors = [version], stored(version, is_record=True)
        if self._tensors is None:
            self._tensors = self._state.live_tensors()
            versions, tensors = [*self._base.versions, version], {**self._base.tensors, **tensors}
        placement = Placement(replace(Saved.of(described), tensors=tensors))
        later = {name for _, table in version for name in table.tensors}
        for name, whole in placement.saved.tensors.items():
            is_there = name not in later and whole.spec.name in self.filled
            if name in self._tensors and not is_there and name not in self._optimized | self.names:
                placement.into(name, self._tensors[name])
        if placement.problems:
            step = described.manifest.step
            raise Corrupt(f"replaying step {step}: {'; '.join(placement.problems)}")
        fill(candidate, versions, placement.destinations, loader)

    def _compare(self, loaded: Loaded, record: Record, part: str, comparison: Comparison) -> None:
        """With what the run had after this step, as far as its record tells."""
        live = self._state.tensors_of(part)
        if lost := sorted(self._names[part] - live.keys()):
            raise Corrupt(
                f"replaying step {record.step}: the derived part {part!r} has no tensor "
                f"{lost[0]!r} any more"
            )
        found = {name: live[name] for name in self._names[part]}
        if digests := known_digests(loaded.tensors, comparison.rank).get(part):
            leaves = [Leaf(name, local_of(found[name])) for name in sorted(found)]
            comparison.check(record.step, part, digests, leaves, _RULED)
