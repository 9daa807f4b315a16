"""everstep merge: a checkpoint of layers of several others."""

import argparse
from pathlib import Path

from everstep.cli import text
from everstep.cli.answers import Answer, progress_bar
from everstep.cli.target import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "What a recipe says: docs/versions.md. On one file system nothing is copied."
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a file, in TOML")
    parser.add_argument("store", metavar="NEW", help="a new directory or URL")
    add_json(parser)


def run(args: argparse.Namespace) -> Answer:
    from everstep.versions.merge import merge

    with progress_bar("merging") as (progress, took):
        name, said = merge(args.recipe, args.store, progress)
    seconds = took()
    shared, copied = text.size(said["bytes_shared"]), text.size(said["bytes"])
    head = f"{text.clean(args.store)} has {name}: {shared} shared, {copied} copied"
    rows = [f"  {text.plural(n, 'tensor')} of {text.clean(o)}" for o, n in said["tensors"].items()]
    return Answer(
        {**name._asdict(), **said, "seconds": seconds}, [f"{head}, in {seconds:.1f} s", *rows]
    )
