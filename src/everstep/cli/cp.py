"""everstep cp: copy checkpoints to another store."""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from everstep.cli import text
from everstep.cli.chains import Chains
from everstep.cli.progress import progress_bar
from everstep.cli.target import split_words, tags_of
from everstep.errors import Conflict, Corrupt, EverstepError, Missing
from everstep.store import catalog, names
from everstep.store.copy import Copied, Progress, copy_checkpoint
from everstep.store.names import CheckpointName
from everstep.store.presence import Presence, is_empty
from everstep.tiers.tier import Tier, name_of, tier_at

_GRAMMAR = "[STORE] [STEP ...] TARGET"
_MEANING = (
    "STORE: the store's directory or URL (default: the current one); STEP: a step of the run, a "
    "tag, or step-epoch for one on any branch (default: all of the run as it is now, the newest "
    "first); TARGET: a directory or URL, of a store of the same run or of nothing"
)
_ABOUT = (
    "Each checkpoint comes with all that it goes back to, and with its tags, unless the target has "
    "these already. Every byte is verified on the way. A copy that was broken off goes on when the "
    "command is given again: what is there is not copied a second time."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words and options of the command."""
    parser.usage = f"%(prog)s {_GRAMMAR} [options]"
    parser.epilog = _ABOUT
    parser.add_argument("words", nargs="+", metavar=_GRAMMAR, help=_MEANING)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Copy the named checkpoints, or all; 1 where some could not be, as they are damaged."""
    *words, place = args.words
    path, steps = split_words(words, len(args.words))
    if name_of(path) == name_of(place):
        raise argparse.ArgumentError(None, f"{place} is the store itself: name another place")
    source, target = tier_at(path), tier_at(place)
    if target.size(names.STORE) is None and not is_empty(target):
        raise Conflict(
            f"copying to {place}: it is no store, and there is something in it. Name a place for "
            f"the store itself, as in: everstep cp {path} {place}/copy"
        )
    began = time.monotonic()
    with _shown(target), progress_bar("copying") as progress:
        if steps:
            copies = _Copies(source, target, progress)
            for name in [catalog.find(source, step) for step in steps]:
                copies.copy(name)
        else:
            copies = _copy_all(source, target, progress)
    _report(copies, time.monotonic() - began, args.json)
    return 1 if copies.problems else 0


@contextmanager
def _shown(target: Tier) -> Iterator[None]:
    """While this lasts, others know that somebody writes there."""
    presence = Presence(target)
    presence.show(True)
    try:
        yield
    finally:
        presence.end()


@dataclass(slots=True)
class _Copies:
    """What was copied so far, and what could not be, as it is damaged."""

    source: Tier
    target: Tier
    progress: Progress
    copied: Copied = field(default_factory=Copied)
    problems: dict[str, str] = field(default_factory=dict)
    cut_off: list[CheckpointName] = field(default_factory=list)

    def copy(self, name: CheckpointName) -> None:
        """One, with those of its tags that the target has not."""
        there = catalog.read_tags(self.target)
        tags = [tag for tag in tags_of(self.source).get(name, []) if tag not in there]
        new = copy_checkpoint(self.source, self.target, name, tags=tags, progress=self.progress)
        self.copied.checkpoints += new.checkpoints
        self.copied.bytes += new.bytes
        self.copied.bytes_there += new.bytes_there


def _copy_all(source: Tier, target: Tier, progress: Progress) -> _Copies:
    """The newest first: it is worth most, if the copy is broken off. What goes on from a damaged
    one is left out."""
    copies = _Copies(source, target, progress)
    run = catalog.lineage(source)
    if not run:
        raise Missing(f"there is no checkpoint in {source.root}")
    chains = Chains(source)
    lost: set[CheckpointName] = set()
    for name in reversed(run):
        if name in lost or name in copies.cut_off:
            continue
        try:
            copies.copy(name)
        except Missing:  # deleted since
            if catalog.is_there(source, name):
                raise
        except Corrupt as error:
            damaged = _first_missing(source, target, name)
            copies.problems[str(damaged)] = str(error)
            lost.add(damaged)
            copies.cut_off = chains.cut_off(run, lost.__contains__)
    return copies


def _first_missing(source: Tier, target: Tier, name: CheckpointName) -> CheckpointName:
    """The one that could not be copied, of those that a checkpoint goes back to: the oldest is
    copied first."""
    found = [name]
    try:
        for manifest in catalog.followed(source, name):
            found.append(CheckpointName(manifest.step, manifest.epoch))
    except EverstepError:  # what is before that one cannot be told
        return found[-1]
    return next((each for each in found[::-1] if not catalog.is_there(target, each)), name)


def _report(copies: _Copies, seconds: float, as_json: bool) -> None:
    copied = copies.copied
    if as_json:
        found: dict[str, Any] = {
            "copied": [str(name) for name in copied.checkpoints],
            "bytes": copied.bytes,
            "bytes_there": copied.bytes_there,
            "seconds": seconds,
            "problems": copies.problems,
            "cut_off": [str(name) for name in copies.cut_off],
        }
        print(json.dumps(found, indent=2))
        return
    for name, problem in copies.problems.items():
        print(f"{text.paint(f'✗ {name}', 'bad')}  {text.clean(problem)}")
    if copies.cut_off:
        logs = text.plural(len(copies.cut_off), "log")
        print(f"{logs} not copied: they go on from what is damaged")
    rate = text.size(int(copied.bytes / max(seconds, 1e-9)))
    print(
        f"copied {text.plural(len(copied.checkpoints), 'checkpoint')}, {text.size(copied.bytes)} "
        f"in {seconds:.1f} s ({rate}/s)"
    )
