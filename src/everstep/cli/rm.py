"""everstep rm: delete checkpoints."""

import argparse
import sys

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.target import add_words, split_words, tags_of
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, retain
from everstep.tiers.tier import Tier

_LISTED_MAX = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "STEP [STEP ...]")
    parser.add_argument(
        "-f", "--following", action="store_true", help="also the logs that go on from them"
    )
    parser.add_argument(
        "-y", "--yes", action="store_true", help="do not ask; without a terminal nobody is asked"
    )


def run(args: argparse.Namespace) -> Answer:
    """Delete the named checkpoints, all or, where one does not exist, none."""
    disk, steps = split_words(args.words, len(args.words), 1)
    doomed = sorted({catalog.find(disk, step) for step in steps})
    if args.following:
        doomed = sorted({*doomed, *retain.cut_off(disk, doomed.__contains__)})
    if not args.yes and sys.stdin.isatty() and not _confirms(disk, doomed):
        return Answer({"deleted": [], "bytes": 0}, ["nothing was deleted"], 1)
    freed = retain.delete(disk, doomed)
    return Answer(
        {"deleted": list(map(str, doomed)), "bytes": freed},
        [f"deleted {text.plural(len(doomed), 'checkpoint')}, {text.size(freed)} freed"],
    )


def _confirms(disk: Tier, doomed: list[CheckpointName]) -> bool:
    """Ask on the terminal, as "40-1, 80-1 (best) and 3 more"; anything but yes is a no."""
    tags = tags_of(disk)
    listed = [
        f"{name.step}-{name.epoch}" + (f" ({', '.join(tags[name])})" if name in tags else "")
        for name in doomed[:_LISTED_MAX]
    ]
    more = f" and {len(doomed) - len(listed):,} more" if len(doomed) > len(listed) else ""
    count = text.plural(len(doomed), "checkpoint")
    question = f"delete {count} of {disk.root}: {', '.join(listed)}"
    print(f"{text.clean(question + more)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
