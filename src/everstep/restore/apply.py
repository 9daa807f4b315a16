"""A checkpoint → the live state: fill and install the state that it goes on from, then replay its
log, then place what no optimizer changes.

Nothing of the user's is changed before everything has been found to fit.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache, partial

import torch

from everstep.errors import Mismatch, Unsupported
from everstep.format.boxes import Box
from everstep.format.document import digest_of
from everstep.format.global_tensors import GlobalTensor
from everstep.format.manifest import Manifest, Record
from everstep.format.tables import Table, TensorEntry, is_own, owned_names, owners
from everstep.redo.replay import as_stored, check, find, of_rank, redo
from everstep.redo.rules import Rules, is_in
from everstep.restore.choose import Candidate, Described, has_to_be_equal, moved
from everstep.restore.deliver import Staging, put
from everstep.restore.derived import Derivation, derived_names, derived_parts
from everstep.restore.load import Loader
from everstep.restore.prefetch import Queued
from everstep.restore.rebuild import rebuilt
from everstep.restore.records import Records, United
from everstep.sharding.layout import shards_of
from everstep.sharding.ranked import unowned
from everstep.sharding.redundancy import is_dealt_out, is_same_class, send_around
from everstep.sharding.topology import ALONE, adopted, differences
from everstep.sharding.world import World
from everstep.state.optimizers import OptimizerState
from everstep.state.placement import Destination, Placement, Saved
from everstep.state.view import State

log = logging.getLogger("everstep")

Wanted = tuple[GlobalTensor, list[Destination]]
"""A stored tensor, and where its boxes are to go."""


@torch.inference_mode(False)  # whoever restores in it: what is made here is to be trained
def apply(
    candidate: Candidate,
    state: State,
    only: list[str] | None,
    loader: Loader,
    must_be_exact: bool = False,
    rules: Rules | None = None,
) -> tuple[Manifest, list[str]]:
    """Put the checkpoint into the state; blocks. Returns its manifest, and what is other here than
    where it, and what was replayed, was written. `rules`: of derived parts.

    Raises Mismatch (nothing was changed then), Corrupt (the state is half filled then), Unsupported
    for a log whose replay might not be exact where it must be, and for a part of a log that cannot
    be replayed beside the state.
    """
    base, *logs = state.world.together("reading the manifest", candidate.describe)
    replayed = [base, *logs] if base.manifest.is_spread else logs
    # parts are replayed beside the state, on nobody's layout
    layout = state.layout() if replayed and only is None else ALONE
    differing = sorted({text for each in replayed for text in each.differences(layout)})
    is_moved = False
    if replayed and only is None:
        each = state.world.gather("comparing devices", moved(base, _kinds(state)))
        differing += sorted({text for found in each for text in found})
        is_moved = any(each)
    if must_be_exact and differing:
        raise Unsupported(
            f"restoring step {candidate.name.step} exactly: it has to be replayed from step "
            f"{_first_step(base)}, and was recorded under {'; '.join(differing)}. Restore it "
            f"there, or with exact='allow'"
        )
    if must_be_exact and not base.manifest.exact:
        raise Unsupported(f"{_inexact(candidate, base)}. Restore another step, or exact='allow'")
    optimized = {name for table in base.tables for name in owned_names(table.optimizers)}
    if replayed and only is None and _is_beside(base, state, replayed):
        take = partial(_take, candidate, base, replayed, state, None, optimized, must_be_exact)
        return state.world.together("replaying", lambda: take(loader)), differing
    if replayed and only is not None:
        take = partial(_take, candidate, base, replayed, state, only, optimized, must_be_exact)
        return take(loader), differing
    if replayed:
        _check_alone(candidate, state)
    derivation = Derivation(base, logs, rules, state, optimized)
    optimized |= derivation.names
    placement = state.place(Saved.of(base.manifest, base.tables))
    state.prepare(placement, state.parts_of(optimized) if replayed else only)
    together = state.world.together
    together("fitting", lambda: placement.check(candidate.name.step, candidate.disk.root))
    candidate.is_shared = _is_shared(state.world, placement)
    _tell(candidate, base)
    if not replayed:
        _tell_classes(candidate, base, state, only)
        wanted = placement.destinations.values()
        together("reading", lambda: _fill(candidate, base, wanted, loader))
        placement.finish()
        return base.manifest, differences(base.manifest.topology)
    with contextlib.ExitStack() as stack, _keeping_gradients(state):
        saved = _saved_after(base, replayed[-1], optimized)
        place_rest = partial(_place_rest, state, saved, optimized, derivation)
        replay = partial(_replay, candidate, base, replayed, state, placement, loader)
        together("replaying", lambda: replay(derivation, place_rest, stack, is_moved=is_moved))
        for optimizer in state.optimizers:
            send_around(optimizer.optimizer)  # all ranks have come to the end of it
        rest = place_rest()

        def fill() -> None:
            _fill(candidate, replayed[-1], _others(rest, optimized), loader)
            _fill_from_live(rest, state, derivation, replayed[-1], optimized)

        together("reading what came after", fill)
        rest.finish()
    return replayed[-1].manifest, differing


def _kinds(state: State) -> dict[str, str]:
    """On which kind of device the parameters are that are here."""
    state.name_parameters()
    return {
        each: parameter.device.type
        for optimizer in state.optimizers
        for _, name, parameter, _ in optimizer.parameters()
        for each in optimizer.mapped.names_here(name, parameter)
    }


def _is_beside(base: Described, state: State, logs: Sequence[Described]) -> bool:
    """Whether it is to be replayed beside the state: tensors of which the base has different steps
    are in one parameter on some rank, which has one gradient, and one step, for all of them."""
    if not base.manifest.is_spread or derived_parts(logs)[0]:
        return False
    is_mixed = any(
        len(set(optimizer.mapped.names(name, parameter))) > 1
        for optimizer in state.optimizers
        for _, name, parameter, _ in optimizer.parameters()
    )
    return any(state.world.gather("comparing parameters", is_mixed))


def _check_alone(candidate: Candidate, state: State) -> None:
    """Raises Unsupported where it takes other ranks to replay."""
    dealt = [each.name for each in state.optimizers if is_dealt_out(each.optimizer)]
    if state.world.is_alone and dealt:
        raise Unsupported(
            f"restoring step {candidate.name.step}: it has to be replayed, and other ranks make "
            f"some of the updates of {dealt[0]!r}. Restore it by a Checkpointer of all ranks"
        )


def _is_shared(world: World, placement: Placement) -> bool:
    """Whether another rank of this node wants just what this one does (replicas): what is read
    directly would be read off the disk again for each."""
    if world.is_alone:
        return False
    wanted = [
        (name, [(each.box.offsets, each.box.lengths) for each in found])
        for name, (_, found) in sorted(placement.destinations.items())
        if unowned(name) == name
    ]
    said = world.gather("comparing what is read", digest_of(json.dumps(wanted).encode()))
    return any(said[rank] == said[world.rank] for rank in world.local if rank != world.rank)


def _take(
    candidate: Candidate,
    base: Described,
    logs: Sequence[Described],
    state: State,
    only: list[str] | None,
    optimized: Set[str],
    must_be_exact: bool,
    loader: Loader,
) -> Manifest:
    """Parts of what a log comes to (None: all), which is replayed beside the state. Takes memory
    for all of it."""
    last = logs[-1]
    derived, ruled = derived_parts(logs)
    saved = _saved_after(base, last, optimized | derived_names(base, derived, optimized))
    placement = state.place(saved)
    state.prepare(placement, only)
    placement.check(candidate.name.step, candidate.disk.root)
    named = {
        name
        for entry, _ in placement.destinations.values()
        for name in (entry.spec.name, *entry.aliases)
    }
    _tell(candidate, base)
    if taken := sorted(part for part in ruled if any(is_in(name, part) for name in named)):
        raise Unsupported(
            f"restoring only={only} of step {candidate.name.step}: {taken[0]!r} is derived by a "
            f"rule of its own (derive=), which runs in the whole state alone. Restore all of it, "
            f"or parts without {taken[0]!r}"
        )
    if any(saved.tensors[name].device != "cpu" for name in optimized & saved.tensors.keys()):
        problem = (
            f"restoring {'' if only is None else f'only={only} of '}step {candidate.name.step}: it "
            f"was trained on a GPU, and {'' if only is None else 'parts of a log are '}replayed on "
            f"the CPU, where last bits differ"
        )
        if must_be_exact:
            way = "it where its tensors are apart" if only is None else "all of it"
            raise Unsupported(f"{problem}. Restore {way}, or with exact='allow'")
        log.warning("%s", problem)
    with adopted(last.manifest.topology):
        found = rebuilt(candidate, base, logs, loader, without_derived=True)
    for name, (whole, destinations) in placement.destinations.items():
        for destination in destinations:
            inside = destination.box.slices_in(Box.whole(whole.spec.shape))
            put(destination.tensor, found[name][inside])
    placement.finish()
    return last.manifest


def _replay(
    candidate: Candidate,
    base: Described,
    logs: Sequence[Described],
    state: State,
    placement: Placement,
    loader: Loader,
    derivation: Derivation,
    place_rest: Callable[[], Placement],
    stack: contextlib.ExitStack,
    *,
    is_moved: bool,
) -> None:
    """The base first, for which `placement` is ready, then the records: its own, where it is spread
    over several steps, and its log's. `place_rest`: what comes after them has to fit, too. `stack`:
    where the records are closed, whose memory takes a while to be given back."""
    optimizers = {optimizer.name: optimizer for optimizer in state.optimizers}
    _check_calls(logs, optimizers, state.world)
    live = cache(state.live_tensors)

    def fill(
        record: Record, table: Table, here: list[tuple[TensorEntry, list[Destination]]]
    ) -> None:
        with candidate.sources(record.part) as sources:
            loader.load(record.part, sources, here, table)

    is_comparable = has_to_be_equal(base, logs, state.layout(), is_moved=is_moved)
    records = stack.enter_context(
        Records(candidate, logs, optimizers.values(), loader, is_comparable, state.world)
    )
    place_rest().check(candidate.name.step, candidate.disk.root)
    records.read_base(
        [
            partial(_fill, candidate, base, wanted, loader)
            for wanted in _portions(base, placement, records.portions)
        ]
    )
    is_installed = False
    for loaded in records:
        if not is_installed:  # only tensors are still to come, into memory that it knows
            placement.finish()
            is_installed = True
        redo(loaded, optimizers)
        if loaded.is_last:
            derivation.after(loaded, live, fill)
        del loaded


def _check_calls(
    logs: Sequence[Described], optimizers: Mapping[str, OptimizerState], world: World
) -> None:
    """Raises Mismatch where an optimizer that was called is not there, or is another, or has
    parameters in one group that had different hyperparameters then; Corrupt where what a record
    says of a call is none."""
    united: dict[tuple[int, ...], United] = {}  # most steps share a table
    merged: dict[tuple[tuple[int, ...], str], list[set[int]]] = {}
    for described in logs:
        for record, tables in described.records:
            tables_key = tuple(map(id, tables))
            if tables_key not in united:
                united[tables_key] = United.of(tables)
            here = united[tables_key]
            for number, call in enumerate(record.calls):
                state = find(record.step, call, optimizers)
                key = tables_key, state.name
                with as_stored(record.step):
                    groups = here.groups[state.name]
                    if key not in merged:
                        merged[key] = _merged(state, groups)
                    differing = [
                        numbers
                        for numbers in merged[key]
                        if len({repr(call["sets"][number]) for number in numbers}) > 1
                    ]
                said = of_rank(call, world.rank, world.size)
                check(record.step, f"@{number}", said, groups, state, here.tensors)
                if differing:
                    raise Mismatch(
                        f"replaying step {record.step}: a group of {state.name!r} has parameters "
                        f"that had different hyperparameters then (its groups "
                        f"{sorted(differing[0])}). Build the state as it was"
                    )


def _merged(state: OptimizerState, groups: Mapping[str, int]) -> list[set[int]]:
    """The groups of then whose parameters stand in one group now."""
    members: dict[int, set[int]] = {}
    for index, name, parameter, _ in state.parameters():
        for each in state.mapped.names(name, parameter):
            members.setdefault(index, set()).add(groups[each])
    return [numbers for numbers in members.values() if len(numbers) > 1]


def _inexact(candidate: Candidate, base: Described) -> str:
    is_there = candidate.name.step == base.manifest.step
    what = "It" if is_there else f"Step {base.manifest.step}, from which it goes on,"
    return (
        f"restoring step {candidate.name.step}: what is stored of it is the run's own but for last "
        f"bits (exact: false). {what} was made whole by a replay elsewhere, in place of its log"
    )


def _tell(candidate: Candidate, base: Described) -> None:
    if not base.manifest.exact:
        log.warning("%s", _inexact(candidate, base))


def _tell_classes(
    candidate: Candidate, base: Described, state: State, only: list[str] | None
) -> None:
    """A replay refuses another class; a whole state fits into it, whatever that makes of it."""
    for name, then in base.manifest.classes.items():
        now = state.classes(only).get(name, then)
        if not is_same_class(now, then):
            log.warning(
                "restoring step %s: %r was a %s, and is a %s now, which has its state and its "
                "hyperparameters from here on. To restore the weights alone: only=",
                candidate.name.step,
                name,
                then,
                now,
            )


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


def _first_step(base: Described) -> int:
    """Of what has to be there before anything is replayed."""
    return min(part.steps for part in base.manifest.parts)


def _place_rest(
    state: State, saved: Saved, optimized: Set[str], derivation: Derivation
) -> Placement:
    """What of the state after the last record the base and the replay do not bring."""
    placement = state.place_rest(saved, optimized, derivation.live().values())
    state.prepare(placement, None)
    return placement


def _portions(
    base: Described, placement: Placement, portions: Sequence[Set[str]]
) -> list[list[Wanted]]:
    """What is wanted of the base, in as many portions as these are of its parameters: with each
    what optimizers keep of them; with the first all else, so that the placement can be finished
    then. All with the first, where the user's code would look at what comes later."""
    number_of = {name: number for number, names in enumerate(portions) for name in names}
    if not placement.is_by_reference:
        number_of = {}
    known = {
        name: number_of.get(parameter, 0)
        for table in base.tables
        for name, parameter in owners(table.optimizers)
    }
    found: list[list[Wanted]] = [[] for _ in portions]
    for name, (whole, destinations) in placement.destinations.items():
        numbers = [known[each] for each in (name, *whole.aliases) if each in known]
        found[min(numbers, default=0)].append((whole, destinations))
    return found


def _others(placement: Placement, names: Set[str]) -> list[Wanted]:
    """What is wanted, but for these."""
    return [
        (whole, destinations)
        for name, (whole, destinations) in placement.destinations.items()
        if names.isdisjoint((name, *whole.aliases))
    ]


def _fill(
    candidate: Candidate,
    described: Described,
    wanted: Iterable[Wanted],
    loader: Loader,
    queued: Queued | None = None,
) -> None:
    """Load what the checkpoint has of these itself; blocks."""
    staging = Staging()
    rows: dict[int, tuple[TensorEntry, list[Destination]]] = {}
    for whole, destinations in wanted:
        direct = [staging.direct(destination) for destination in destinations]
        rows |= {id(entry): (entry, direct) for entry in whole.entries}
    for part, table in zip(described.manifest.all_parts, described.tables, strict=True):
        here = [rows[id(entry)] for entry in table.tensors.values() if id(entry) in rows]
        if here:
            with candidate.sources(part) as sources:
                loader.load(part, sources, here, table, queued)
    staging.finish()


def _saved_after(base: Described, last: Described, optimized: Set[str]) -> Saved:
    """What the state has after the last record: of the base what optimizers change, by all its
    names, and all else as the record has it."""
    before = Saved.of(base.manifest, base.tables)
    after = Saved.of(last.manifest, last.tables)
    kept = {
        name: entry
        for name, entry in before.tensors.items()
        if not optimized.isdisjoint((entry.spec.name, *entry.aliases))
    }
    own = {name: entry for name, entry in after.tensors.items() if not is_own(name)}
    return replace(after, tensors={**kept, **own})


