"""everstep rm: delete checkpoints."""

import argparse
import json
import sys

from everstep.cli.render import clean, plural, size_text
from everstep.cli.target import add_json, add_words, split_words
from everstep.store import catalog, retain
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_words(parser, "+")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Delete the named checkpoints, all or, where one does not exist, none."""
    path, steps = split_words(args.words, len(args.words))
    if not steps:
        raise argparse.ArgumentError(None, "which step? As in: everstep rm runs/gpt 120")
    disk = Disk(path)
    doomed = sorted({catalog.find(disk, step) for step in steps})
    if not args.yes and sys.stdin.isatty() and not _confirms(disk, path, doomed):
        print("nothing was deleted", file=sys.stderr)
        return 1
    freed = retain.delete(disk, doomed)
    if args.json:
        print(json.dumps({"deleted": [str(name) for name in doomed], "bytes": freed}))
    else:
        print(f"deleted {plural(len(doomed), 'checkpoint')}, {size_text(freed)} freed")
    return 0


def _confirms(disk: Disk, path: str, doomed: list[CheckpointName]) -> bool:
    """Ask on the terminal; anything but yes is a no."""
    tags = {tagged: tag for tag, tagged in catalog.read_tags(disk).items()}
    listed = [
        f"{name.step}-{name.epoch}" + (f" ({clean(tags[name])})" if name in tags else "")
        for name in doomed
    ]
    shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8:,} more" if len(listed) > 8 else "")
    question = f"delete {plural(len(doomed), 'checkpoint')} of {clean(path)}: {shown}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
