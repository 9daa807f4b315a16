"""A checkpoint of a store as what others take: its tensors by name, in bounded memory, and objects.

A step of a log is made whole on the way, in memory: nothing is written to the store.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from everstep.codecs.codec import master_of
from everstep.errors import Missing
from everstep.format.boxes import Box
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.global_tensors import Version
from everstep.format.manifest import CheckpointName, Manifest
from everstep.format.packed import content_digests
from everstep.format.packs import Spec, chunk_count, in_groups
from everstep.format.tables import TensorEntry
from everstep.restore.chain import Chain, objects_tensors
from everstep.restore.choose import Candidate
from everstep.restore.deliver import empty
from everstep.restore.load import Loader, Wanted, boxes_of, fill, fill_from_live, gathered
from everstep.restore.rebuild import Rebuilt
from everstep.sharding.layout import LocalBox
from everstep.sharding.leaves import Leaf
from everstep.tiers.tier import Tier

log = logging.getLogger("everstep")

BATCH_BYTES = 32 << 20
"""Small tensors are read together, up to so many bytes."""


class Whole:
    """A checkpoint. For one thread. Takes memory for a batch of tensors, or the largest; of a log
    for the whole state, which is replayed."""

    def __init__(
        self, disk: Tier, name: CheckpointName, loader: Loader, state: Manifest | None = None
    ) -> None:
        """`state`: the whole state that is meant, where it need not be exact. Raises Missing,
        Corrupt; Unsupported for a log that only its own program can replay."""
        self.name, self.disk, self._loader = name, disk, loader
        self._candidate = here = Candidate(name, disk)
        chain = Chain(here.outline(state), []) if state else here.describe()
        self.manifest: Manifest = chain.last.manifest
        self._base = chain.base
        self._replayed: dict[str, torch.Tensor] | None = None
        if chain.replayed:
            chain.check_unruled(f"reading {name} of {disk.root}")
            self._replayed = Rebuilt(here, chain, loader).tensors
        differing = chain.why_inexact
        self.is_exact = not differing
        """Whether it is just what the run had."""
        if differing:
            log.warning(
                "reading %s of %s: it may not be just what the run had: %s",
                name,
                disk.root,
                "; ".join(differing),
            )
        known = chain.saved(chain.optimized).tensors
        own = {each.spec.name: each for each in known.values()}
        if self._replayed is not None:
            own = {key: _entry(key, each, own) for key, each in self._replayed.items()}
        self.entries: dict[str, TensorEntry] = dict(sorted(own.items()))
        """By their first names."""
        self.optimizers: dict[str, Any] = chain.last.optimizers

    @cached_property
    def hyperparameters(self) -> dict[str, dict[str, Any]]:
        """Of each optimizer the set of each of its parameters."""
        found = {}
        for optimizer, said in self.optimizers.items():
            sets = self.manifest.hyperparameters.get(optimizer, [])
            rows = said["groups"].items()
            found[optimizer] = {name: sets[index] for name, index in rows if index < len(sets)}
        return found

    @cached_property
    def firsts(self) -> dict[str, str]:
        """Of each name of a tensor its first one."""
        rows = self.entries.items()
        return {alias: name for name, entry in rows for alias in (name, *entry.aliases)}

    @cached_property
    def weights(self) -> dict[str, TensorEntry]:
        """The tensors of models: neither optimizers' own nor in an object, but for those objects
        that are part of a model's state_dict."""
        referred = objects_tensors(self.manifest)
        own_state = tuple(f"{optimizer}." for optimizer in self.optimizers)
        known = {
            name: each for name, each in self.entries.items() if not name.startswith(own_state)
        }
        heads = {_head(name) for name in known.keys() - referred}
        return {name: each for name, each in known.items() if _head(name) in heads}

    def part(self, named: str | None) -> dict[str, str]:
        """The weights of a part of the state (None: of the only one that has any), by their names
        in it: a name in it → that of the tensor. Raises Missing."""
        heads = sorted(set(map(_head, self.weights)))
        if named is None and len(heads) != 1:
            found = f"weights in {', '.join(heads)}: say which, by --part" if heads else "no model"
            raise Missing(f"exporting step {self.name.step} of {self.disk.root}: it has {found}")
        prefix = f"{named or heads[0]}."
        chosen = {n.removeprefix(prefix): n for n in self.weights if n.startswith(prefix)}
        if not chosen:
            raise Missing(
                f"exporting step {self.name.step} of {self.disk.root}: it has no weights in "
                f"{named!r}, but in {', '.join(heads)}"
            )
        return chosen

    def tensors(self, names: Collection[str] | None) -> dict[str, torch.Tensor]:
        """Those (None: all), by whichever of their names, each a new row-major one on the CPU.
        Raises Missing for names that are not there."""
        if isinstance(names, str):
            raise ValueError(f"names must be a list of names, not {names!r}")
        step, root, known = self.name.step, self.disk.root, self.firsts
        if unknown := sorted(set(names or ()) - known.keys()):
            raise Missing(
                f"reading step {step} of {root}: it has no tensors named {unknown}; "
                f"everstep show {root} {step} lists the {len(known)} that it has"
            )
        chosen = known if names is None else {name: known[name] for name in names}
        made = dict(self.read(list(dict.fromkeys(chosen.values()))))
        return {name: made[first] for name, first in chosen.items()}

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These tensors, row-major on the CPU, in this order; verified."""
        for name, _, tensor in self.read_boxes((name, self._whole_box(name)) for name in names):
            yield name, tensor

    def read_boxes(
        self, wanted: Iterable[tuple[str, Box]]
    ) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Boxes of these tensors in this order, as `read`; one that is larger than BATCH_BYTES
        takes memory for all of it. The next are read while these are used."""
        rows = ((row, self.size(*row)) for row in wanted)
        batches = map(self._filled, in_groups(rows, BATCH_BYTES))
        with ThreadPoolExecutor(1, "everstep-ahead") as ahead:
            following = ahead.submit(next, batches, None)
            while made := following.result():
                following = ahead.submit(next, batches, None)
                while made:
                    name, (box, tensor) = made.pop(0)
                    yield name, box, tensor

    def fill(self, wanted: Wanted) -> None:
        """Put boxes of tensors that are there into memory; blocks. Of a state those tables are read
        that have some of them, of a log what it came to is copied. Raises Corrupt, Unavailable."""
        if self._replayed is not None:
            live = {name: [LocalBox.whole(tensor)] for name, tensor in self._replayed.items()}
            fill_from_live(live, wanted)
        else:
            versions = self._candidate.versions(self._base, boxes_of(wanted))
            fill(self._candidate, versions, wanted, self._loader)

    def _filled(self, batch: Sequence[tuple[str, Box]]) -> list[tuple[str, LocalBox]]:
        """New memory with these boxes."""
        if self._replayed is not None:
            return [(name, self._view(name, box)) for name, box in batch]
        made = []
        for name, box in batch:
            spec = replace(self.entries[name].spec, shape=box.lengths)
            made.append((name, LocalBox(box, empty(TensorEntry(spec, ())))))
        self.fill(gathered((self.entries[name], place) for name, place in made))
        return made

    def _view(self, name: str, box: Box) -> LocalBox:
        """Of what a replay came to."""
        assert self._replayed is not None
        inside = box.slices_in(self._whole_box(name))
        return LocalBox(box, self._replayed[name].detach()[inside].contiguous())

    def _whole_box(self, name: str) -> Box:
        return Box.whole(self.entries[name].spec.shape)

    def size(self, name: str, box: Box) -> int:
        """Bytes of a box of that tensor."""
        return box.count * ITEM_SIZES[self.entries[name].spec.dtype]

    @cached_property
    def _versions(self) -> Sequence[Version]:
        """Of the state, or a log's base, with all tables that have something."""
        boxes = {name: [self._whole_box(name)] for name in self.entries}
        return self._candidate.versions(self._base, boxes)

    @cached_property
    def sharable(self) -> Version:
        """Its parts, where another checkpoint may name their packs: each chunk of them decodes
        without what it is not beside."""
        version = self._versions[0] if len(self._versions) == 1 and self._replayed is None else ()
        needs_others = any(
            part.base is not None or any(master_of(each.codec) for each in part.encoded or ())
            for part, _ in version
        )
        return () if needs_others else version

    @cached_property
    def contents(self) -> dict[str, dict[Box, tuple[str | None, ...]]]:
        """Of each tensor its pieces, and the digests of what their chunks hold, as far as they are
        known; of a log, which was replayed, nothing."""
        found: dict[str, dict[Box, tuple[str | None, ...]]] = {}
        for version in self._versions if self._replayed is None else ():
            here: dict[str, dict[Box, tuple[str | None, ...]]] = {}
            for part, table in version:
                known = content_digests(part, table)
                for name, entry in table.tensors.items():
                    for piece in entry.pieces:
                        numbers = range(piece.digest, piece.digest + chunk_count(piece.size))
                        here.setdefault(name, {})[piece.box] = tuple(known[n] for n in numbers)
            found |= here
        return found


def kind_of(entry: TensorEntry) -> str:
    """Dtype and shape, for messages and to be compared."""
    return f"{entry.spec.dtype} {list(entry.spec.shape)}"


def _head(name: str) -> str:
    return name.partition(".")[0]


def _entry(name: str, tensor: torch.Tensor, stored: dict[str, TensorEntry]) -> TensorEntry:
    """Of what a replay came to."""
    spec: Spec = Leaf(name, tensor).spec
    known = stored.get(name)
    return TensorEntry(spec, (), known.aliases if known else ())
