"""everstep materialize: make a whole state of a step that is a log."""

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.chains import replayed
from everstep.cli.target import add_words, split_words
from everstep.format.manifest import CheckpointName
from everstep.store import catalog
from everstep.tiers.tier import Tier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "STEP [STEP ...]")


def run(args: argparse.Namespace) -> Answer:
    """Replay each step's records with torch's own optimizers, and write the state beside them."""
    disk, steps = split_words(args.words, len(args.words), 1)
    chosen = [catalog.find(disk, step) for step in steps]  # all are there, before any is made
    rows = _made(disk, chosen)
    facts = {"made": [made for _, made in rows if made] if args.json else []}
    return Answer(facts, (_line(*row) for row in rows))


def _made(
    disk: Tier, chosen: Sequence[CheckpointName]
) -> Iterator[tuple[CheckpointName, dict[str, Any] | None]]:
    """What was made of each; None where it was whole before."""
    from everstep.restore.materialize import materialize

    for name in chosen:
        if catalog.read_whole(disk, name):
            yield name, None
            continue
        began = time.monotonic()
        manifest = materialize(disk, name)
        seconds, differs = time.monotonic() - began, replayed(manifest.topology)
        made = {"bytes": manifest.size, "exact": manifest.exact, "differs": differs}
        yield name, {**name._asdict(), **made, "seconds": seconds}


def _line(name: CheckpointName, made: dict[str, Any] | None) -> str:
    if made is None:
        return f"{name}: a whole state already"
    exact = "bit for bit" if made["exact"] else f"not exact: {', '.join(made['differs'])}"
    size = text.size(made["bytes"])
    return f"{name}: a whole state of {size}, {exact}, in {made['seconds']:.1f} s"
