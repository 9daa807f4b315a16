"""`python -m benchmarks` (or `make bench ARGS=...`): checkpoints of every step, measured here."""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import show
from benchmarks.bench import ALL, SECTIONS, Bench, chosen
from benchmarks.machine import describe

PLAIN_WIDTH = 170


def main(words: Sequence[str] | None = None) -> int:
    """Measure, show, and write what was asked for. Returns 1 where something failed."""
    args = parsed(words)
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    contenders, missing = chosen(args.only, args.ranks, _code(args.against))
    args.store_root.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=args.store_root)).resolve()
    began = time.monotonic()
    tell = lambda text: print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr)  # noqa: E731
    try:
        machine = describe(root)
        if args.simulate:
            from benchmarks import simulate  # it loads torch

            simulate.show(root, console, tell)
            return 0
        bench = Bench(args, contenders, root, tell)
        bench.run()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    seconds = time.monotonic() - began
    report = show.report_of(bench, args, contenders, missing, machine, seconds)
    show.show(report, console)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    return 1 if bench.failed else 0


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    names = ", ".join(one.name for one in ALL)
    add("--only", type=_words, default=(), metavar="NAME,...", help=f"everstep, {names}")
    against = "a checkout, its src, or a directory with an installed wheel: measured in turn"
    add("--against", type=Path, metavar="DIR", help=against)
    add("--sections", type=_words, default=SECTIONS, help=",".join(SECTIONS))
    add("--params", choices=("25m", "small", "tiny"), default="25m", help="of the model")
    add("--every", type=_count, default=1, help="steps between saves (%(default)s)")
    add("--steps", type=_count, default=5, help="timed steps in a block (%(default)s)")
    add("--rounds", type=_count, default=3, help="blocks of each contender (%(default)s)")
    add("--restores", type=_count, default=5, help="of each kind (%(default)s)")
    add("--records", type=_counts, default=(1, 10, 20), help="of the logs that are recovered")
    add("--tensors", type=_counts, default=(400,), help="of the models whose calls are timed")
    add("--ranks", type=_count, default=1, help="of one run on gloo")
    add("--onto", type=_count, help="ranks that restore (as many as save)")
    add("--parallel", choices=("fsdp2", "ddp"), default="fsdp2", help="how ranks share a model")
    add("--simulate", action="store_true", help="only: what `spread` saves where copies are slow")
    add("--store-root", type=Path, default=Path("runs"), metavar="DIR", help="where stores go")
    add("--json", type=Path, metavar="FILE", help="write all samples and figures")
    args = parser.parse_args(words)
    args.onto = args.onto or args.ranks
    if (args.ranks > 1) != (args.onto > 1):
        parser.error("--onto: several ranks restore what several ranks have saved")
    if args.ranks > 1:
        args.sections = ("training", "restore")
    return args


def _code(given: Path | None) -> str | None:
    """The directory that holds the package `everstep`."""
    if given is None:
        return None
    for directory in (given, given / "src", given / "site"):
        if (directory / "everstep" / "__init__.py").is_file():
            return str(directory.resolve())
    raise SystemExit(f"--against: no package everstep in {given}")


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # workers and stores go, too
    sys.exit(main())
