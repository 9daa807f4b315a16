"""everstep tag: names for checkpoints."""

import argparse
import json

from everstep.cli import text
from everstep.cli.target import split_words
from everstep.restore.store import Store

_GRAMMAR = "[STORE] STEP NAME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words and options of the command."""
    parser.usage = f"%(prog)s {_GRAMMAR} [--json]\n       %(prog)s [STORE] --delete NAME [--json]"
    meaning = (
        "STORE: the store's directory or URL (default: the current one); STEP: a step of the run, "
        "another tag, or step-epoch; NAME: the tag, which moves where it names another checkpoint"
    )
    parser.add_argument("words", nargs="*", metavar=_GRAMMAR, help=meaning)
    parser.add_argument("--delete", metavar="NAME", help="the tag that is to name nothing any more")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Set a tag, or delete one."""
    path, words = split_words(args.words, 0 if args.delete else 2)
    store = Store(path)
    if args.delete:
        store.delete_tag(args.delete)
        said, line = {"deleted": args.delete}, f"{args.delete} names nothing any more"
    elif len(words) == 2:
        step, tag = words
        name = str(store.tag(step, tag))
        said, line = {"tag": tag, "checkpoint": name}, f"{tag} names {name}"
    else:
        raise argparse.ArgumentError(None, "which step, and which name? everstep tag 120 best")
    print(json.dumps(said, indent=2) if args.json else text.clean(line))
    return 0
