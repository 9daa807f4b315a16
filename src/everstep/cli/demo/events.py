"""What the demo's trainer tells its parent: a JSON object per line, appended with one write each.

A line is `{"event": …, "at": seconds of the machine's monotonic clock, "pid": …, …}`, so that times
of parent and children lie on one axis, and a line that was written outlives its process.

Events of a trainer: start · imported · built · restored(step), then at each step begin · forward ·
backward · update · trained(loss) · returned(stall_s, held_s, due), and, from a thread that watches
the saves, replayed(base, records) of what was restored, and captured · held · local(kind, bytes)
of each save, where kind is "state" or "record"; at last finished. The parent writes spawn and kill.
The run without interruption writes compared(…) after its last step.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

Event = dict[str, Any]
Strategy = Literal["auto", "full", "spread", "log"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a trainer is told on its command line, as JSON."""

    role: Literal["killed", "reference"]
    directory: str
    steps: int
    seed: int
    size: Literal["25m", "tiny"]
    strategy: Strategy
    threads: int
    text: str | None = None
    every: int = 1

    @property
    def store(self) -> Path:
        """Where the run that is killed keeps its checkpoints."""
        return Path(self.directory) / "store"

    @property
    def events(self) -> Path:
        """The log of this role."""
        return Path(self.directory) / f"{self.role}.jsonl"

    def with_role(self, role: Literal["killed", "reference"]) -> "Settings":
        """The same, for the other run."""
        return replace(self, role=role)

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """From the command line."""
        return cls(**json.loads(text))


class EventLog:
    """Appends events to a file, unbuffered; several processes and threads may write to one file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, event: str, **values: Any) -> float:
        """Append one event; returns the time now. `at` says that it happened earlier."""
        at = time.monotonic()
        line = json.dumps({"event": event, "at": at, "pid": os.getpid(), **values})
        # A line that a kill cut short must not spoil the next one: each starts a line of its own.
        os.write(self._fd, f"\n{line}".encode())
        return at

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Tail:
    """Reads a growing log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def read(self) -> list[Event]:
        """What was written since the last call. A line that is not whole yet waits for the next."""
        if not self._path.exists() or self._path.stat().st_size == self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = [event for line in lines if (event := _parse(line)) is not None]
        if (last := _parse(self._rest)) is not None:
            self._rest = b""
            events.append(last)
        return events


def read_events(path: Path) -> list[Event]:
    """All whole events of a log, in the order in which they happened."""
    events = [_parse(line) for line in path.read_bytes().split(b"\n")]
    return sorted((event for event in events if event is not None), key=lambda event: event["at"])


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line) if line else None
    except ValueError:
        return None
    return event if isinstance(event, dict) and "at" in event else None