def _fill_from_live(
    placement: Placement,
    state: State,
    derivation: Derivation,
    last: Described,
    optimized: Set[str],
) -> None:
    """Where an object refers to what an optimizer changes: it gets what the replay came to."""
    own = {
        name
        for table in last.tables
        for name, entry in table.tensors.items()
        if optimized.isdisjoint((name, *entry.aliases))
    }
    if placement.destinations.keys() <= own:
        return
    live: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for optimizer in state.optimizers:
        for leaf in optimizer.places():
            box = leaf.box or Box.whole(tuple(leaf.tensor.shape))
            live.setdefault(leaf.name, []).append((box, leaf.tensor))
    live |= {name: shards_of(tensor)[1] for name, tensor in derivation.live().items()}
    with torch.no_grad():
        for name, (entry, destinations) in placement.destinations.items():
            source = next((live[key] for key in (name, *entry.aliases) if key in live), None)
            if name in own or source is None:
                continue
            for destination in destinations:
                for box, tensor in source:
                    common = box.intersect(destination.box)
                    if common and not _is_same(tensor, destination.tensor):
                        inside = destination.tensor[common.slices_in(destination.box)]
                        inside.copy_(tensor[common.slices_in(box)])


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are the same memory."""
    alike = (tensor.shape, tensor.stride()) == (other.shape, other.stride())
    return tensor is other or (alike and tensor.data_ptr() == other.data_ptr())
