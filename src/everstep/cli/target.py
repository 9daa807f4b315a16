"""Which store and steps a command means: the first word's, or the current directory's."""

import argparse
import os
from itertools import chain, islice
from pathlib import Path

from everstep.errors import Missing
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, names
from everstep.tiers.objects import Url
from everstep.tiers.tier import Tier, place_of, tier_at

_STORE = "STORE: a store's directory or URL (default: the current one)"
_STEP = "STEP: a step of the run, a tag, or step-epoch for one on any branch"
_NEARBY_MAX = 5
_LOOKED_AT_MAX = 1000


def add_words(
    parser: argparse.ArgumentParser,
    words: str = "",
    default: str = "",
    more: str = "",
    *,
    are_needed: bool = False,
) -> None:
    """What most commands take: a store that may be left out, other `words`, and --json.

    For the help: `default`: what is meant where steps are left out; `more`: what other words are.
    """
    grammar = f"[STORE] {words}".strip()
    step = f"{_STEP} (default: {default})" if default else _STEP
    meaning = "; ".join(filter(None, (_STORE, step if "STEP" in words else "", more)))
    parser.usage = f"%(prog)s {grammar} [options]"
    parser.add_argument("words", nargs="+" if are_needed else "*", metavar=grammar, help=meaning)
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """What all commands take that answer."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def split_words(words: list[str], steps_max: int, steps_min: int = 0) -> tuple[Tier, list[str]]:
    """(The store, steps as they were given).

    Raises Missing, with advice, where there is no store; argparse.ArgumentError for too many or
    too few words.
    """
    if words and _means_store(words[0], len(words) > steps_max):
        store, steps = words[0], words[1:]
    else:
        store, steps = ".", words
    if len(steps) > steps_max:
        extra = " ".join(map(repr, steps[steps_max:]))
        raise argparse.ArgumentError(None, f"there is no use for {extra} here")
    if len(steps) < steps_min:
        missing = "a step is missing, or what comes after it. everstep ls lists steps"
        raise argparse.ArgumentError(None, missing)
    if not is_store(store):
        raise Missing(_advice(store))
    disk = tier_at(store)
    catalog.read_run(disk)  # it is of this format
    return disk, steps


def tags_of(disk: Tier) -> dict[CheckpointName, list[str]]:
    """The tags of each checkpoint that has any."""
    tags: dict[CheckpointName, list[str]] = {}
    for tag, name in catalog.read_tags(disk).items():
        tags.setdefault(name, []).append(tag)
    return tags


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a store lies there. Raises Unavailable where this user may not look."""
    return tier_at(path).size(names.STORE) is not None


def _means_store(word: str, is_too_many: bool) -> bool:
    """Tags and steps have no slash; outside of a store the first word has to name one."""
    is_step = word.isdigit() or names.parse_checkpoint(word) is not None
    return is_store(word) or os.sep in word or is_too_many or not (is_step or is_store("."))


def _advice(store: str) -> str:
    if store == ".":
        said = "the current directory is no store, and none was named"
    elif isinstance(place_of(store), Url):
        return f"there is no store at {store}: it has no {names.STORE}"
    elif Path(store).exists():
        said = f"{store} is no store: it has no {names.STORE}"
    else:
        said = f"there is no {store}"
    base = Path(store) if Path(store).is_dir() else Path(".")
    folders = islice(chain(base.glob("*/"), base.glob("*/*/")), _LOOKED_AT_MAX)
    nearby = [str(folder) for folder in folders if os.path.isfile(folder / names.STORE)]
    if nearby:
        return f"{said}. Nearby there is {', '.join(nearby[:_NEARBY_MAX])}"
    return f"{said}. Name the directory that was given to Checkpointer, as in: everstep ls runs/gpt"
