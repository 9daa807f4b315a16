"""everstep export: a checkpoint in another library's format."""

import argparse
import re
from pathlib import Path

from everstep.cli import text
from everstep.cli.answers import Answer, progress_bar
from everstep.cli.target import add_words, split_words
from everstep.store import catalog

_KINDS = ("dcp", "hf", "safetensors", "torch", "ucp")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20}
_UNITS |= {"GIB": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "[STEP] FOLDER"
    add_words(parser, words, "the newest", "FOLDER: a new one", are_needed=True)
    parser.usage = f"%(prog)s [STORE] {words} --to FORMAT [options]"
    parser.epilog = "What comes along of each format: docs/interchange.md."
    said = f"one of {', '.join(_KINDS)}"
    parser.add_argument("--to", required=True, choices=_KINDS, metavar="FORMAT", help=said)
    parser.add_argument("--part", help="a part of the state: its weights alone, without its name")
    parser.add_argument("--dtype", help="of the floating-point weights, such as bfloat16")
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="of files, such as 2GB")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="of hf: a config.json, or a folder with one and a tokenizer; may be given twice",
    )


def run(args: argparse.Namespace) -> Answer:
    *words, folder = args.words
    disk, steps = split_words(words, 1)
    from everstep.interchange.export import Options, export

    options = Options(args.part, args.dtype, _bytes(args.shard_size), tuple(args.config))
    name = catalog.find(disk, steps[0] if steps else None)
    with progress_bar("exporting") as (progress, took):
        found = export(disk, name, Path(folder), args.to, options, progress)
    seconds, left_out = took(), found.left_out
    lines = [f"{name}: {text.moved(found.count, 'tensor', found.bytes, seconds)}"]
    lines += [f"left out: {text.clean(', '.join(left_out))}"] if left_out else []
    said = {"tensors": found.count, "bytes": found.bytes, "left_out": left_out}
    return Answer({**name._asdict(), **said, "seconds": seconds}, lines)


def _bytes(said: str) -> int:
    """Raises ValueError."""
    found = re.fullmatch(r"(\d{1,15})\s*([A-Za-z]*)", said.strip())
    if not found or found[2].upper() not in _UNITS:
        raise ValueError(f"a size is a number and one of KB, MB, GB, KiB, MiB, GiB, not {said!r}")
    return int(found[1]) * _UNITS[found[2].upper()]
