"""The command `everstep`: runs a sub-command, turns errors into one line and an exit code.

Exit codes: 0 done; 1 an error, or damage found; 2 wrong usage; 130 Ctrl-C; 141 the reader left.
A sub-command is a module with add_arguments(parser) and run(args), which returns an Answer; it is
imported when asked for.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from importlib import import_module

import everstep
from everstep.cli.answers import Answer
from everstep.errors import EverstepError, kind_of

COMMANDS = {
    "ls": "list checkpoints, branches, tags and metrics",
    "show": "show one checkpoint: its tensors, packs, hyperparameters and objects",
    "verify": "read every byte and compare it with its digest",
    "cp": "copy checkpoints to another store, with what they go back to",
    "tag": "give a checkpoint a name, or take one away",
    "fork": "begin a new run at a checkpoint, without a copy of it on one file system",
    "diff": "compare two checkpoints: tensors, hyperparameters, objects",
    "average": "make a checkpoint of the mean of the weights of several",
    "merge": "make a checkpoint of layers of several, with their optimizer state",
    "rm": "delete checkpoints, and the data that only they need",
    "gc": "delete files that failed attempts left behind",
    "materialize": "make a whole state of a step that is a log, by replaying its records",
    "import": "take over what another library has saved: torch, DCP, Hugging Face, DeepSpeed",
    "export": "write a checkpoint for other libraries: hf, safetensors, torch, dcp, ucp",
    "top": "watch a run: saves in flight, tiers, memory, stalls, the age of checkpoints",
    "demo": "train a GPT, kill it at random moments, and compare with an undisturbed run",
}
_HOMES = {"demo": "demo.command", "import": "import_"}
_INTERRUPTED, _BROKEN_PIPE = 130, 141


def main(arguments: list[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's own) and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:  # closed by who started it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without these characters is no error
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # what is buffered for nobody goes nowhere when Python exits
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except (EverstepError, ValueError, OSError) as error:
        message = " ".join(str(error).split())
        kind = kind_of(error) if isinstance(error, EverstepError) else type(error).__name__
        print(f"everstep: {kind}: {message}", file=sys.stderr)
        return 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] not in COMMANDS:
        _overview().parse_args(words or ["--help"])  # exits: help, version or an error
    name, *rest = words
    command = import_module(f"everstep.cli.{_HOMES.get(name, name)}")
    about = f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}."
    parser = argparse.ArgumentParser(prog=f"everstep {name}", description=about)
    command.add_arguments(parser)
    args = parser.parse_intermixed_args(rest)
    try:
        answer: Answer = command.run(args)
    except argparse.ArgumentError as error:
        parser.error(str(error))
    for text in [json.dumps(answer.facts, indent=2)] if args.json else answer.lines:
        print(text)
    return answer.code


def _overview() -> argparse.ArgumentParser:
    """What `everstep --help` shows: every sub-command, and no options of theirs."""
    parser = argparse.ArgumentParser(
        prog="everstep",
        description="A checkpoint of every training step: look at stores and look after them.",
        epilog="everstep COMMAND --help tells more. Inside a store, STORE may be left out.",
    )
    parser.add_argument("--version", action="version", version=f"everstep {everstep.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser
