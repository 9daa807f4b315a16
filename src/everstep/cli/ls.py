"""everstep ls: what a store holds, epoch by epoch, as it was written.

epoch 1 · from nothing
●    40
●    80
○ 120-1         left behind: epoch 2 went back to 80
epoch 2 · from step 80 of epoch 1
●   100
"""

import argparse
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from typing import Any

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.chains import Chains
from everstep.cli.target import add_words, split_words, tags_of
from everstep.errors import EverstepError
from everstep.format.manifest import CheckpointName, Manifest
from everstep.restore.store import Store
from everstep.store import catalog, names
from everstep.store.lineage import Epoch, current
from everstep.tiers.tier import Tier, name_of, tier_at

_TITLES = ("STEP", "KIND", "TAGS", "SIZE", "ADDED", "WRITTEN", "AGE", "METRICS")
_READS_IN_FLIGHT = 8
_HEAD, _TAIL = 2, 6
"""How many checkpoints in a row are listed at the beginning and at the end, when not all are."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A store as `ls` sees it, manifests apart."""

    disk: Tier
    run: str
    epochs: dict[int, Epoch]
    checkpoints: list[CheckpointName]
    current: dict[CheckpointName, None]
    """The run as it is now, by rising step."""
    tags: dict[CheckpointName, list[str]]
    chains: Chains

    @classmethod
    def of(cls, path: str) -> "Listing":
        """Raises Missing, Corrupt, Unsupported."""
        disk = tier_at(path)
        found = sorted(catalog.committed(disk))
        epochs = catalog.read_epochs(disk, found)
        run, now = Store(path).run, dict.fromkeys(current(epochs, found))
        return cls(disk, run, epochs, found, now, tags_of(disk), Chains(disk))

    @property
    def latest(self) -> CheckpointName | None:
        """The newest of the run as it is now."""
        return next(reversed(self.current), None)

    @property
    def size_bytes(self) -> int:
        """Bytes of everything in the store's data directories, what gc would sweep included."""
        return sum(self.disk.bytes_in(directory) for directory in (names.DATA, names.TABLES))

    def read(self, name: CheckpointName) -> Manifest | EverstepError:
        """A manifest without its digests, which may be millions, or what is wrong with it."""
        try:
            found = self.chains.read(name)
        except EverstepError as error:
            return error
        parts = tuple(replace(part, digests=()) for part in found.parts)
        return replace(found, parts=parts) if not found.records else found

    def read_all(self, names: Sequence[CheckpointName]) -> list[Manifest | EverstepError]:
        """The same of several, in their order; some at a time, as a bucket answers late."""
        with ThreadPoolExecutor(_READS_IN_FLIGHT) as pool:
            return list(pool.map(self.read, names))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_words(parser)
    parser.add_argument(
        "-a", "--all", action="store_true", help="list all checkpoints, however many there are"
    )


def run(args: argparse.Namespace) -> Answer:
    """List what is there."""
    path, _ = split_words(args.words, 0)
    listing = Listing.of(path)
    facts = _to_json(listing) if args.json else {}
    return Answer(facts, chain([_head(listing, path)], _lines(listing, args.all)))


def _head(listing: Listing, path: str) -> str:
    left = len(listing.checkpoints) - len(listing.current)
    words = [
        f" · run {text.clean(listing.run[:8])}",
        text.plural(len(listing.checkpoints), "checkpoint"),
        *([f"{left:,} of them left behind (○)"] if left else []),
        text.size(listing.size_bytes),
        text.plural(len(listing.epochs), "epoch"),
    ]
    if origin := catalog.read_origin(listing.disk):
        words.append(f"from step {origin.step} of {text.clean(origin.store)}")
    name = text.clean(path if path != "." else name_of(path).rpartition("/")[2])
    return text.paint(name, "title") + " · ".join(words)


def _lines(listing: Listing, is_whole: bool) -> Iterator[str]:
    """A table of checkpoints; the lines of epochs run over its columns."""
    if not listing.checkpoints:
        yield "nothing is committed yet"
        return
    rows = list(_rows(listing, listing.checkpoints if is_whole else listing.tags.keys()))
    shown = [row for row in rows if isinstance(row, CheckpointName)]
    found = listing.read_all(shown)
    has_logs = any(isinstance(each, Manifest) and each.previous for each in found)
    cells = [_cells(listing, *pair, has_logs) for pair in zip(shown, found, strict=True)]
    titles, *aligned = text.table(_TITLES, cells, right=("SIZE", "ADDED", "AGE"))
    yield from ("", text.line(f"  {titles}", "dim"))
    table = zip(aligned, found, strict=True)
    for row in rows:
        if isinstance(row, CheckpointName):
            line, manifest = next(table)
            yield text.line(f"{_mark(listing, row)} {line}", _style(listing, row, manifest))
        elif isinstance(row, Epoch):
            yield text.line(_caption(row), "dim")
        else:
            yield text.line(f"┊ {row:,} more (--all lists them)", "dim")


def _rows(
    listing: Listing, always: Collection[CheckpointName]
) -> Iterator[Epoch | CheckpointName | int]:
    """Each epoch that wrote anything, and the newest; its checkpoints; how many are hidden: the
    middle of a long row, but for those in `always`."""
    for number, epoch in sorted(listing.epochs.items()):
        own = [name for name in listing.checkpoints if name.epoch == number]
        if own or number == max(listing.epochs):
            yield epoch
        for _, group in groupby(own, key=lambda name: _mark(listing, name)):
            yield from _shortened(list(group), always)


def _shortened(
    names: Sequence[CheckpointName], always: Collection[CheckpointName]
) -> Iterator[CheckpointName | int]:
    def is_shown(row: tuple[int, CheckpointName]) -> bool:
        return row[1] in always or not _HEAD <= row[0] < len(names) - _TAIL

    for are_shown, group in groupby(enumerate(names), is_shown):
        found = [name for _, name in group]
        yield from found if are_shown else [len(found)]


def _mark(listing: Listing, name: CheckpointName) -> str:
    return "●" if name in listing.current else "○"


def _style(listing: Listing, name: CheckpointName, manifest: Manifest | EverstepError) -> str:
    if isinstance(manifest, EverstepError):
        return "bad"
    if name not in listing.current:
        return "dim"
    return "live" if name == listing.latest else ""


def _caption(epoch: Epoch) -> str:
    is_first = epoch.parent is None
    origin = "from nothing" if is_first else f"from step {epoch.fork} of epoch {epoch.parent}"
    parts = [f"epoch {epoch.number}", origin, text.clean(epoch.writer), text.age(epoch.created)]
    return " · ".join(filter(None, parts))


def _cells(
    listing: Listing, name: CheckpointName, manifest: Manifest | EverstepError, has_logs: bool
) -> list[str]:
    digits = len(str(listing.checkpoints[-1].step))
    step = f"{name.step:>{digits}}" + ("" if name in listing.current else f"-{name.epoch}")
    tags = " ".join(
        [*listing.tags.get(name, []), *(["← latest"] if name == listing.latest else [])]
    )
    if isinstance(manifest, EverstepError):
        return [step, "", text.clean(tags), "", "", "", "", type(manifest).__name__.lower()]
    return [
        step,
        _kind(listing, name, manifest) if has_logs else "",
        text.clean(tags),
        text.size(manifest.size),
        text.size(added) if (added := catalog.added_bytes(manifest)) != manifest.size else "",
        text.time(manifest.created),
        text.age(manifest.created),
        text.pairs(manifest.metrics),
    ]


def _kind(listing: Listing, name: CheckpointName, manifest: Manifest) -> str:
    """As "state", or "log of 120": the state after which its records are replayed; "log, whole"
    where nothing is any more."""
    if manifest.previous is None:
        return "state"
    origin = listing.chains.origin(name)
    if origin is None:
        return "log of ?"
    inexact = "" if listing.chains.is_exact(name) else " (inexact)"
    if origin[0] == name:
        return f"log, whole{inexact}"
    made = " (whole: inexact)" if listing.chains.whole(name) else inexact
    return f"log of {origin[0].step}{made}"


def _to_json(listing: Listing) -> dict[str, Any]:
    found = zip(listing.checkpoints, listing.read_all(listing.checkpoints), strict=True)
    return {
        "store": str(listing.disk.root),
        "run": listing.run,
        "from": origin._asdict() if (origin := catalog.read_origin(listing.disk)) else None,
        "latest": listing.latest.step if listing.latest else None,
        "size": listing.size_bytes,
        "epochs": [asdict(epoch) for _, epoch in sorted(listing.epochs.items())],
        "checkpoints": [_entry(listing, name, manifest) for name, manifest in found],
    }


def _entry(
    listing: Listing, name: CheckpointName, manifest: Manifest | EverstepError
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": str(name),
        "step": name.step,
        "epoch": name.epoch,
        "current": name in listing.current,
        "tags": listing.tags.get(name, []),
    }
    if isinstance(manifest, EverstepError):
        return {**entry, "problem": str(manifest)}
    origin = listing.chains.origin(name) if manifest.previous else None
    base, records = origin or (None, None)
    return {
        **entry,
        "kind": "log" if manifest.previous else "state",
        "previous": asdict(manifest.previous) if manifest.previous else None,
        "base": base._asdict() if base else None,
        "records": records,
        "whole": listing.chains.whole(name),
        "size": manifest.size,
        "added": catalog.added_bytes(manifest),
        "created": manifest.created,
        "exact": manifest.exact and listing.chains.is_exact(name),
        "metrics": manifest.metrics,
    }
