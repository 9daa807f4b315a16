"""everstep merge: a checkpoint of layers of several others."""

import argparse
import json
import time
from pathlib import Path

from everstep.cli import text
from everstep.cli.text import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words and options of the command."""
    parser.epilog = "What a recipe says: docs/versions.md. On one file system nothing is copied."
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a file, in TOML")
    parser.add_argument("store", metavar="NEW", help="a new directory or URL")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Merge what the recipe says."""
    from everstep.versions.merge import merge

    began = time.monotonic()
    with progress_bar("merging") as progress:
        found = merge(args.recipe, args.store, progress)
    seconds = time.monotonic() - began
    if args.json:
        said = {**found.name._asdict(), "tensors": found.taken, "bytes": found.bytes}
        print(json.dumps(said | {"bytes_shared": found.bytes_shared, "seconds": seconds}, indent=2))
        return 0
    shared, copied = text.size(found.bytes_shared), text.size(found.bytes)
    print(f"{text.clean(args.store)} has {found.name}: {shared} shared, {copied} copied, in "
          f"{seconds:.1f} s")  # fmt: skip
    for source, count in found.taken.items():
        print(f"  {text.plural(count, 'tensor')} of {text.clean(source)}")
    return 0
