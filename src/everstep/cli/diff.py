"""everstep diff: what differs between two checkpoints."""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.cli import text
from everstep.cli.answers import Answer, progress_bar
from everstep.cli.target import add_words, split_words
from everstep.errors import Unsupported
from everstep.store import catalog

if TYPE_CHECKING:
    from everstep.versions.diff import Change

_MEANING = (
    "A, B: a step of the run, a tag, or step-epoch for one on any branch; OTHER: the store of B, "
    "where that is another one"
)
_TITLES = ("TENSOR", "CHANGED", "LARGEST", "NORM", "RELATIVE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "A [OTHER] B", more=_MEANING, are_needed=True)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture, by layer: PNG or SVG")


def run(args: argparse.Namespace) -> Answer:
    if len(args.words) == 4:
        sides = [split_words(args.words[i : i + 2], 1, 1) for i in (0, 2)]
    else:
        disk, steps = split_words(args.words, 2, 2)
        sides = [(disk, [step]) for step in steps]
    from everstep.restore.load import Loader
    from everstep.restore.whole import Whole
    from everstep.state.objects import plain_json
    from everstep.versions.diff import compare

    places = [(disk, catalog.find(disk, step)) for disk, (step,) in sides]
    with Loader() as loader, progress_bar("comparing") as (progress, took):
        first, second = (Whole(disk, name, loader) for disk, name in places)
        changes, others = compare(first, second, progress)
    title = " → ".join(str(name) for _, name in places)
    if args.plot:
        try:
            from everstep.versions.picture import draw
        except ImportError as error:
            raise Unsupported("a picture needs matplotlib: pip install matplotlib") from error
        draw([each for each in changes if each.name in first.weights], title, args.plot)
    changed = [each for each in changes if each.changed]
    facts = {
        "first": str(places[0][1]),
        "second": str(places[1][1]),
        "changed": [plain_json(asdict(each), each.name) for each in changed],
        "equal": [each.name for each in changes if not each.changed],
        **others,
        "seconds": took(),
    }
    shown = [each for each in changed if each.name in first.weights]
    lines = list(_lines(facts, shown)) or ["nothing differs"]
    equal = text.plural(len(facts["equal"]), "tensor")
    return Answer(facts, [text.paint(title, "title"), *lines, f"{equal} equal"])


def _lines(facts: dict[str, Any], shown: list["Change"]) -> Iterator[str]:
    if shown:
        yield from text.table(_TITLES, list(map(_cells, shown)), right=_TITLES[1:])
    names = {each["name"] for each in facts["changed"]} - {change.name for change in shown}
    for part, count in Counter(name.partition(".")[0] for name in sorted(names)).items():
        yield f"{text.clean(part)}: {text.plural(count, 'tensor')} changed (--json lists them)"
    for name, (first, second) in facts["other"].items():
        yield f"{text.clean(name)}: {first} → {second}"
    for which in ("first", "second"):
        for name in facts[f"only_{which}"]:
            yield f"{text.clean(name)}: only in the {which}"
    for row in facts["hyperparameters"]:
        of = text.plural(len(row["parameters"]), "parameter")
        yield f"{text.clean(row['optimizer'])}, {text.clean(row['key'])}: {_both(row)} (of {of})"
    for row in facts["objects"]:
        yield f"{text.clean(row['path'])}: {_both(row)}"


def _both(row: dict[str, Any]) -> str:
    return f"{text.brief(row['first'])} → {text.brief(row['second'])}"


def _cells(change: "Change") -> list[str]:
    relative = change.norm / change.norm_before if change.norm_before else None
    return [
        text.clean(change.name),
        f"{100 * change.changed / change.elements:.3g} %",
        f"{change.largest:.3g}",
        f"{change.norm:.3g}",
        "" if relative is None else f"{relative:.3g}",
    ]
