"""How checkpoints are taken in demo and bench. No torch here."""

from typing import Literal, get_args

Strategy = Literal["full", "log"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
DEFAULT_STRATEGY: Strategy = "full"

NO_BASE = 1_000_000
"""As `base_every`: no base comes by itself, so that none falls into what is timed."""

WARM_SAVES = 6
"""Before the clock runs: a base, three records that are copied eagerly, and then some."""
