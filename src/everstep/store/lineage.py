"""Which checkpoints belong to the run as it is now, and which to branches left behind. Pure.

An epoch names its parent and the step at which it forked. Seen from the newest epoch, an ancestor's
checkpoints count up to the fork and no further:

    epoch 1   ──1──40──80──120        120 is left behind: epoch 2 forked at 80
    epoch 2             └──81──100    the run is 1, 40, 80, 81, 100
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from everstep.format.manifest import CheckpointName


@dataclass(frozen=True, slots=True)
class Epoch:
    """One attachment of a trainer to the store.

    It goes on from step `fork` of epoch `parent`, or from nothing (None and 0). Where its claim is
    damaged or gone, it is not known when and by whom it was made.
    """

    number: int
    parent: int | None
    fork: int
    created: str = ""
    writer: str = ""
    attachment: str | None = None
    """Of several ranks: which claim of which run it is, by which other nodes find it."""


def current(
    epochs: Mapping[int, Epoch], checkpoints: Iterable[CheckpointName]
) -> Iterator[CheckpointName]:
    """The checkpoints of the run as seen from its newest epoch; `checkpoints`, and they, come from
    the newest to the oldest."""
    # For each epoch from the newest back to the root: the last of its steps that still counts.
    limits: dict[int, float] = {}
    number: int | None = max(epochs, default=None)
    limit, after = float("inf"), None
    while number is not None and number in epochs and number not in limits:
        limits[number] = limit
        limit = min(limit, epochs[number].fork)
        number = epochs[number].parent
    for name in checkpoints:
        if name.step != after and name.step <= limits.get(name.epoch, -1):
            after = name.step
            yield name
