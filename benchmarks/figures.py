"""From samples to figures: medians, intervals, and ratios of one contender to another. Pure.

A sample belongs to a contender, a figure and a round. Contenders take turns within a round, so that
what drifts drifts for all; an interval is where the median of as many rounds lies in 19 of 20
benches (the percentile bootstrap over rounds; Efron, 1979).
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

DRAWS = 1000
CONFIDENCE = 0.95
Rounds = list[list[float]]
"""The samples of one figure, round by round."""


class Samples:
    """All samples of a bench."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], dict[int, list[float]]] = {}

    def add(self, contender: str, figure: str, round_number: int, values: Sequence[float]) -> None:
        """Add samples of one round; nothing where there are none."""
        if values:
            rounds = self._values.setdefault((contender, figure), {})
            rounds.setdefault(round_number, []).extend(values)

    def rounds(self, contender: str, figure: str) -> Rounds:
        """The samples of a figure; empty where it was not measured."""
        found = self._values.get((contender, figure), {})
        return [found[number] for number in sorted(found)]

    def figures(self, contender: str) -> list[str]:
        """What was measured of a contender, in the order in which it was."""
        return [figure for name, figure in self._values if name == contender]


def summary(rounds: Rounds) -> dict[str, Any] | None:
    """Median, its interval, and the 99th percentile of all samples; None for nothing."""
    if not rounds:
        return None
    values = [value for row in rounds for value in row]
    return {
        "median": statistics.median(values),
        "interval": interval(_median_of, rounds),
        "p99": percentile(values, 0.99),
        "rounds": rounds,
    }


def ratio(mine: Rounds, others: Rounds) -> dict[str, Any] | None:
    """My median over another's, drawn round by round; None where one of them is missing or 0."""
    paired = list(zip(mine, others, strict=False))
    if not paired or not _median_of([row for _, row in paired]):
        return None

    def value(rows: list[tuple[list[float], list[float]]]) -> float:
        other = _median_of([row for _, row in rows])
        return _median_of([row for row, _ in rows]) / other if other else math.inf

    return {"ratio": value(paired), "interval": interval(value, paired), "rounds": len(paired)}


def interval(value: Callable[[list[Any]], float], rounds: Sequence[Any]) -> list[float]:
    """Where `value` of as many rounds lies, drawn from these with repetition."""
    draw = random.Random(0)
    found = [value(draw.choices(rounds, k=len(rounds))) for _ in range(DRAWS)]
    outside = (1 - CONFIDENCE) / 2
    return [percentile(found, outside), percentile(found, 1 - outside)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is no less than `share` of them (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def slowdowns(blocks: Sequence[tuple[str, float]], baseline: str) -> list[tuple[str, float]]:
    """Of each block (who, seconds per step) but the baseline's: its time over the mean of the
    baselines before and after it, less one."""
    found = []
    for index, (name, seconds) in enumerate(blocks):
        if name != baseline:
            before = [time for who, time in blocks[:index] if who == baseline][-1:]
            after = [time for who, time in blocks[index + 1 :] if who == baseline][:1]
            if before or after:
                found.append((name, seconds / statistics.mean(before + after) - 1))
    return found


def _median_of(rounds: Rounds) -> float:
    return statistics.median(value for row in rounds for value in row)
