"""Restores: from a store, or from what a keeper still holds, back into the live state.

let a surviving keeper finish → choose a checkpoint, with all ranks → match it with the state
→ read and verify into the tensors → replay → place objects, generators last → captures go on
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from everstep.errors import KINDS, Corrupt, EverstepError, Missing, Unavailable, kind_of
from everstep.format.manifest import CheckpointName
from everstep.keeper.arena import OPTIMIZER, Arena
from everstep.keeper.client import Client
from everstep.keeper.live_replica import KEY
from everstep.redo.derived import Derived
from everstep.redo.replay import OtherBytes
from everstep.restore.apply import Restore, Scope
from everstep.restore.choose import Candidate, Held, candidates, find_held, is_of
from everstep.restore.load import Loader
from everstep.sharding.world import World
from everstep.state.view import State
from everstep.store import catalog
from everstep.store.commit import note_unproven, open_store
from everstep.tiers.tier import Tier, Union, tier_at

if TYPE_CHECKING:
    from everstep.capture.captures import Captures

log = logging.getLogger("everstep")

_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Restores:
    """All restores of one Checkpointer, one after another. For the thread that trains, which waits
    for them."""

    state: State
    derived: Derived
    disk: Tier
    """Of the run's own store."""
    client: Client
    captures: "Captures"

    def restore(
        self, step: int | str | None, from_store: str | os.PathLike[str] | None, scope: Scope
    ) -> CheckpointName | None:
        """See Checkpointer.restore; which it was, None where there is none. Where somebody deletes
        what is read, or makes it whole, there is something else by then, which is looked for."""
        self.state.forget_late()
        if scope.first is not None:
            self.state.check_chosen(scope.first)
        for _ in range(_ATTEMPTS):
            if not (found := self._find(step, from_store)):
                break
            try:
                return self._first_good(found, scope, is_asked=step is not None)
            except _Changed as error:
                log.info("%s", error)
        else:
            raise Missing(f"restoring: {_ATTEMPTS} checkpoints were deleted while they were read")
        if scope.only is not None:
            self.state.check_chosen(scope.only)
        return None

    def _find(
        self, step: int | str | None, from_store: str | os.PathLike[str] | None
    ) -> Iterator[Candidate] | None:
        """What to try, best first; on all ranks the same; None where there is nothing. See
        Checkpointer.restore. Memory of dead trainers is taken over for captures. Raises Missing,
        Unavailable."""
        disk = self.disk if from_store is None else tier_at(from_store)
        if from_store is not None:
            if disk.size("everstep.json") is None:
                raise Missing(f"restoring from {disk.root}: there is no store")
            open_store(disk)
        arenas = self.state.world.together("waiting for the keepers", self._settle)
        held = self._held([arena for _, arena in arenas]) if from_store is None else {}
        self.captures.optimizer_arenas.adopt(dict(arenas))
        others = [row for row in arenas if row[0] != KEY and not row[0].startswith(OPTIMIZER)]
        self.captures.pool.inherit(others)
        found = self._proven_first(disk, step, held)
        best = next(found, None)
        if best is None:
            self._check_answers(disk)
            if from_store is not None:
                raise Missing(f"restoring from {disk.root}: there is no checkpoint in it")
            return None
        if from_store is not None and (own := catalog.committed(self.disk)):
            log.warning(
                "restoring from %s: %s has %s checkpoints of its own, which are left behind; "
                "restore() without from_store= goes on from them",
                disk.root,
                self.disk.root,
                len(own),
            )
        return itertools.chain([best], found)

    def _first_good(
        self, found: Iterable[Candidate], scope: Scope, *, is_asked: bool
    ) -> CheckpointName:
        """Put the first of them that verifies into the state, and return which it was.

        `is_asked`: it is the one that was asked for, and nothing else will do. Raises Corrupt where
        none verifies, _Changed where another look shows something else, and what restore.apply
        raises."""
        failure: EverstepError | None = None
        cut_off: set[CheckpointName] = set()
        for candidate in found:
            if candidate.name in cut_off:
                continue
            try:
                self._restore(candidate, scope)
            except (Corrupt, Missing) as error:
                gather = self.state.world.gather
                if any(gather("looking for what has changed", candidate.has_changed())):
                    raise _Changed(f"{candidate.name} has changed: {error}") from error
                if is_asked and not candidate.is_replica:
                    raise KINDS[kind_of(error)](
                        f"restoring step {candidate.name.step} of {candidate.disk.root}: {error}. "
                        f"Without a step, restore() takes the newest that verifies"
                    ) from error
                log.warning("checkpoint %s cannot be restored: %s", candidate.name, error)
                failure = error
                cut_off |= self._cut_off(candidate, error)
                continue
            if failure:
                log.warning("step %s is restored, the newest that verifies", candidate.name.step)
            return candidate.name
        raise Corrupt(
            f"restoring from {candidate.disk.root}: none of its checkpoints verifies; of the "
            f"oldest: {failure}"
        )

    def _cut_off(self, candidate: Candidate, error: EverstepError) -> set[CheckpointName]:
        """What goes on from what is wrong with this one: none of it need be tried, and the store
        remembers what a replay has shown of it. On all ranks the same."""
        world, found = self.state.world, candidate.following(error)
        said = world.gather("looking for what is damaged", list(map(list, found)))
        if names := {CheckpointName(*name) for each in said for name in each} - {candidate.name}:
            log.warning("%s other steps go on from the same damage, and are skipped", len(names))
        is_lasting = isinstance(error, OtherBytes) and error.is_lasting
        if is_lasting and world.rank == 0 and candidate.disk is self.disk and not candidate.held:
            note_unproven(self.disk, candidate.name, {candidate.name, *names}, str(error))
        return names

    def _proven_first(
        self, disk: Tier, step: int | str | None, held: Mapping[CheckpointName, Held]
    ) -> Iterator[Candidate]:
        """What all ranks can see, best first; where nobody asks for a step, those last of which a
        replay has come to other bytes before."""
        world, found = self.state.world, partial(candidates, disk, step, held)
        if step is not None:
            yield from in_common(world, found)
            return
        noted_in = disk.tiers[0] if isinstance(disk, Union) else disk  # and not copied elsewhere
        known = map(list, catalog.read_unproven(noted_in))
        said = world.gather("looking for what is not proven", list(known))
        unproven = {CheckpointName(*name) for each in said for name in each}
        if late := [name.step for name in unproven if catalog.is_there(disk, name)]:
            log.warning(
                "restoring from %s: steps %s to %s are tried last, as a replay of them came to "
                "other bytes than the run had (`everstep verify` tells more)",
                disk.root,
                min(late),
                max(late),
            )
        yield from in_common(world, lambda: (each for each in found() if each.name not in unproven))
        if unproven:
            yield from in_common(world, lambda: (each for each in found() if each.name in unproven))

    def _check_answers(self, disk: Tier) -> None:
        """Where nothing was found all tiers must have been asked: a run never begins at 0 because
        one does not answer. On all ranks the same."""
        problem = str(disk.problem or "") if isinstance(disk, Union) else ""
        if said := max(self.state.world.gather("asking all tiers", problem)):
            raise Unavailable(
                f"restoring: {disk.root} has no checkpoint, and another tier does not answer: "
                f"{said}. Try again when it does; to begin anew, leave it out of tiers="
            )

    def _settle(self) -> list[tuple[str, Arena]]:
        """What dead trainers left in the keeper's memory; nothing where no keeper can be had."""
        try:
            return self.client.settle()
        except Unavailable as error:
            log.warning("%s. Restoring from the disk", error)
            return []

    def _held(self, arenas: list[Arena]) -> dict[CheckpointName, Held]:
        """What the keeper holds of this run: another may have been in this directory before."""
        run = open_store(self.disk)

        def is_wanted(held: Held) -> bool:
            is_state = bool(held.manifest.parts)
            return is_state and held.manifest.run == run and is_of(self.disk, held)

        found = find_held(arenas, is_wanted)
        lent = [name for name, held in found.items() if held.log_digest]
        each = self.state.world.gather("agreeing on the replica", list(map(list, lent)))
        common = set.intersection(*({CheckpointName(*name) for name in names} for names in each))
        return {name: held for name, held in found.items() if name in common or name not in lent}

    def _restore(self, candidate: Candidate, scope: Scope) -> None:
        self.captures.strategy.break_off()
        with Loader() as loader:
            restore = Restore(candidate, self.state, self.derived, loader, scope)
            manifest, differing = restore.apply()
        self.derived.restored(manifest.step)
        if candidate.disk is self.disk:
            self.captures.restored(candidate.name)
            self.client.tell_restored(candidate.name)
        if candidate.held and not candidate.held.is_committed:
            log.warning("step %s came from memory; it had not reached the disk", manifest.step)
        if not differing:
            return
        is_replayed = manifest.previous is not None or manifest.is_spread
        log.warning(
            "step %s was written under another build or machine (%s): %sgoing on from it may "
            "differ in last bits",
            manifest.step,
            "; ".join(differing),
            "the state is exact but for last bits of its replay, "
            if is_replayed
            else "the state is exact, "
            if manifest.exact
            else "",
        )


def in_common(world: World, find: Callable[[], Iterator[Candidate]]) -> Iterator[Candidate]:
    """What all ranks can see, from the newest on, more of it each time that more is wanted: no
    byte is read before they agree on what to restore."""
    rest, known, count = world.together("looking for checkpoints", find), list[Candidate](), 1
    while True:
        more = itertools.islice(rest, count - len(known))
        known += world.together("looking for checkpoints", partial(list, more))
        seen = world.gather("agreeing on a checkpoint", [list(each.name) for each in known])
        names = [[CheckpointName(*name) for name in each] for each in seen]
        common = set(names[0]).intersection(*names)
        yield from (each for each in known if each.name in common)
        ends = [theirs[-1] for theirs in names if len(theirs) == count]
        if not ends or not all(names):
            return
        known = [each for each in known if each.name < max(ends)]
        count *= 2


class _Changed(Exception):
    """What was read is gone, or made of something else by now."""
