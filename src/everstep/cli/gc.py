"""everstep gc: delete what no checkpoint reaches."""

import argparse
from collections.abc import Iterator

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.target import add_words, split_words
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, retain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser)


def run(args: argparse.Namespace) -> Answer:
    disk, _ = split_words(args.words, 0)
    files, freed = retain.sweep(disk)
    orphans = list(retain.cut_off(disk, lambda name: not catalog.is_there(disk, name)))
    facts = {"files": files, "bytes": freed, "orphans": list(map(str, orphans))}
    return Answer(facts, _lines(disk.root, files, freed, orphans))


def _lines(path: object, files: int, freed: int, orphans: list[CheckpointName]) -> Iterator[str]:
    if files:
        yield f"deleted {text.plural(files, 'file')}, {text.size(freed)} freed"
    else:
        yield (
            "nothing to delete: every file is needed, or its writer may still be there (what the "
            "newest epoch wrote is left alone, and tables of less than an hour)"
        )
    if orphans:
        logs = text.plural(len(orphans), "log")
        first = f"{orphans[0].step}-{orphans[0].epoch}"
        which = "it" if len(orphans) == 1 else f"them, {first} first"
        yield (
            f"{logs} cannot be restored any more, since a checkpoint that they go on from is "
            f"gone. To delete {which}: everstep rm {path} {first} --following"
        )
