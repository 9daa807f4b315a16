"""everstep ls: what a store holds, epoch by epoch, as it was written."""

import argparse
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain, groupby
from typing import Any

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.chains import Chains
from everstep.cli.target import add_words, split_words, tags_of
from everstep.errors import EverstepError
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, names
from everstep.store.lineage import Epoch, current
from everstep.tiers.tier import Tier

Facts = dict[str, Any]

_TITLES = ("STEP", "KIND", "TAGS", "SIZE", "ADDED", "WRITTEN", "METRICS")
_READS_IN_FLIGHT = 8
_HEAD, _TAIL = 2, 6
"""How many checkpoints in a row are listed at the beginning and at the end, when not all are."""


class Listing:
    """A store as `ls` sees it, manifests apart."""

    def __init__(self, disk: Tier) -> None:
        """Raises Missing, Corrupt, Unsupported."""
        self.run, self.origin = catalog.read_run(disk), catalog.read_origin(disk)
        self.checkpoints = sorted(catalog.committed(disk))
        self.epochs = catalog.read_epochs(disk, map(str, self.checkpoints))
        self.current = dict.fromkeys(current(self.epochs, self.checkpoints))
        """The run as it is now, by rising step."""
        self.latest = next(reversed(self.current), None)
        self.tags = tags_of(disk)
        self.size_bytes = sum(
            size for each in (names.DATA, names.TABLES) for size, _ in disk.files(each).values()
        )
        """Of all data files, what gc would sweep included."""
        self._chains = Chains(disk)

    def entries(self, names: Sequence[CheckpointName]) -> list[Facts]:
        """What there is to say of each. Some manifests are read at a time, as a bucket answers
        late."""
        with ThreadPoolExecutor(_READS_IN_FLIGHT) as pool:
            for name in names:
                pool.submit(self._chains.link, name)  # it is remembered; errors come again below
        return list(map(self._entry, names))

    def _entry(self, name: CheckpointName) -> Facts:
        """What its manifest says, or what is wrong with it; its place in the run and its chain."""
        own = {"name": str(name), **name._asdict(), "current": name in self.current}
        own["tags"] = self.tags.get(name, [])
        try:
            said = self._chains.link(name).facts
        except EverstepError as error:
            return own | {"kind": type(error).__name__.lower(), "problem": str(error)}
        own |= said
        base, records = self._chains.origin(name) or (None, None)
        own["exact"] &= base is None or self._chains.link(base).exact
        is_log = said["kind"] == "log"
        return own | {
            "base": base._asdict() if base and is_log else None,
            "records": records if is_log else None,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser)
    parser.add_argument(
        "-a", "--all", action="store_true", help="list all checkpoints, however many there are"
    )


def run(args: argparse.Namespace) -> Answer:
    disk, _ = split_words(args.words, 0)
    listing = Listing(disk)
    facts = _to_json(str(disk.root), listing) if args.json else {}
    return Answer(facts, chain([_head(str(disk.root), listing)], _lines(listing, args.all)))


def _head(place: str, listing: Listing) -> str:
    left = len(listing.checkpoints) - len(listing.current)
    words = [
        f" · run {text.clean(listing.run[:8])}",
        text.plural(len(listing.checkpoints), "checkpoint"),
        *([f"{left:,} of them left behind (○)"] if left else []),
        text.size(listing.size_bytes),
        text.plural(len(listing.epochs), "epoch"),
    ]
    if origin := listing.origin:
        words.append(f"from step {origin['step']} of {text.clean(origin['store'])}")
    return text.paint(text.clean(place), "title") + " · ".join(words)


