"""everstep cp: copy checkpoints to another store."""

import argparse
from collections.abc import Iterator

from everstep.cli import text
from everstep.cli.answers import Answer, progress_bar
from everstep.cli.chains import Chains
from everstep.cli.target import add_words, split_words, tags_of
from everstep.errors import Conflict, Corrupt, Missing
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, names
from everstep.store.copy import Copied, Copier, Progress
from everstep.store.presence import is_empty, shown
from everstep.tiers.tier import Tier, name_of, tier_at

_STEPS = "all of the run as it is now, the newest first"
_TARGET = "TARGET: a directory or URL, of a store of the same run or of nothing"
_ABOUT = (
    "Each checkpoint comes with all that it goes back to, and with its tags, unless the target has "
    "these already. Every byte is verified on the way. A copy that was broken off goes on when the "
    "command is given again: what is there is not copied a second time."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words and options of the command."""
    add_words(parser, "[STEP ...] TARGET", _STEPS, _TARGET, are_needed=True)
    parser.epilog = _ABOUT


def run(args: argparse.Namespace) -> Answer:
    """Copy the named checkpoints, or all; 1 where some could not be, as they are damaged."""
    *words, place = args.words
    path, steps = split_words(words, len(args.words))
    if name_of(path) == name_of(place):
        raise argparse.ArgumentError(None, f"{place} is the store itself: name another place")
    source, target = tier_at(path), tier_at(place)
    if target.size(names.STORE) is None and not is_empty(target):
        raise Conflict(
            f"copying to {place}: it is no store, and there is something in it. Name a place for "
            f"the store itself, as in: everstep cp {path} {place}/copy"
        )
    with shown(target), progress_bar("copying") as progress:
        copies = _Copies(source, target, progress)
        if steps:
            for name in [catalog.find(source, step) for step in steps]:
                copies.copy(name)
        else:
            copies.copy_all()
    copied, seconds = copies.copied, progress.seconds
    facts = {
        "copied": list(map(str, copied.checkpoints)),
        "bytes": copied.bytes,
        "bytes_there": copied.bytes_there,
        "seconds": seconds,
        "problems": copies.problems,
        "cut_off": list(map(str, copies.cut_off)),
    }
    return Answer(facts, _lines(copies, seconds), 1 if copies.problems else 0)


class _Copies:
    """What was copied so far, and what could not be, as it is damaged, or of a damaged state."""

    def __init__(self, source: Tier, target: Tier, progress: Progress) -> None:
        self.copied = Copied()
        self.problems: dict[str, str] = {}
        self.cut_off: list[CheckpointName] = []
        self._source, self._target = source, target
        self._tags = tags_of(source)
        self._copier = Copier(source, target, progress=progress)

    def copy(self, name: CheckpointName) -> None:
        """One, with those of its tags that the target has not."""
        there = catalog.read_tags(self._target)
        tags = [tag for tag in self._tags.get(name, []) if tag not in there]
        new = self._copier.copy(name, tags)
        self.copied.checkpoints += new.checkpoints
        self.copied.bytes += new.bytes
        self.copied.bytes_there += new.bytes_there

    def copy_all(self) -> None:
        """The newest first: it is worth most, if the copy is broken off."""
        run = catalog.lineage(self._source)
        if not run:
            raise Missing(f"there is no checkpoint in {self._source.root}")
        chains, lost = Chains(self._source), set[CheckpointName]()
        for name in reversed(run):
            base, _ = chains.origin(name) or (name, 0)
            if base in lost:
                self.cut_off.append(name)
                continue
            try:
                self.copy(name)
            except (Corrupt, Missing) as error:
                if catalog.is_there(self._source, name):  # else it was deleted since
                    self.problems[str(name)] = str(error)
                if not catalog.is_there(self._target, base):
                    lost.add(base)


def _lines(copies: _Copies, seconds: float) -> Iterator[str]:
    for name, problem in copies.problems.items():
        yield f"{text.paint(f'✗ {name}', 'bad')}  {text.clean(problem)}"
    if copies.cut_off:
        others = text.plural(len(copies.cut_off), "checkpoint")
        yield f"{others} not copied, of a state that is damaged"
    count, size = text.plural(len(copies.copied.checkpoints), "checkpoint"), copies.copied.bytes
    rate = text.speed(size, seconds)
    yield f"copied {count}, {text.size(size)} in {seconds:.1f} s ({rate})"
