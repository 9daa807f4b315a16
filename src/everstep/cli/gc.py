"""everstep gc: delete what no checkpoint reaches."""

import argparse
import json

from everstep.cli.render import plural, size_text
from everstep.cli.target import add_json, add_words, split_words
from everstep.store.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_words(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Sweep the store; returns the exit code."""
    path, _ = split_words(args.words, 0)
    files, freed = Store(path).gc()
    if args.json:
        print(json.dumps({"files": files, "bytes": freed}))
    elif files:
        print(f"deleted {plural(files, 'file')}, {size_text(freed)} freed")
    else:
        print("nothing to delete: every file is needed, or may still be")
    return 0
