"""everstep materialize: make a whole state of a step that is a log."""

import argparse
import time
from collections.abc import Iterator
from typing import Any

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.chains import replayed
from everstep.cli.target import add_words, split_words
from everstep.store import catalog


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "STEP [STEP ...]")


def run(args: argparse.Namespace) -> Answer:
    """Replay each step's records with torch's own optimizers, and write the state beside them."""
    from everstep.restore.materialize import materialize

    disk, steps = split_words(args.words, len(args.words), 1)
    chosen = [catalog.find(disk, step) for step in steps]  # all are there, before any is made
    made = list[dict[str, Any]]()

    def lines() -> Iterator[str]:
        for name in chosen:
            if catalog.read_whole(disk, name):
                yield f"{name}: a whole state already"
                continue
            began = time.monotonic()
            manifest = materialize(disk, name)
            seconds, differs = time.monotonic() - began, replayed(manifest.topology)
            said = {"bytes": manifest.size, "exact": manifest.exact, "differs": differs}
            made.append({**name._asdict(), **said, "seconds": seconds})
            exact = "bit for bit" if manifest.exact else f"not exact: {', '.join(differs)}"
            size = text.size(manifest.size)
            yield f"{name}: a whole state of {size}, {exact}, in {seconds:.1f} s"

    return Answer({"made": made}, list(lines()) if args.json else lines())
