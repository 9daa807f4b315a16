"""What the demo's trainer tells its parent: a JSON object per line, appended with one write each.

A line is `{"event": …, "at": seconds of the machine's monotonic clock, …}`, so that times of parent
and children lie on one axis, and a line that was written outlives its process.

Events of a trainer: start · imported · built(parameters) · restored(step, base, records), then at
each step begin · forward · backward · update · trained(loss) · returned(due), and, from threads
that watch the saves, captured · local(kind, bytes) of each, where kind is "state" or "record"; at
last finished. The parent writes spawn and kill. The run without interruption writes compared(…)
after its last step.
"""

import json
import os
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

    @property
    def events(self) -> Path:
        """The log of this role."""
        return Path(self.directory) / f"{self.role}.jsonl"


class EventLog:
    """Appends events to a file, unbuffered; several processes and threads may write to one file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, event: str, **values: Any) -> None:
        """Append one event, of now unless `at` says that it happened earlier."""
        line = json.dumps({"event": event, "at": time.monotonic(), **values})
        # A line that a kill cut short must not spoil the next one: each starts a line of its own.
        os.write(self._fd, f"\n{line}\n".encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Tail:
    """Reads a growing log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """What was written since the last call. A line that is not whole yet waits for the next."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [event for line in data[:end].splitlines() for event in _parse(line)]


def read_events(path: Path) -> list[Event]:
    """All events of a log in the order in which they happened, `at` in seconds since the first."""
    events = sorted(Tail(path).read(), key=lambda event: event["at"])
    return [{**event, "at": event["at"] - events[0]["at"]} for event in events]


def _parse(line: bytes) -> list[Event]:
    """None in an empty line, nor in one that was cut short."""
    try:
        return [json.loads(line)]
    except ValueError:
        return []
