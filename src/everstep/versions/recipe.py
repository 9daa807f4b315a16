"""A recipe of a merge: which layers of which checkpoints, as TOML.

    base = { store = "runs/gpt", step = 5000 }
    [[take]]
    from = { store = "runs/other", tag = "best" }
    tensors = "model.blocks.{0..3}.**"
    rename = { "model.blocks" = "model.layers" }
    optimizer = false                                (the base's own optimizer state stays)

In a pattern `*` stands for what has no dot, `**` for anything, `{0..3}` for these numbers, `{a,b}`
for one of these words.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.errors import Missing
from everstep.format.document import Shape, find_flaw

_BYTES_MAX = 1 << 20
_DOCS = "docs/versions.md tells what a recipe is"
_TOKENS = re.compile(r"\*\*|\*|\{(\d{1,4})\.\.(\d{1,4})\}|\{([^{}]*)\}|[^*{]+|.", re.DOTALL)


def _text(value: object) -> bool:
    return type(value) is str and bool(value) and "\0" not in value


def _none(value: object) -> bool:
    return False


_SOURCE: Shape = (
    {"store": _text, "step": (int, str), "tag?": _none},
    {"store": _text, "tag": str, "step?": _none},
)
_TAKE: Shape = {"from": _SOURCE, "tensors": _text, "rename?": {str: str}, "optimizer?": bool}


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
    value, source, found = _parsed(path), None, []
    for key in sorted(value.keys() - {"base", "take"}):
        say(f"{key!r} is not known here: a recipe has `base` and `[[take]]`")
    base, takes = value.get("base"), value.get("take")
    _check_keys("base", base, "store step tag", say)
    if flaw := find_flaw(base, _SOURCE):
        say(f"base{flaw} ({_DOCS})")
    else:
        source = _source(base)
    if find_flaw(takes, [{}]) or not takes:
        say("there is no [[take]]")
        takes = []
    for number, row in enumerate(takes, 1):
        _check_keys(f"take {number}", row, "from tensors rename optimizer", say)
        _check_keys(f"take {number}.from", row.get("from"), "store step tag", say)
        if flaw := find_flaw(row, _TAKE):
            say(f"take {number}{flaw} ({_DOCS})")
        else:
            rest = row.get("rename", {}), row.get("optimizer", True)
            found.append(Take(number, _source(row["from"]), row["tensors"], *rest))
    return source, found


def _check_keys(where: str, row: object, known: str, say: Callable[[str], object]) -> None:
    for key in sorted(row.keys() - set(known.split())) if isinstance(row, dict) else ():
        say(f"{where}: {key!r} is not known here ({_DOCS})")


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise Missing(f"reading the recipe {path}: {error.strerror or error}") from error
    if len(data) > _BYTES_MAX:
        raise ValueError(f"reading the recipe {path}: it has more than {_BYTES_MAX} bytes")
    try:
        return tomllib.loads(data.decode())
    except ValueError as error:  # of TOML, or of UTF-8
        raise ValueError(f"reading the recipe {path}: it is no TOML: {error}") from error


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