def _lines(listing: Listing, is_whole: bool) -> Iterator[str]:
    """A table of checkpoints; the lines of epochs run over its columns."""
    if not listing.checkpoints:
        yield "nothing is committed yet"
        return
    rows = list(_rows(listing, listing.checkpoints if is_whole else listing.tags.keys()))
    shown = [row for row in rows if not isinstance(row, str)]
    entries = listing.entries(shown)
    has_kinds = any(entry["kind"] == "log" or not entry.get("exact", True) for entry in entries)
    cells = [_cells(listing, entry, has_kinds) for entry in entries]
    titles, *aligned = text.table(_TITLES, cells, right=("SIZE", "ADDED"))
    yield from ("", text.line(f"  {titles}", "dim"))
    table = zip(aligned, entries, strict=True)
    for row in rows:
        if isinstance(row, str):
            yield text.line(row, "dim")
        else:
            line, entry = next(table)
            yield text.line(f"{_mark(listing, row)} {line}", _style(listing, row, entry))


def _rows(listing: Listing, always: Collection[CheckpointName]) -> Iterator[CheckpointName | str]:
    """A line for each epoch that wrote anything, and the newest; its checkpoints; a line of how
    many are hidden: the middle of a long row, but for those in `always`."""
    for number, epoch in sorted(listing.epochs.items()):
        own = [name for name in listing.checkpoints if name.epoch == number]
        if own or number == max(listing.epochs):
            yield _caption(epoch)
        for _, group in groupby(own, key=lambda name: _mark(listing, name)):
            yield from _shortened(list(group), always)


def _shortened(
    names: Sequence[CheckpointName], always: Collection[CheckpointName]
) -> Iterator[CheckpointName | str]:
    def is_shown(row: tuple[int, CheckpointName]) -> bool:
        return row[1] in always or not _HEAD <= row[0] < len(names) - _TAIL

    for are_shown, group in groupby(enumerate(names), is_shown):
        found = [name for _, name in group]
        yield from found if are_shown else [f"┊ {len(found):,} more (--all lists them)"]


def _mark(listing: Listing, name: CheckpointName) -> str:
    return "●" if name in listing.current else "○"


def _style(listing: Listing, name: CheckpointName, entry: Facts) -> str:
    if "problem" in entry:
        return "bad"
    if name not in listing.current:
        return "dim"
    return "live" if name == listing.latest else ""


def _caption(epoch: Epoch) -> str:
    is_first = epoch.parent is None
    origin = "from nothing" if is_first else f"from step {epoch.fork} of epoch {epoch.parent}"
    parts = (f"epoch {epoch.number}", origin, text.clean(epoch.writer), text.time(epoch.created))
    return " · ".join(filter(None, parts))


def _cells(listing: Listing, entry: Facts, has_kinds: bool) -> list[str]:
    digits, is_current = len(str(listing.checkpoints[-1].step)), entry["current"]
    step = f"{entry['step']:>{digits}}" + ("" if is_current else f"-{entry['epoch']}")
    is_latest = listing.latest is not None and entry["name"] == str(listing.latest)
    tags = text.clean(" ".join([*entry["tags"], *(["← latest"] if is_latest else [])]))
    if "problem" in entry:
        return [step, "", tags, "", "", "", entry["kind"]]
    return [
        step,
        _kind(entry) if has_kinds else "",
        tags,
        text.size(entry["size"]),
        text.size(entry["added"]) if entry["added"] != entry["size"] else "",
        text.time(entry["created"]),
        text.pairs(entry["metrics"]),
    ]


def _kind(entry: Facts) -> str:
    """As "state", or "log of 120": the state after which its records are replayed; "log, whole"
    where nothing is any more."""
    inexact = "" if entry["exact"] else " (inexact)"
    if entry["kind"] == "state":
        return f"state{inexact}"
    if entry["base"] is None:
        return "log of ?"
    if not entry["records"]:
        return f"log, whole{inexact}"
    return f"log of {entry['base']['step']}{' (whole: inexact)' if entry['whole'] else inexact}"


def _to_json(place: str, listing: Listing) -> Facts:
    return {
        "store": place,
        "run": listing.run,
        "from": listing.origin,
        "latest": listing.latest.step if listing.latest else None,
        "size": listing.size_bytes,
        "epochs": [asdict(epoch) for _, epoch in sorted(listing.epochs.items())],
        "checkpoints": listing.entries(listing.checkpoints),
    }
