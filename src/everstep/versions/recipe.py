"""A recipe of a merge: which layers of which checkpoints, as TOML. docs/versions.md has one."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.errors import Missing
from everstep.format.document import Shape, anything, find_flaw

_DOCS = "docs/versions.md tells what a recipe is"
_TOKENS = re.compile(r"\*\*|\*|\{(\d{1,4})\.\.(\d{1,4})\}|\{([^{}]*)\}|[^*{]+|.", re.DOTALL)


def _none(value: object) -> bool:
    return False


_SOURCE: Shape = (
    {"store": str, "step": (int, str), "tag?": _none},
    {"store": str, "tag": str, "step?": _none},
)
_TAKE: Shape = {"from": _SOURCE, "tensors": str, "rename?": {str: str}, "optimizer?": bool}


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint: of which store, and a step, a tag or step-epoch there."""

    store: str
    step: int | str

    def __str__(self) -> str:
        return f"{self.store} {self.step}"


@dataclass(frozen=True, slots=True)
class Take:
    """What is taken from a checkpoint in the base's place. `number`: for messages, from 1 on."""

    number: int
    source: Source
    tensors: str
    rename: Mapping[str, str]
    optimizer: bool

    def matches(self, name: str) -> bool:
        """Whether a tensor's name is meant."""
        return re.fullmatch(_expression(self.tensors), name) is not None

    def renamed(self, name: str) -> str:
        """What it is called in the merged state: by the longest prefix that is told of."""
        for old in sorted(self.rename, key=len, reverse=True):
            if name == old or name.startswith(f"{old}."):
                return self.rename[old] + name.removeprefix(old)
        return name


def read_recipe(path: Path, say: Callable[[str], object]) -> tuple[Source | None, list[Take]]:
    """The base and what is taken, as far as that can be read; `say` is told what is wrong with the
    rest. Raises Missing, and ValueError for what is no TOML."""
    try:
        value = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise Missing(f"reading the recipe {path}: {error.strerror or error}") from error
    except ValueError as error:  # of TOML, or of UTF-8
        raise ValueError(f"reading the recipe {path}: it is no TOML: {error}") from error

    def fits(where: str, row: Any, shape: Shape, known: str) -> bool:
        for key in sorted(row.keys() - set(known.split())) if isinstance(row, dict) else ():
            say(f"{where}: {key!r} is not known here ({_DOCS})")
        if flaw := find_flaw(row, shape):
            say(f"{where}{flaw} ({_DOCS})")
        return not flaw

    takes = value["take"] if fits("recipe", value, {"take": [{}]}, "base take") else ()
    if not takes:
        say("there is no [[take]]")
    base, found = value.get("base"), []
    source = _source(base) if fits("base", base, _SOURCE, "store step tag") else None
    for number, row in enumerate(takes, 1):
        fits(f"take {number}.from", row.get("from"), anything, "store step tag")
        if fits(f"take {number}", row, _TAKE, "from tensors rename optimizer"):
            rest = row.get("rename", {}), row.get("optimizer", True)
            found.append(Take(number, _source(row["from"]), row["tensors"], *rest))
    return source, found


def _source(value: Any) -> Source:
    return Source(value["store"], value.get("step", value.get("tag")))


def _expression(pattern: str) -> str:
    parts = []
    for token in _TOKENS.finditer(pattern):
        first, last, words = token.groups()
        if first:
            numbers = "|".join(map(str, range(int(first), int(last) + 1)))
            parts.append(f"(?:{numbers or '(?!)'})")
        elif words is not None:
            parts.append(f"(?:{'|'.join(map(re.escape, words.split(',')))})")
        else:
            plain = {"**": ".*", "*": "[^.]*"}
            parts.append(plain.get(token.group(), re.escape(token.group())))
    return "".join(parts)
