"""everstep average: the mean of the weights of several checkpoints."""

import argparse

from everstep.cli import text
from everstep.cli.answers import Answer, progress_bar
from everstep.cli.target import add_words, split_words
from everstep.errors import Missing
from everstep.store import catalog


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "[STEP STEP ...]", "as --last and --every say")
    add = parser.add_argument
    add("--last", type=int, default=5, metavar="N", help="so many of the run (default: 5)")
    add("--every", type=int, default=1, metavar="N", help="of those that are multiples of N")
    told = "of each, as they are named, else oldest first (default: 1)"
    add("--weights", type=float, nargs="+", metavar="X", help=told)
    add("--to", metavar="NEW", help="a new directory or URL (default: STORE-average-STEP)")
    parser.epilog = (
        'An average has no optimizer state: restore(from_store="...", only=["model"]) takes it.'
    )


def run(args: argparse.Namespace) -> Answer:
    from everstep.versions.average import average

    disk, steps = split_words(args.words, len(args.words))
    if min(args.last, args.every) < 1 or (steps and (args.last, args.every) != (5, 1)):
        raise ValueError("--last and --every are at least 1, and choose in place of named steps")
    line = [name for name in catalog.lineage(disk) if name.step % args.every == 0]
    chosen = [catalog.find(disk, each) for each in steps] or line[-args.last :]
    if not chosen:
        raise Missing(
            f"averaging steps of {disk.root}: it has none that is a multiple of {args.every}"
        )
    shares = args.weights or [1.0] * len(chosen)
    if len(shares) != len(chosen) or not sum(shares) or not all(abs(x) < 1e9 for x in shares):
        told = ", ".join(map(str, chosen))
        raise ValueError(f"--weights: one number for each of {told}, whose sum is not 0")
    pairs = sorted(zip(chosen, shares, strict=True))  # of some values the newest step's count
    chosen, shares = [name for name, _ in pairs], [share for _, share in pairs]
    to = args.to or f"{str(disk.root).rstrip('/')}-average-{max(chosen).step}"
    with progress_bar("averaging") as (progress, took):
        name = average(disk, chosen, shares, to, progress)
    seconds = took()
    rows = [{"checkpoint": str(n), "weight": x} for n, x in zip(chosen, shares, strict=True)]
    said = f"{text.clean(to)} has {name}, the mean of {', '.join(map(str, chosen))}"
    return Answer(
        {"store": to, **name._asdict(), "of": rows, "seconds": seconds},
        [f"{said}, in {seconds:.1f} s: weights alone"],
    )
