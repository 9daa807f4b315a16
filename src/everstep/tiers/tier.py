"""Which tier a place names: a directory, or a URL, which is that of a bucket. What every tier
promises, `Disk` says (disk.py)."""

import os
import re
from pathlib import Path

from everstep.tiers.bucket import PATIENCE_S, Bucket
from everstep.tiers.disk import Disk
from everstep.tiers.memory import Memory
from everstep.tiers.objects import Url
from everstep.tiers.peer import Peer
from everstep.tiers.union import Union

Tier = Disk | Bucket | Union
"""A medium that holds a store. All have the same methods, and `Disk` says what each promises; a
bucket, whose objects are durable when they are there, does nothing where a disk syncs; a union
reads several tiers as one. Errors are Missing, Corrupt, Unavailable and Unsupported."""

Target = Tier | Memory
"""To which checkpoints can be copied."""

Readable = Target | Peer
"""From which they can be read."""

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")


def place_of(store: str | os.PathLike[str]) -> Path | Url:
    """Where a store lies, wherever the program goes from here."""
    name = os.fspath(store)
    return Url(name.rstrip("/")) if _URL.match(name) else Path(name).absolute()


def name_of(store: str | os.PathLike[str]) -> str:
    """The one name that a store has for all processes: a directory's real path, or the URL."""
    place = place_of(store)
    return place if isinstance(place, Url) else os.path.realpath(place)


def tier_at(
    store: str | os.PathLike[str],
    patience_s: float = PATIENCE_S,
) -> Tier:
    """The tier of a store. `patience_s`: for how long calls of a bucket are tried again. Raises
    Unsupported for a URL of an unknown kind."""
    place = place_of(store)
    return Bucket(place, patience_s) if isinstance(place, Url) else Disk(place)
