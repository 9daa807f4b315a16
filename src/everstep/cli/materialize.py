"""everstep materialize: make a whole state of a step that is a log."""

import argparse
import json
import time

from everstep.cli import text
from everstep.cli.chains import replayed
from everstep.cli.target import add_target, split_words
from everstep.store import catalog
from everstep.tiers.tier import tier_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words and options of the command."""
    add_target(parser, "+")


def run(args: argparse.Namespace) -> int:
    """Replay each step's records with torch's own optimizers, and write the state beside them."""
    path, steps = split_words(args.words, 1 << 20)
    if not steps:
        raise argparse.ArgumentError(None, "which step? everstep ls lists them")
    from everstep.restore.materialize import materialize

    disk = tier_at(path)
    made = []
    for name in [catalog.find(disk, step) for step in steps]:  # all are there, before any is made
        made_before = catalog.read_state(disk, name)
        if any(each and each.is_whole for each in (catalog.read_manifest(disk, name), made_before)):
            if not args.json:
                print(f"{name}: a whole state already")
            continue
        began = time.monotonic()
        manifest = materialize(disk, name)
        differs = replayed(manifest.topology)
        made.append(
            {
                "step": name.step,
                "epoch": name.epoch,
                "bytes": manifest.size,
                "exact": manifest.exact,
                "differs": differs,
                "seconds": time.monotonic() - began,
            }
        )
        if not args.json:
            exact = (
                "bit for bit"
                if manifest.exact
                else "but for last bits: made on another machine or device"
            )
            print(
                f"{name}: a whole state of {text.size(manifest.size)}, {exact}, in "
                f"{made[-1]['seconds']:.1f} s"
            )
    if args.json:
        print(json.dumps({"made": made}, indent=2))
    return 0
