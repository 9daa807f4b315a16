"""What the demo's trainer tells its parent: a JSON object per message.

It is `{"event": …, "at": seconds of the machine's monotonic clock, …}`, so that times of parent and
children lie on one axis; one that was sent outlives its process.

Events of a trainer: start · imported · built(parameters) · restored(step, base, records), then at
each step begin · forward · backward · update · trained(loss) · returned(due), and, from threads
that watch the saves, captured · local(kind, bytes) of each, where kind is "state" or "record"; at
last finished. The parent adds spawn and kill. The run without interruption writes compared(…)
after its last step.
"""

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Event = dict[str, Any]
Role = Literal["killed", "reference"]
Strategy = Literal["auto", "full", "spread", "log"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a trainer is told on its command line, as JSON."""

    role: Role
    directory: str
    steps: int
    seed: int
    size: Literal["25m", "tiny"]
    strategy: Strategy
    threads: int
    every: int = 1
    url: str | None = None
    """Of a bucket, which is the store then."""

    @property
    def store(self) -> Path | str:
        """Where the run that is killed keeps its checkpoints."""
        return self.url or Path(self.directory) / "store"

    @property
    def level(self) -> str:
        """Of what is durable."""
        return "remote" if self.url else "local"


class Teller:
    """A trainer's end of the socket to its parent, which is its standard input. Any thread."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=0)

    def write(self, event: str, **values: Any) -> None:
        """Tell an event, of now unless `at` says that it happened earlier."""
        self._socket.send(json.dumps({"event": event, "at": time.monotonic(), **values}).encode())
