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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import Missing

_BYTES_MAX = 1 << 20
_NUMBERS_MAX = 10_000
_TOKENS = re.compile(r"\*\*|\*|\{(\d{1,9})\.\.(\d{1,9})\}|\{([^{}]*)\}|[^*{]+|.", re.DOTALL)


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


@dataclass(slots=True)
class Recipe:
    """What is to be merged, as far as it can be read, and what is wrong with the rest."""

    base: Source | None = None
    takes: list[Take] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_recipe(path: Path) -> Recipe:
    """Raises Missing, and ValueError for what is no TOML."""
    try:
        with path.open("rb") as file:
            data = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise Missing(f"reading the recipe {path}: {error.strerror or error}") from error
    if len(data) > _BYTES_MAX:
        raise ValueError(f"reading the recipe {path}: it has more than {_BYTES_MAX} bytes")
    try:
        value = tomllib.loads(data.decode())
    except ValueError as error:  # of TOML, or of UTF-8
        raise ValueError(f"reading the recipe {path}: it is no TOML: {error}") from error
    return _recipe(value)


def _recipe(value: Mapping[str, Any]) -> Recipe:
    found = Recipe()
    say = found.problems.append
    for key in sorted(value.keys() - {"base", "take"}):
        say(f"{key!r} is not known here: a recipe has `base` and `[[take]]`")
    if "base" in value:
        found.base = _source(value["base"], "base", found.problems)
    else:
        say("base = { store = ..., step = ... } is missing")
    takes = value.get("take", [])
    if not isinstance(takes, list) or not takes:
        say("there is no [[take]]")
        takes = []
    for number, row in enumerate(takes, 1):
        take = _take(row, number, found.problems)
        found.takes += [take] if take else []
    return found


def _take(row: Any, number: int, problems: list[str]) -> Take | None:
    where = f"take {number}"
    if not isinstance(row, dict):
        problems.append(f"{where} is no table")
        return None
    for key in sorted(row.keys() - {"from", "tensors", "rename", "optimizer"}):
        problems.append(
            f"{where}: {key!r} is not known here: it has from, tensors, rename, optimizer"
        )
    source = _source(row.get("from"), f"{where}: from", problems)
    tensors, rename = row.get("tensors"), row.get("rename", {})
    optimizer = row.get("optimizer", True)
    before = len(problems)
    if not isinstance(tensors, str) or not tensors:
        problems.append(f"{where}: tensors = a pattern, not {tensors!r}")
    elif (flaw := _flaw_of(tensors)) is not None:
        problems.append(f"{where}: {flaw} in tensors = {tensors!r}")
    if not isinstance(rename, dict) or not all(type(v) is str for v in rename.values()):
        problems.append(f'{where}: rename = {{ "old" = "new" }}, not {rename!r}')
    if not isinstance(optimizer, bool):
        problems.append(f"{where}: optimizer = true or false, not {optimizer!r}")
    if source is None or tensors is None or len(problems) > before:
        return None
    return Take(number, source, tensors, rename, optimizer)


def _source(value: Any, where: str, problems: list[str]) -> Source | None:
    if isinstance(value, dict) and value.keys() in ({"store", "step"}, {"store", "tag"}):
        store, step = value["store"], value["step"] if "step" in value else value["tag"]
        is_step = type(step) is str or (type(step) is int and "step" in value)
        if isinstance(store, str) and store and "\0" not in store and is_step:
            return Source(store, step)
    problems.append(f"{where} = {{ store = a path or URL, step = (or tag =) ... }}, not {value!r}")
    return None


def _flaw_of(pattern: str) -> str | None:
    for first, last, _ in _TOKENS.findall(pattern):
        if first and not 0 <= int(last) - int(first) < _NUMBERS_MAX:
            return f"{{{first}..{last}}} has no numbers, or more than {_NUMBERS_MAX},"
    if "{" in re.sub(r"\{[^{}]*\}", "", pattern):
        return "a { without its }"
    return None


def _expression(pattern: str) -> str:
    parts = []
    for token in _TOKENS.finditer(pattern):
        first, last, words = token.groups()
        if first:
            parts.append(f"(?:{'|'.join(map(str, range(int(first), int(last) + 1)))})")
        elif words is not None:
            parts.append(f"(?:{'|'.join(map(re.escape, words.split(',')))})")
        else:
            plain = {"**": ".*", "*": "[^.]*"}
            parts.append(plain.get(token.group(), re.escape(token.group())))
    return "".join(parts)
