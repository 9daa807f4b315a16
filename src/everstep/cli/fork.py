"""everstep fork: a new run that begins at a checkpoint of another."""

import argparse
import json
import time

from everstep.cli import text
from everstep.cli.target import split_words
from everstep.cli.text import progress_bar
from everstep.restore.store import Store

_GRAMMAR = "[STORE] STEP NEW"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words and options of the command."""
    parser.usage = f"%(prog)s {_GRAMMAR} [options]"
    meaning = (
        "STORE: the store's directory or URL (default: the current one); STEP: a step of the run, "
        "a tag, or step-epoch for one on any branch; NEW: a new directory or URL"
    )
    parser.add_argument("words", nargs="+", metavar=_GRAMMAR, help=meaning)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.epilog = (
        "On one file system the two share files, and deleting either leaves the other whole; in "
        "one bucket the server copies; else every byte is copied and verified."
    )


def run(args: argparse.Namespace) -> int:
    """Fork one checkpoint."""
    *words, place = args.words
    path, steps = split_words(words, 1)
    if not steps:
        raise argparse.ArgumentError(None, "which step, and where to? everstep fork runs/a 120 new")
    began = time.monotonic()
    with progress_bar("forking") as progress:
        copied = Store(path).fork(steps[0], place, progress)
    seconds = time.monotonic() - began
    if args.json:
        found = {
            "checkpoints": [str(name) for name in copied.checkpoints],
            "bytes": copied.bytes + copied.bytes_there,
            "bytes_shared": copied.bytes_shared,
            "seconds": seconds,
        }
        print(json.dumps(found, indent=2))
        return 0
    count = text.plural(len(copied.checkpoints), "checkpoint")
    print(
        f"{text.clean(place)} begins with {count}: {text.size(copied.bytes_shared)} shared, "
        f"{text.size(copied.bytes + copied.bytes_there)} copied, in {seconds:.1f} s"
    )
    return 0
