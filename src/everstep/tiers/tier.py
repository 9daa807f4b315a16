"""Which tier a place names: a directory, or a URL, which is that of a bucket; and several tiers as
one. What every tier promises, `Disk` says (disk.py)."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from everstep.errors import Missing, Unavailable
from everstep.tiers.bucket import PATIENCE_S, Bucket
from everstep.tiers.disk import Disk
from everstep.tiers.files import Reader
from everstep.tiers.memory import Memory
from everstep.tiers.objects import Url
from everstep.tiers.peer import Peer

log = logging.getLogger("everstep")

_AWAY_S = 30.0
_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_T = TypeVar("_T")


class Union:
    """Several tiers, read as the one store of which each has a part; `tiers`: nearest first.

    A file has one content under one name in every tier, so the nearest that has it serves. One that
    does not answer is left out for a while, and told: what the others have counts all the same.
    What writes, locks or claims is the nearest's own. Thread-safe.
    """

    def __init__(self, tiers: Sequence["Readable"]) -> None:
        self.tiers = list(tiers)
        self.root: Path | Url = self.tiers[0].root
        self._away: dict[int, tuple[float, Unavailable]] = {}

    @property
    def problem(self) -> Unavailable | None:
        """Why a tier is left out; None where all answer."""
        return next((problem for _, problem in self._away.values()), None)

    def list(self, directory: str) -> list[str]:
        return sorted({name for found in self._ask(lambda t: t.list(directory)) for name in found})

    def holders(self, directory: str, name: str) -> Sequence[str]:
        found = self._ask(lambda tier: tier.holders(directory, name))
        return sorted({each for holders in found for each in holders})

    def read(self, path: str) -> bytes:
        return self._first(path, lambda tier: tier.read(path))

    def open(self, path: str, direct: bool = False) -> Reader:
        return self._first(path, lambda tier: tier.open(path, direct))

    def size(self, path: str) -> int | None:
        return next((size for size in self._ask(lambda t: t.size(path)) if size is not None), None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tiers[0], name)

    def _first(self, path: str, read: Callable[["Readable"], _T]) -> _T:
        missing: Missing | None = None
        for tier in self._answering():
            try:
                return read(tier)
            except Missing as error:
                missing = missing or error
            except Unavailable as error:
                self._leave_out(tier, error)
        raise missing or self.problem or Missing(f"reading {self.root / path}: no tier answers")

    def _ask(self, question: Callable[["Readable"], _T]) -> Iterator[_T]:
        """The answers, nearest first. Raises Unavailable where there is none."""
        answered = 0
        for tier in self._answering():
            try:
                answer = question(tier)
            except Missing as error:  # the whole bucket
                self._leave_out(tier, Unavailable(str(error)))
            except Unavailable as error:
                self._leave_out(tier, error)
            else:
                answered += 1
                yield answer
        if not answered and (problem := self.problem):
            raise problem

    def _answering(self) -> Iterator["Readable"]:
        for tier in self.tiers:
            away = self._away.get(id(tier))
            if away is None or time.monotonic() > away[0]:
                self._away.pop(id(tier), None)
                yield tier

    def _leave_out(self, tier: "Readable", problem: Unavailable) -> None:
        self._away[id(tier)] = time.monotonic() + _AWAY_S, problem
        if len(self.tiers) > 1:
            log.warning("%s. The other tiers are read without it", problem)


Tier = Disk | Bucket | Union
"""A medium that holds a store. All have the same methods, and `Disk` says what each promises; a
bucket, whose objects are durable when they are there, does nothing where a disk syncs; a union
reads several tiers as one. Errors are Missing, Corrupt, Unavailable and Unsupported."""

Target = Tier | Memory
"""To which checkpoints can be copied."""

Readable = Target | Peer
"""From which they can be read."""


def place_of(store: str | os.PathLike[str]) -> Path | Url:
    """Where a store lies, wherever the program goes from here."""
    name = os.fspath(store)
    return Url(name.rstrip("/")) if _URL.match(name) else Path(name).absolute()


def name_of(store: str | os.PathLike[str]) -> str:
    """The one name that a store has for all processes: a directory's real path, or the URL."""
    place = place_of(store)
    return place if isinstance(place, Url) else os.path.realpath(place)


def tier_at(store: str | os.PathLike[str], patience_s: float = PATIENCE_S) -> Tier:
    """The tier of a store. `patience_s`: for how long calls of a bucket are tried again. Raises
    Unsupported for a URL of an unknown kind."""
    place = place_of(store)
    return Bucket(place, patience_s) if isinstance(place, Url) else Disk(place)
