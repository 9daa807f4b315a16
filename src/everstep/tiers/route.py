"""Where steps go, and when: pure functions of what is measured and waits, which keepers ask, and a
simulator asks on traces (benchmarks/tiers/simulate.py).

choose      which durable tier a step reaches first        keeper/router.py
next_spill  what moves to the second memory, what stays    keeper/spill.py
next_copy   what another tier gets next, and never gets    keeper/copies.py

"auto" in three sentences. A step goes to the durable tier that is expected to have it first: its
bytes over the bytes per second that this tier was measured to take. The one that got the steps
before keeps it, unless the other needs less than SWITCH of the time. A tier of which nothing is
known, or nothing since PROBE_S, is measured: the store by a step, the other by what is copied.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Route = Literal["auto", "local", "remote"]
Name = Literal["local", "remote"]

NAMES: tuple[Name, Name] = ("local", "remote")
Step = TypeVar("Step", bound=tuple[int, ...])
"""Newer ones are larger."""

SWITCH = 0.9
PROBE_S = 30.0


@dataclass(frozen=True, slots=True)
class Durable:
    """A durable tier as measured. bytes_per_s: None where that is not known. age_s: since it was
    measured."""

    free_bytes: int
    bytes_per_s: float | None = None
    age_s: float = 0.0

    @property
    def is_unknown(self) -> bool:
        """Whether it is to be measured."""
        return self.bytes_per_s is None or self.age_s >= PROBE_S

    def expected_s(self, size_bytes: int) -> float:
        """Until a step of that size is durable there."""
        speed = self.bytes_per_s
        return size_bytes / speed if speed is not None and speed > 0 else math.inf


def choose(
    size_bytes: int, tiers: Mapping[Name, Durable], favourite: Name, route: Route = "auto"
) -> Name | None:
    """The tier that gets a step of that size; None where none can take it. `tiers`: those that
    answer. `favourite`: the one that got the step before."""
    possible = [each for each in NAMES if each in tiers and size_bytes <= tiers[each].free_bytes]
    wanted = favourite if route == "auto" else route
    first = wanted if wanted in possible else next(iter(possible), None)
    if first is None or route != "auto":
        return first
    times = {name: tiers[name].expected_s(size_bytes) for name in possible}
    best = min(possible, key=lambda name: times[name])
    return best if times[best] < SWITCH * times[first] else first


def next_spill(waiting: Mapping[int, int], room_bytes: int, *, is_writing: bool) -> int | None:
    """Which sealed image moves to the second memory, where the arena is full; None: all wait for
    the store. `waiting`: bytes by the number of the job, those of which nobody writes yet. The one
    that waits longest moves, of those for which there is room; but not the first where nothing is
    written: its turn is now."""
    oldest = sorted(waiting)
    movable = oldest if is_writing else oldest[1:]
    return next((number for number in movable if waiting[number] <= room_bytes), None)


def next_copy(
    waiting: Collection[Step], tagged: Collection[Step], backlog_max: int, *, had_newest: bool
) -> tuple[Step, list[Step]]:
    """Which of the steps that wait for a tier it gets next, and which it will never get: of those
    without a tag the oldest, beyond `backlog_max`. The newest goes first; in every second turn (the
    last one `had_newest`) a tagged one, else new ones would hold it up for ever."""
    untagged = sorted(set(waiting) - set(tagged))
    oldest_tagged = min(set(waiting) & set(tagged), default=None)
    chosen = oldest_tagged if oldest_tagged and had_newest else max(waiting)
    return chosen, untagged[:-backlog_max]
