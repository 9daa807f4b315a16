"""everstep gc: delete what no checkpoint reaches."""

import argparse
import json

from everstep.cli import text
from everstep.cli.chains import Chains
from everstep.cli.target import add_target, split_words
from everstep.restore.store import Store
from everstep.store import catalog
from everstep.tiers.tier import tier_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_target(parser)


def run(args: argparse.Namespace) -> int:
    """Sweep the store; returns the exit code."""
    path, _ = split_words(args.words, 0)
    files, freed = Store(path).gc()
    disk = tier_at(path)
    there = set(catalog.committed(disk))
    orphans = Chains(disk).cut_off(there, lambda name: name not in there)
    if args.json:
        listed = [str(name) for name in orphans]
        print(json.dumps({"files": files, "bytes": freed, "orphans": listed}))
        return 0
    if files:
        print(f"deleted {text.plural(files, 'file')}, {text.size(freed)} freed")
    else:
        print(
            "nothing to delete: every file is needed, or its writer may still be there (what the "
            "newest epoch wrote is left alone, and tables of less than an hour)"
        )
    if orphans:
        logs = text.plural(len(orphans), "log")
        first = f"{orphans[0].step}-{orphans[0].epoch}"
        which = "it" if len(orphans) == 1 else f"them, {first} first"
        print(
            f"{logs} cannot be restored any more, since a checkpoint that they go on from is "
            f"gone. To delete {which}: everstep rm {path} {first} --following"
        )
    return 0
