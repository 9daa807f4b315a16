"""everstep verify: every byte against its digest."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace

from everstep.cli import text
from everstep.cli.answers import Answer, progress_bar
from everstep.cli.target import add_words, split_words
from everstep.errors import EverstepError
from everstep.restore.store import Store, Verdict
from everstep.store import catalog, names, retain
from everstep.store.repair import Mender
from everstep.tiers.tier import Tier, tier_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "[STEP]", "all on all branches")
    parser.add_argument(
        "--repair", action="store_true", help="mend what is damaged from another store of the run"
    )
    parser.add_argument(
        "--from", dest="source", metavar="STORE", help="the store that --repair takes it from"
    )


def run(args: argparse.Namespace) -> Answer:
    """Verify one checkpoint, or all on all branches; 1 where something is damaged."""
    disk, steps = split_words(args.words, 1)
    if args.repair != (args.source is not None):
        raise argparse.ArgumentError(None, "--repair and --from STORE go together")
    mender = Mender(disk, tier_at(args.source)) if args.repair else None
    with progress_bar("verifying") as (progress, took):
        verdict = Store(disk.root).verify(steps[0] if steps else None, progress)
    seconds = took()
    if mender:
        verdict = _repair(mender, verdict)
    mended = mender.mended if mender else []
    cut_off = [] if verdict.ok else _cut_off(disk, verdict)
    more = {"ok": verdict.ok, "seconds": seconds, "cut_off": cut_off, "mended": mended}
    lines = [f"mended {each} from {args.source}" for each in mended]
    lines += _lines(verdict, seconds, cut_off, bool(steps))
    return Answer(asdict(verdict) | more, lines, 0 if verdict.ok else 1)


def _repair(mender: Mender, verdict: Verdict) -> Verdict:
    """The verdict afterwards."""
    left = dict(verdict.problems)
    for folder in verdict.problems:
        name = names.parse_checkpoint(folder)
        try:
            mender.mend(name) if name else mender.mend_claims_and_tags()
            del left[folder]
        except EverstepError as error:
            left[folder] = [*left[folder], f"it cannot be mended: {error}"]
    return replace(verdict, problems=left)


def _cut_off(disk: Tier, verdict: Verdict) -> list[str]:
    """Logs that are whole themselves, and cannot be restored, since what they go on from is not."""
    damaged = {names.parse_checkpoint(folder) for folder in verdict.problems}
    there = set(catalog.committed(disk)) - damaged
    found = retain.cut_off(disk, lambda name: name not in there)
    return [str(name) for name in found if name in there]


def _lines(verdict: Verdict, seconds: float, cut_off: list[str], is_one: bool) -> Iterator[str]:
    for name, problems in verdict.problems.items():
        for problem in problems:
            yield _complaint([name], problem)
    if cut_off:
        logs = text.plural(len(cut_off), "log")
        yield _complaint(cut_off, f"{logs} cannot be restored, because of what they go on from")
    for problem in dict.fromkeys(verdict.unproven.values()):
        found = [name for name, said in verdict.unproven.items() if said == problem]
        yield _complaint(found, f"not proven: {problem}")
    count = text.plural(verdict.checkpoints, "checkpoint")
    if is_one and verdict.checkpoints > 1:
        count += " (a log, and what it goes on from)"
    if verdict.ok:
        said = text.paint(f"✓ {count} intact: every byte is as it was written", "live")
    else:
        said = text.paint(f"✗ {len(verdict.problems):,} of {count} damaged", "bad")
    rate = text.speed(verdict.bytes, seconds)
    yield f"{said} ({text.size(verdict.bytes)} read in {seconds:.1f} s, {rate})"


def _complaint(names: list[str], problem: str) -> str:
    which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"{text.paint(f'✗ {which}', 'bad')}  {text.clean(problem)}"
