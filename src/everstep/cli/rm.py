"""everstep rm: delete checkpoints."""

import argparse
import sys

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.target import add_words, split_words, tags_of
from everstep.errors import Conflict
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, retain
from everstep.tiers.tier import Tier, tier_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_words(parser, "STEP [STEP ...]")
    parser.add_argument(
        "-f", "--following", action="store_true", help="also the logs that go on from them"
    )
    parser.add_argument(
        "-y", "--yes", action="store_true", help="do not ask; without a terminal nobody is asked"
    )


def run(args: argparse.Namespace) -> Answer | int:
    """Delete the named checkpoints, all or, where one does not exist, none."""
    path, steps = split_words(args.words, len(args.words), 1)
    disk = tier_at(path)
    doomed = sorted({catalog.find(disk, step) for step in steps})
    if following := [n for n in retain.cut_off(disk, doomed.__contains__) if n not in doomed]:
        if not args.following:
            raise Conflict(_advice(path, doomed, following))
        doomed = sorted({*doomed, *following})
    if not args.yes and sys.stdin.isatty() and not _confirms(disk, path, doomed):
        print("nothing was deleted", file=sys.stderr)
        return 1
    freed = retain.delete(disk, doomed)
    return Answer(
        {"deleted": list(map(str, doomed)), "bytes": freed},
        [f"deleted {text.plural(len(doomed), 'checkpoint')}, {text.size(freed)} freed"],
    )


def _advice(path: str, doomed: list[CheckpointName], following: list[CheckpointName]) -> str:
    named = " ".join(f"{name.step}-{name.epoch}" for name in doomed)
    first, last = following[0], following[-1]
    which = f"step {first.step}" if first == last else f"steps {first.step} to {last.step}"
    goes = "goes" if first == last else "go"
    return (
        f"deleting {_listed(doomed, {})} from {path}: {text.plural(len(following), 'log')} "
        f"({which}) {goes} on from there, and could not be restored any more. To delete them too: "
        f"everstep rm {path} {named} --following"
    )


def _confirms(disk: Tier, path: str, doomed: list[CheckpointName]) -> bool:
    """Ask on the terminal; anything but yes is a no."""
    count = text.plural(len(doomed), "checkpoint")
    shown = _listed(doomed, tags_of(disk))
    question = f"delete {count} of {text.clean(path)}: {shown}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _listed(doomed: list[CheckpointName], tags: dict[CheckpointName, list[str]]) -> str:
    """As "40-1, 80-1 (best) and 3 more"."""
    listed = [
        f"{name.step}-{name.epoch}"
        + (f" ({text.clean(', '.join(tags[name]))})" if name in tags else "")
        for name in doomed[:8]
    ]
    return ", ".join(listed) + (f" and {len(doomed) - 8:,} more" if len(doomed) > 8 else "")
