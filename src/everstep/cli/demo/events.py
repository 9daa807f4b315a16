"""What the demo's trainer tells its parent: a JSON object per message.

It is `{"event": …, "at": seconds of the machine's monotonic clock, …}`, so that times of parent and
children lie on one axis; one that was sent outlives its process.

Events of a trainer: imported · built · restored(step, base, records), then at each step begin ·
forward · backward · update · trained(loss) · returned · saving, if it is saved; and, from threads
that watch the saves, captured · durable(kind) of each, where kind is "state" or "record". The
parent adds spawn and kill. The other run tells compared(state) after its last step.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Event = dict[str, Any]
Strategy = Literal["auto", "full", "spread", "log"]
SPREAD_EVERY = 5
"""Where a demo spreads its checkpoints: at every step there is nothing to spread over."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a trainer is told on its command line, as JSON."""

    directory: str
    steps: int
    seed: int
    size: Literal["25m", "tiny"]
    strategy: Strategy
    url: str | None = None
    """Of a bucket, which is the store then."""
    role: Literal["killed", "reference"] = "killed"

    @property
    def store(self) -> Path | str:
        """Where the run that is killed keeps its checkpoints."""
        return self.url or Path(self.directory) / "store"

    @property
    def every(self) -> int:
        """Steps from one checkpoint to the next."""
        return SPREAD_EVERY if self.strategy == "spread" else 1

    @property
    def lost_max(self) -> int:
        """How many steps a kill may cost. At every step it is one: a call returns when the
        checkpoint before it is captured. Else those since the last checkpoint, or, while that is
        copied (beside the step after it), since the one before it."""
        return 1 if self.every == 1 else self.every + 1


def tell(event: str, **values: Any) -> None:
    """Tell the trainer's parent, to which its standard input is a socket, of an event: of now,
    unless `at` says that it happened earlier. Any thread."""
    os.write(0, json.dumps({"event": event, "at": time.monotonic(), **values}).encode())
