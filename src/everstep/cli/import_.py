"""everstep import: what another library has saved, as a checkpoint of a store."""

import argparse
from pathlib import Path

from everstep.cli import text
from everstep.cli.answers import Answer, progress_bar
from everstep.cli.target import add_json
from everstep.tiers.tier import tier_at

_KINDS = ("accelerate", "dcp", "deepspeed", "hf", "lightning", "torch", "trainer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "What comes along of each format: docs/interchange.md. Nothing of it is run."
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a file or a folder")
    parser.add_argument("store", metavar="STORE", help="a directory or URL, of a store or nothing")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: as SOURCE says)")
    parser.add_argument(
        "--from", dest="kind", choices=_KINDS, metavar="FORMAT", help=f"one of {', '.join(_KINDS)}"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PART", help="may be given several times"
    )
    parser.add_argument(
        "--part", default="model", help="what a model is called that has no name (default: model)"
    )
    parser.add_argument(
        "--names",
        type=Path,
        metavar="FILE",
        help="JSON: the names of an optimizer's parameters, where SOURCE has only numbers",
    )
    parser.add_argument(
        "--branch", action="store_true", help="also below the latest, whose branch is left behind"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> Answer:
    from everstep.interchange.sources import read_names, read_source
    from everstep.interchange.trees import Options
    from everstep.interchange.write import write

    orders = None if args.names is None else read_names(args.names)
    draft = read_source(args.source, args.kind, Options(args.part, orders, args.only))
    step = draft.step if args.step is None else args.step
    if step is None or not 0 <= step < 10**18:
        why = "does not say of which step it is" if step is None else f"is not of step {step}"
        raise ValueError(f"{args.source} {why}: say it by --step, from 0 on")
    with progress_bar("importing") as (progress, took):
        name = write(tier_at(args.store), draft, step, branch=args.branch, progress=progress)
    seconds, left_out = took(), draft.left_out
    count, size = len(draft.tensors), draft.size
    said = {"from": draft.kind, "bytes": size, "tensors": count, "left_out": left_out}
    lines = [f"{name} from {draft.kind}: {text.moved(count, 'tensor', size, seconds)}"]
    lines += [f"left out: {text.clean(path)} ({text.clean(why)})" for path, why in left_out.items()]
    return Answer({**name._asdict(), **said, "seconds": seconds}, lines)
