"""How checkpoints are taken in the demo. No torch here."""

from typing import Literal, get_args

DemoStrategy = Literal["full", "spread", "log", "auto"]

DEMO_STRATEGIES: tuple[DemoStrategy, ...] = get_args(DemoStrategy)
DEFAULT_STRATEGY: DemoStrategy = "auto"

SPREAD_EVERY = 5
"""Steps from one checkpoint to the next where a demo spreads them: at every step there is nothing
to spread over."""
SPREAD_WINDOW = 4
"""Of the demo. By itself the library would choose one step on a machine that copies this fast."""

NO_BASE = 1_000_000
"""As `base_every`: no base comes by itself, so that none falls into what is timed."""

WARM_SAVES = 6
"""Before the clock runs: a base, three records that are copied eagerly, and then some."""
