"""What each rank has for itself, and what becomes of it where there are other ranks than then.

A data loader's position, a sampler, random generators: stored by rank (or by another number, such
as the data-parallel rank, which several ranks share), and given back by the same number. For
another count of them there is a rule; generators are derived anew, and the log says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from everstep.errors import Corrupt
from everstep.format.document import digest_of

Adapt = Callable[[list[Any], int, int], Any]
"""Makes of the values of all numbers then this number's now: (values, number, count)."""

Rule = Literal["exact", "replicate"] | Adapt
"""For another count: an error; number n gets what n modulo the old count had; or a function."""

ByRank = Rule | tuple[Rule, int, int]
"""A rule; and this process' number and their count, if not its rank and the number of ranks."""


@dataclass(frozen=True, slots=True)
class Share:
    """Number `index` of `count` that have something for themselves."""

    index: int
    count: int
    rule: Rule = "exact"

    @classmethod
    def of(cls, said: ByRank, rank: int, size: int) -> "Share":
        """Of what a user said. Raises ValueError."""
        rule, index, count = said if isinstance(said, tuple) else (said, rank, size)
        is_rule = rule in ("exact", "replicate") or callable(rule)
        if not is_rule or type(index) is not int or type(count) is not int:
            raise ValueError(
                f"by_rank takes 'exact', 'replicate', a function (values, number, count), or one "
                f"of them with a number and a count: (rule, 0, 2); not {said!r}"
            )
        if not 0 <= index < count <= size:
            raise ValueError(f"number {index} of {count} is none of {size} ranks")
        return cls(index, count, rule)

    def to_json(self, value: Any) -> dict[str, Any]:
        """As it stands in a manifest."""
        return {"index": self.index, "count": self.count, "value": value}


def own_name(name: str, rank: int) -> str:
    """What a tensor is called of which each rank has one of its own."""
    return f"{name}#{rank}"


def unowned(name: str) -> str:
    """What it would be called if all ranks had it in common."""
    head, mark, rank = name.rpartition("#")
    return head if mark and rank.isdecimal() else name


def values_by_index(ranks: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """What each number had of this name, in order; nothing where it is no such thing. Raises
    Corrupt."""
    rows = [own[name] for own in ranks if name in own]
    found = {row["index"]: row["value"] for row in reversed(rows)}  # of equals the first
    if {row["count"] for row in rows} - {len(found)} or sorted(found) != list(range(len(found))):
        raise Corrupt(f"reading what the ranks have of {name!r}: numbers are missing")
    return [found[index] for index in sorted(found)]


def seed_of(values: Sequence[Any], index: int, count: int) -> int:
    """A seed for a generator of which there was another count: it follows from all that were saved,
    and differs from number to number."""
    return int(digest_of(repr((list(values), index, count)).encode())[:16], 16)
