"""everstep ls: what a store holds, as a tree of its epochs."""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from everstep.cli import wording
from everstep.cli.branches import Row, draw
from everstep.cli.chains import Chains
from everstep.cli.render import Cell, Column, Screen, align
from everstep.cli.target import add_json, add_words, split_words, tags_of
from everstep.errors import EverstepError
from everstep.format.manifest import Manifest
from everstep.store import catalog, names
from everstep.store.lineage import Epoch, current
from everstep.store.names import CheckpointName
from everstep.store.store import Store
from everstep.tiers.disk import Disk

_COLUMNS = (
    Column("STEP"),
    Column("KIND"),
    Column("TAGS"),
    Column("SIZE", right=True),
    Column("WRITTEN"),
    Column("AGE", right=True),
    Column("METRICS"),
)
_LOG_MARKS = {"●": "•", "○": "◦"}


@dataclass(frozen=True, slots=True)
class Listing:
    """A store as `ls` sees it, manifests apart."""

    disk: Disk
    run: str
    epochs: dict[int, Epoch]
    checkpoints: list[CheckpointName]
    current: list[CheckpointName]
    tags: dict[CheckpointName, list[str]]
    chains: Chains

    @classmethod
    def of(cls, path: str) -> "Listing":
        """Raises Missing, Corrupt, Unsupported."""
        store, disk = Store(path), Disk(path)
        found = catalog.committed(disk)
        epochs = catalog.read_epochs(disk, found)
        return cls(
            disk, store.run, epochs, found, current(epochs, found), tags_of(disk), Chains(disk)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of everything in the store's data directories, what gc would sweep included."""
        total = 0
        for directory in (names.DATA, names.TABLES):
            try:
                with os.scandir(self.disk.root / directory) as entries:
                    total += sum(entry.stat().st_size for entry in entries if entry.is_file())
            except FileNotFoundError:
                continue
        return total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_words(parser)
    parser.add_argument(
        "-a", "--all", action="store_true", help="list all checkpoints, however many there are"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list; returns the exit code."""
    path, _ = split_words(args.words, 0)
    listing = Listing.of(path)
    if args.json:
        print(json.dumps(_to_json(listing), indent=2))
    else:
        print("\n".join(_drawing(listing, path, Screen.of(sys.stdout), args.all)))
    return 0


def _drawing(listing: Listing, path: str, screen: Screen, is_whole: bool) -> list[str]:
    head = [
        Cell(wording.clean(path if path != "." else listing.disk.root.resolve().name), "title"),
        Cell(f" · run {wording.clean(listing.run[:8])}", "dim"),
        Cell(f" · {wording.plural(len(listing.checkpoints), 'checkpoint')}"),
        Cell(f" · {wording.size(listing.size_bytes)}"),
    ]
    if len(listing.epochs) > 1:
        head.append(Cell(f" · {wording.plural(len(listing.epochs), 'epoch')}", "dim"))
    if not listing.checkpoints:
        return [screen.join(head), screen.paint("nothing is committed yet", "dim")]
    always = None if is_whole else listing.tags.keys()
    rows = draw(listing.epochs, listing.checkpoints, listing.current, always)
    return [screen.join(head), "", *_lines(listing, rows, screen)]


def _lines(listing: Listing, rows: list[Row], screen: Screen) -> list[str]:
    """A table to the right of the graph; epochs run over its columns."""
    digits = len(str(max(name.step for name in listing.checkpoints)))
    found = [_read(listing, row.checkpoint) for row in rows if row.checkpoint]
    has_logs = any(isinstance(manifest, Manifest) and manifest.previous for manifest in found)
    checkpoints = zip((row for row in rows if row.checkpoint), found, strict=True)
    shown = [_cells(listing, row, manifest, digits, has_logs) for row, manifest in checkpoints]
    titles, *aligned = align(_COLUMNS, shown)
    width = 2 * max(row.depth for row in rows) + 2
    lines = [screen.join([Cell(" " * width), *titles])]
    table = zip(aligned, found, strict=True)
    for row in rows:
        if row.checkpoint:
            cells, manifest = next(table)
            is_log = isinstance(manifest, Manifest) and manifest.previous is not None
            mark = _LOG_MARKS[row.mark[-1]] if is_log else ""
            space = Cell(" " * (width - 2 * row.depth - len(row.mark)))
            lines.append(screen.join([*_graph(row, mark), space, *cells]))
        else:
            lines.append(screen.join([*_graph(row), Cell(" "), Cell(_caption(row), "dim")]))
    return lines


def _read(listing: Listing, name: CheckpointName) -> Manifest | EverstepError:
    try:
        manifest = catalog.read_manifest(listing.disk, name)
    except EverstepError as error:
        return error
    listing.chains.note(manifest)
    return manifest


def _graph(row: Row, mark: str = "") -> list[Cell]:
    """The row's lines and mark; the first character belongs to the trunk."""
    text = "│ " * row.depth + (mark or row.mark)
    is_live = row.has_live_trunk and (row.depth > 0 or not row.checkpoint or not row.is_left)
    return [Cell(text[:1], "live" if is_live else "dim"), Cell(text[1:], "dim")]


def _caption(row: Row) -> str:
    if row.epoch is None:
        return f"{row.hidden:,} more (--all lists them)"
    epoch = row.epoch
    origin = f"from step {epoch.fork}" if epoch.parent is not None else "from nothing"
    parts = [f"epoch {epoch.number}", origin]
    if row.after >= 0:
        return f"left behind: epoch {epoch.number} beyond step {row.after}"
    if row.is_left:
        parts[0] = f"left behind: {parts[0]}"
    return " · ".join(
        filter(None, [*parts, wording.clean(epoch.writer), wording.age(epoch.created)])
    )


def _cells(
    listing: Listing, row: Row, manifest: Manifest | EverstepError, digits: int, has_logs: bool
) -> list[Cell]:
    name = row.checkpoint
    assert name is not None
    is_latest = bool(listing.current) and name == listing.current[-1]
    style = "dim" if row.is_left else ("live" if is_latest else "bold")
    step = Cell(f"{name.step:>{digits}}" + (f"-{name.epoch}" if row.is_left else ""), style)
    tags = " ".join([*listing.tags.get(name, []), *(["← latest"] if is_latest else [])])
    tagged = Cell(wording.clean(tags), "yellow")
    if isinstance(manifest, EverstepError):
        problem = Cell(type(manifest).__name__.lower(), "bad")
        return [step, Cell(""), tagged, Cell(""), Cell(""), Cell(""), problem]
    tone = "dim" if row.is_left else ""
    return [
        step,
        _kind(listing, manifest, row.is_left) if has_logs else Cell(""),
        tagged,
        Cell(wording.size(manifest.size), tone),
        Cell(wording.time(manifest.created), tone),
        Cell(wording.age(manifest.created), tone),
        Cell(wording.pairs(manifest.metrics), "dim" if row.is_left else "cyan"),
    ]


def _kind(listing: Listing, manifest: Manifest, is_left: bool) -> Cell:
    """As "state", or "log of 120": the state after which its records are replayed; "log, whole"
    where nothing is any more."""
    if manifest.previous is None:
        return Cell("state", "dim" if is_left else "bold")
    name = CheckpointName(manifest.step, manifest.epoch)
    origin = listing.chains.origin(name)
    if origin is None:
        return Cell("log of ?", "bad")
    inexact = "" if listing.chains.is_exact(name) else " (inexact)"
    if origin.base == name:
        return Cell(f"log, whole{inexact}", "dim")
    made = " (whole: inexact)" if listing.chains.whole(name) else inexact
    return Cell(f"log of {origin.base.step}{made}", "dim")


def _to_json(listing: Listing) -> dict[str, Any]:
    kept = set(listing.current)
    return {
        "store": str(listing.disk.root),
        "run": listing.run,
        "latest": listing.current[-1].step if listing.current else None,
        "size": listing.size_bytes,
        "epochs": [asdict(epoch) for _, epoch in sorted(listing.epochs.items())],
        "checkpoints": [
            _entry(listing, name, name in kept) for name in sorted(listing.checkpoints)
        ],
    }


def _entry(listing: Listing, name: CheckpointName, is_current: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": str(name),
        "step": name.step,
        "epoch": name.epoch,
        "current": is_current,
        "tags": listing.tags.get(name, []),
    }
    manifest = _read(listing, name)
    if isinstance(manifest, EverstepError):
        return {**entry, "problem": str(manifest)}
    origin = listing.chains.origin(name)
    return {
        **entry,
        "kind": "log" if manifest.previous else "state",
        "previous": asdict(manifest.previous) if manifest.previous else None,
        "base": origin.base._asdict() if origin else None,
        "records": origin.records if origin else None,
        "whole": asdict(whole) if (whole := listing.chains.whole(name)) else None,
        "size": manifest.size,
        "created": manifest.created,
        "exact": manifest.exact and listing.chains.is_exact(name),
        "metrics": manifest.metrics,
    }
