"""What a user may set of how checkpoints are taken; and the strategy that this makes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from everstep.capture.auto import Auto
from everstep.capture.base_interval import Distance
from everstep.capture.copy_speed import Pace
from everstep.capture.log import Log
from everstep.capture.rank_agreement import Ranks
from everstep.capture.spread import Spread
from everstep.errors import Unsupported
from everstep.redo.coupling import why_not
from everstep.redo.derived import Derived
from everstep.redo.refusals import check
from everstep.state.optimizers import OptimizerState
from everstep.store.retain import Keep

log = logging.getLogger("everstep")

Strategy = Log | Spread | Auto

_CHOICES = {
    "strategy": ("full", "spread", "log", "auto"),
    "audit": ("sample", "full"),
    "under_pressure": ("skip", "wait"),
}
_COUNTS = {
    "every": "steps",
    "base_every": "steps",
    "window": "steps",
    "catch_up": "steps",
    "memory_budget": "bytes",
}
_ONLY_WITH = {
    "base_every": ("log", "auto"),
    "window": ("spread", "log", "auto"),
    "catch_up": ("spread", "log", "auto"),
}
"""The strategies that an option says anything to."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of Checkpointer that have these names; checked when this is made."""

    every: int
    strategy: str
    base_every: int | None
    window: int | None
    recovery_budget: float
    audit: str
    catch_up: int | None
    keep_exact: bool
    keep: Keep | None
    memory_budget: int | None
    under_pressure: str

    def __post_init__(self) -> None:
        """Raises ValueError, TypeError."""
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                known = ", ".join(map(repr, choices[:-1]))
                raise ValueError(f"{name} must be {known} or {choices[-1]!r}, not {value!r}")
        for name, unit in _COUNTS.items():
            value = getattr(self, name)
            is_left_open = value is None and name != "every"
            if not is_left_open and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive number of {unit}, not {value!r}")
        seconds = self.recovery_budget
        if type(seconds) not in (int, float) or not seconds > 0:
            raise ValueError(
                f"recovery_budget must be a number of seconds above 0, not {seconds!r}"
            )
        if type(self.keep_exact) is not bool:
            raise TypeError(f"keep_exact must be True or False, not {self.keep_exact!r}")
        if not self.keep_exact and self.catch_up is None:
            raise ValueError("keep_exact=False says what catch_up may drop: give catch_up, too")
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise TypeError(f"keep must be an everstep.Keep, not {self.keep!r}")

    def _tell_unused(self) -> None:
        """No error: another strategy is tried for a while, and all else is left as it is."""
        for name, strategies in _ONLY_WITH.items():
            if getattr(self, name) is not None and self.strategy not in strategies:
                known = " or ".join(map(repr, strategies))
                log.warning(
                    "%s= does nothing with strategy=%r; it is for %s", name, self.strategy, known
                )

    @property
    def looks_at_all(self) -> bool:
        """Whether audits look at all bytes, and not at a sample."""
        return self.audit == "full"

    def make(
        self,
        optimizers: list[OptimizerState],
        modules: Mapping[str, nn.Module],
        pace: Pace,
        derived: Derived | None,
        ranks: Ranks | None = None,
    ) -> Strategy | None:
        """None for whole states: then there is nothing to decide. `modules`: of the state. Raises
        Unsupported where the strategy does not fit these. `ranks`: of several."""
        self._tell_unused()
        if self.strategy == "full":
            return None
        if (self.strategy == "spread" or self.window) and (why := why_not(optimizers)):
            log.warning(
                "strategy=%r copies each state at one step here, and not piece by piece over a "
                "window: %s",
                self.strategy,
                why,
            )

        def make_log() -> Log:
            check(optimizers, modules, is_alone=ranks is None)
            if ranks and derived:
                _check_nodes(ranks, "derive= with a log")
            if derived:
                derived.check_log(is_alone=ranks is None)
            distance = Distance(pace, self.base_every, self.recovery_budget, self.keep is not None)
            return Log(optimizers, distance, self.looks_at_all, self.window, derived, ranks)

        if self.strategy == "log":
            return make_log()
        if self.strategy == "spread":
            if ranks:
                _check_nodes(ranks, "strategy='spread'")
            check(optimizers, modules, is_alone=ranks is None)
        spread = Spread(optimizers, self.every, pace, self.window, self.looks_at_all, ranks)
        if self.strategy == "spread":
            return spread
        return Auto(make_log, spread, self.every, ranks)


def _check_nodes(ranks: Ranks, what: str) -> None:
    if ranks.is_on_nodes:
        raise Unsupported(
            f"{what} and ranks on several nodes: that is for ranks of one node. Use "
            f"strategy='full' or 'auto'"
        )
