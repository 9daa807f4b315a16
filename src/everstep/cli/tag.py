"""everstep tag: names for checkpoints."""

import argparse

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.target import add_words, split_words
from everstep.restore.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    name = "NAME: the tag, which moves where it names another checkpoint"
    add_words(parser, "STEP NAME", more=name)
    parser.add_argument("--delete", metavar="NAME", help="the tag that is to name nothing any more")


def run(args: argparse.Namespace) -> Answer:
    count = 0 if args.delete else 2
    disk, words = split_words(args.words, count, count)
    store = Store(disk.root)
    if args.delete:
        store.delete_tag(args.delete)
        return Answer(
            {"deleted": args.delete}, [text.clean(f"{args.delete} names nothing any more")]
        )
    step, tag = words
    name = str(store.tag(step, tag))
    return Answer({"tag": tag, "checkpoint": name}, [text.clean(f"{tag} names {name}")])
