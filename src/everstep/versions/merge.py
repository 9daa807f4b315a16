"""A checkpoint that is made of layers of others, with their optimizer state and hyperparameters
(LLMTailor, Minqiu Sun et al., 2025).

Nothing is computed, so that packs are shared: each source's parts get a table that names, as what
they are called here, the tensors that were taken of them, and the others as the `rest`. What cannot
be shared (a log's step, what is encoded against other bytes, a tensor's second use) is copied.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from everstep.errors import Conflict, EverstepError, Mismatch
from everstep.format.boxes import flat_boxes
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.manifest import CheckpointName
from everstep.format.tables import Table, TensorEntry
from everstep.interchange.draft import Borrowed, Draft
from everstep.interchange.tensors import Found
from everstep.interchange.write import write
from everstep.restore.load import Loader
from everstep.restore.whole import Whole, kind_of
from everstep.sharding.leaves import bytes_of
from everstep.state.objects import references
from everstep.store import catalog, names
from everstep.store.copy import Progress
from everstep.tiers.tier import Tier, name_of, tier_at
from everstep.versions.recipe import Source, Take, read_recipe

_BLOCK_BYTES = 16 << 20


def merge(
    recipe: Path, to: str, progress: Progress = lambda done, total: None
) -> tuple[CheckpointName, dict[str, Any]]:
    """Make the new store `to` with the checkpoint of a recipe; blocks. Returns what it is called,
    how many `tensors` are of which source, `bytes` that were copied, and those that are shared.
    Takes memory for some blocks, and of a log's step for its state. Raises Mismatch, which tells
    all that does not fit, before anything is written; Missing and ValueError for a recipe that
    cannot be read, Conflict where something is there, Corrupt, Unavailable."""
    problems: list[str] = []
    base, takes = read_recipe(recipe, problems.append)
    with Loader() as loader:
        wanted = filter(None, (base, *(take.source for take in takes)))
        sources = _open_all(wanted, to, loader, problems)
        plan = _Plan(recipe, sources[base], problems) if base in sources else None
        for take in takes:
            if plan and take.source in sources:
                plan.take(take, sources[take.source])
        if plan is None or problems:
            raise Mismatch(
                f"merging {recipe}: nothing was written, as not all fits: {'; '.join(problems)}"
            )
        target, draft = new_store(to, "merging"), plan.finish()
        name = write(target, draft, plan.base.name.step, progress=progress)
    size = draft.size + sum(each.part.size for each in draft.borrowed) - draft.bytes_shared
    return name, {"tensors": plan.counts(), "bytes": size, "bytes_shared": draft.bytes_shared}


def new_store(to: str, what: str) -> Tier:
    """A place where no checkpoint is yet. Raises Conflict."""
    target = tier_at(to)
    if target.size(names.STORE) is not None and catalog.committed(target):
        raise Conflict(f"{what} to {to}: it has checkpoints already. Name another place")
    return target


def _open_all(
    sources: Iterable[Source], to: str, loader: Loader, problems: list[str]
) -> dict[Source | None, Whole]:
    """The checkpoints of a recipe. Notes what cannot be had."""
    found: dict[Source | None, Whole] = {}
    for source in dict.fromkeys(sources):
        try:
            if name_of(source.store) == name_of(to):
                raise ValueError("it is where the merged checkpoint is to be")
            disk = tier_at(source.store)
            found[source] = Whole(disk, catalog.find(disk, source.step), loader)
        except (EverstepError, ValueError, OSError) as error:
            problems.append(f"{source}: {error}")
    return found


class _Plan:
    """What the merged state is: at first the base. `tensors`: by first names, with the entry as it
    will be, the source and the name there."""

    def __init__(self, recipe: Path, base: Whole, problems: list[str]) -> None:
        said = base.manifest
        self.base, self.problems = base, problems
        self.tensors = {name: (entry, base, name) for name, entry in base.entries.items()}
        self.draft = draft = Draft(str(recipe), "", strategy="merge", like=said, ranks=said.ranks)
        draft.optimizers = copy.deepcopy(base.optimizers)
        draft.hyperparameters = copy.deepcopy(said.hyperparameters)
        draft.objects = copy.deepcopy(said.objects)
        self._taken: set[str] = set()
        if said.streams:
            streams = ", ".join(said.streams)
            problems.append(
                f"{base.disk.root} {base.name}: a merge takes no streams, and it has {streams}"
            )

    def take(self, take: Take, source: Whole) -> None:
        """Put what it means in the place of what the base has. Notes problems."""

        def say(problem: str) -> None:
            self.problems.append(f"take {take.number} (of {take.source}): {problem}")

        chosen = {
            name: called
            for name, entry in source.weights.items()
            if (called := next(filter(take.matches, (name, *entry.aliases)), None))
        }
        if not chosen:
            say(f"no tensor is called {take.tensors!r}")
        for old in take.rename:
            if not any(f"{called}.".startswith(f"{old}.") for called in chosen.values()):
                say(f"nothing that is taken is called {old!r}, or in it")
        for name, called in chosen.items():
            new = take.renamed(called)
            new = self.base.firsts.get(new, new)
            known = self.base.entries.get(new)
            if known is None:
                say(f"the base has no tensor {new!r}")
            elif (said := kind_of(source.entries[name])) != (own := kind_of(known)):
                say(f"{name!r} is {said}, and {new!r} {own} in the base")
            elif new in self._taken:
                say(f"{new!r} is taken twice")
            else:
                self._taken.add(new)
                self._put(new, source, name)
                if take.optimizer:
                    self._take_state(say, source, name, new)

    def _put(self, new: str, source: Whole, name: str) -> None:
        entry = source.entries[name]
        known = self.base.entries.get(new, replace(entry, aliases=(), strides=None))
        self.tensors[new] = replace(known, spec=replace(entry.spec, name=new)), source, name

    def _take_state(self, say: Callable[[str], object], source: Whole, name: str, new: str) -> None:
        """The optimizer state and hyperparameters of a parameter."""
        for optimizer, own in self.draft.optimizers.items():
            if new not in own["groups"]:
                continue
            chosen = source.hyperparameters.get(optimizer, {}).get(name)
            objects = source.manifest.objects.get(optimizer) or {}
            plain = objects.get("state", {}).get(name)
            is_own = "state_dict" in objects or any(references([chosen, plain]))
            if chosen is None or is_own:
                has = "what only its own program can take apart" if is_own else "no state"
                say(f"{has} of {optimizer!r} for {name!r}: optimizer = false leaves the base's")
                continue
            for key in own["state"].pop(new, ()):
                self.tensors.pop(f"{optimizer}.{new}.{key}", None)
            if keys := source.optimizers[optimizer]["state"].get(name):
                own["state"][new] = list(keys)
                for key in keys:
                    self._put(f"{optimizer}.{new}.{key}", source, f"{optimizer}.{name}.{key}")
            kept = self.draft.objects.get(optimizer) or {"state": {}, "other": {}}
            kept.get("state", {}).pop(new, None)
            if plain is not None:
                kept["state"][new] = plain
                self.draft.objects[optimizer] = kept
            mine = self.draft.hyperparameters.setdefault(optimizer, [])
            if repr(chosen) not in map(repr, mine):
                mine.append(chosen)
            own["groups"][new] = list(map(repr, mine)).index(repr(chosen))

    def counts(self) -> dict[str, int]:
        """Tensors by source."""
        told = (f"{whole.disk.root} {whole.name}" for _, whole, _ in self.tensors.values())
        return dict(Counter(told))

    def finish(self) -> Draft:
        """All of it, to be written."""
        draft = self.draft
        draft.kind = ", ".join(self.counts())
        draft.exact = all(whole.is_exact for _, whole, _ in self.tensors.values())
        shared: dict[Whole, dict[str, TensorEntry]] = {}
        for new, (entry, whole, name) in self.tensors.items():
            own = shared.setdefault(whole, {})
            if whole.sharable and name not in own:
                own[name] = entry
                continue
            draft.add_tensor(new, found_in([whole], name), entry.aliases)
        for whole, wanted in shared.items():
            draft.borrowed += _borrowed(whole, wanted)
        return draft


def _borrowed(whole: Whole, wanted: Mapping[str, TensorEntry]) -> Iterator[Borrowed]:
    for part, table in whole.sharable:
        chosen = {
            wanted[name].spec.name: replace(wanted[name], pieces=entry.pieces)
            for name, entry in table.tensors.items()
            if name in wanted
        }
        rest = [entry for name, entry in table.tensors.items() if name not in wanted]
        if chosen:
            own = Table(table.packs, dict(sorted(chosen.items())), {}, (*rest, *table.rest))
            yield Borrowed(whole.disk, part, own)


def found_in(
    wholes: Sequence[Whole],
    name: str,
    joined: Callable[[list[torch.Tensor]], torch.Tensor] = lambda read: read[0],
) -> Found:
    """What `joined` makes of the tensors of that name, which are of one shape and dtype: of some of
    their elements at a time, when they are asked for."""
    spec = wholes[0].entries[name].spec
    step = _BLOCK_BYTES // ITEM_SIZES[spec.dtype]

    def blocks() -> Iterator[memoryview]:
        count = prod(spec.shape)
        for start in range(0, count, step):
            for box in flat_boxes(spec.shape, start, min(count, start + step)):
                read = [next(whole.read_boxes([(name, box)]))[2] for whole in wholes]
                yield bytes_of(joined(read)).numpy().data

    return Found.whole(spec.dtype, spec.shape, blocks)
