"""everstep fork: a new run that begins at a checkpoint of another."""

import argparse

from everstep.cli import text
from everstep.cli.answers import Answer, progress_bar
from everstep.cli.target import add_words, split_words
from everstep.restore.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "STEP NEW", more="NEW: a new directory or URL", are_needed=True)
    parser.epilog = (
        "On one file system the two share files, and deleting either leaves the other whole; in "
        "one bucket the server copies; else every byte is copied and verified."
    )


def run(args: argparse.Namespace) -> Answer:
    *words, place = args.words
    disk, steps = split_words(words, 1, 1)
    with progress_bar("forking") as (progress, took):
        copied = Store(disk.root).fork(steps[0], place, progress)
    copies, seconds = list(map(str, copied.checkpoints)), took()
    shared, size = copied.bytes_shared, copied.bytes + copied.bytes_there
    count = text.plural(len(copies), "checkpoint")
    line = (
        f"{text.clean(place)} begins with {count}: {text.size(shared)} shared, {text.size(size)} "
        f"copied, in {seconds:.1f} s"
    )
    facts = {"checkpoints": copies, "bytes": size, "bytes_shared": shared, "seconds": seconds}
    return Answer(facts, [line])
