"""everstep cp: copy checkpoints to another store."""

import argparse
from collections.abc import Sequence

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
    add_words(parser, "[STEP ...] TARGET", _STEPS, _TARGET, are_needed=True)
    parser.epilog = _ABOUT


def run(args: argparse.Namespace) -> Answer:
    """Copy the named checkpoints, or all; 1 where some could not be, as they are damaged."""
    *words, place = args.words
    source, steps = split_words(words, len(args.words))
    if name_of(source.root) == name_of(place):
        raise argparse.ArgumentError(None, f"{place} is the store itself: name another place")
    if place.isdecimal():
        raise argparse.ArgumentError(None, f"copy to where? {place} is a step (else say ./{place})")
    target = tier_at(place)
    if target.size(names.STORE) is None and not is_empty(target):
        raise Conflict(
            f"copying to {place}: it is no store, and there is something in it. Name a place for "
            f"the store itself, as in: everstep cp {source.root} {place}/copy"
        )
    chosen = [catalog.find(source, step) for step in steps] or catalog.lineage(source)[::-1]
    if not chosen:
        raise Missing(f"there is no checkpoint in {source.root}")
    with shown(target), progress_bar("copying") as (progress, took):
        copied, problems, cut_off = _copy(source, target, chosen, progress)
    facts = {
        "copied": list(map(str, copied.checkpoints)),
        "bytes": copied.bytes,
        "bytes_there": copied.bytes_there,
        "seconds": took(),
        "problems": problems,
        "cut_off": cut_off,
    }
    lines = [f"{text.paint(f'✗ {n}', 'bad')}  {text.clean(each)}" for n, each in problems.items()]
    if cut_off:
        others = text.plural(len(cut_off), "checkpoint")
        lines.append(f"{others} not copied, of a state that is damaged")
    count = len(copied.checkpoints)
    lines.append(f"copied {text.moved(count, 'checkpoint', copied.bytes, took())}")
    return Answer(facts, lines, 1 if problems else 0)


def _copy(
    source: Tier, target: Tier, chosen: Sequence[CheckpointName], progress: Progress
) -> tuple[Copied, dict[str, str], list[str]]:
    """Each, with those of its tags that the target has not. What was copied; what could not be, as
    it is damaged; and what is of a state that is."""
    copied, problems, cut_off = Copied(), dict[str, str](), list[str]()
    copier, chains, own = Copier(source, target, progress=progress), Chains(source), tags_of(source)
    lost, there = set[CheckpointName](), catalog.read_tags(target)
    for name in chosen:
        base, _ = chains.origin(name) or (name, 0)
        if base in lost:
            cut_off.append(str(name))
            continue
        try:
            new = copier.copy(name, [tag for tag in own.get(name, []) if tag not in there])
        except (Corrupt, Missing) as error:
            if catalog.is_there(source, name):  # else it was deleted since
                problems[str(name)] = str(error)
            if not catalog.is_there(target, base):
                lost.add(base)
            continue
        copied.checkpoints += new.checkpoints
        copied.bytes += new.bytes
        copied.bytes_there += new.bytes_there
    return copied, problems, cut_off
