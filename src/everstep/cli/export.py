"""everstep export: a checkpoint in another library's format."""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

from everstep.cli import text
from everstep.cli.target import split_words
from everstep.cli.text import progress_bar
from everstep.store import catalog
from everstep.tiers.tier import tier_at

_GRAMMAR = "[STORE] [STEP] FOLDER"
_MEANING = (
    "STORE: the store's directory or URL (default: the current one); STEP: a step of the run, a "
    "tag, or step-epoch for one on any branch (default: the newest); FOLDER: a new one"
)
_KINDS = ("dcp", "hf", "safetensors", "torch", "ucp")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20}
_UNITS |= {"GIB": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words and options of the command."""
    parser.usage = f"%(prog)s {_GRAMMAR} --to FORMAT [options]"
    parser.epilog = "What comes along of each format: docs/interchange.md."
    parser.add_argument("words", nargs="+", metavar=_GRAMMAR, help=_MEANING)
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
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Export one checkpoint."""
    *words, folder = args.words
    path, steps = split_words(words, 1)
    from everstep.interchange.export import Options, export

    options = Options(args.part, args.dtype, _bytes(args.shard_size), args.config)
    disk = tier_at(path)
    name = catalog.find(disk, steps[0] if steps else None)
    began = time.monotonic()
    with progress_bar("exporting") as progress:
        found = export(disk, name, Path(folder), args.to, options, progress)
    seconds = time.monotonic() - began
    if args.json:
        said: dict[str, Any] = {**name._asdict(), "tensors": found.tensors, "bytes": found.bytes}
        said |= {"left_out": found.left_out, "seconds": seconds}
        print(json.dumps(said, indent=2))
        return 0
    print(f"{name}: {text.moved(found.tensors, found.bytes, seconds)}")
    if found.left_out:
        print(f"tied, and so left out: {text.clean(', '.join(found.left_out))}")
    return 0


def _bytes(said: str) -> int:
    """Raises ValueError."""
    found = re.fullmatch(r"(\d{1,15})\s*([A-Za-z]*)", said.strip())
    if not found or found[2].upper() not in _UNITS:
        raise ValueError(f"a size is a number and one of KB, MB, GB, KiB, MiB, GiB, not {said!r}")
    return int(found[1]) * _UNITS[found[2].upper()]
