"""The demo's trainer as its parent sees it, and the moments at which it is killed."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from everstep.cli.demo.events import Event, EventLog, Settings, Tail
from everstep.errors import EverstepError

POLL_S = 0.002
SILENCE_S_MAX = 180.0
_OUTPUT_CHARACTERS = 500


class DemoError(EverstepError):
    """The demo could not go on: the trainer ended by itself, or fell silent."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A kind of moment: after `first`, within `share` of the usual time from there to `second`."""

    name: str
    first: str
    second: str
    share: float = 1.0


ANYWHERE = Moment("anywhere in a step", "returned", "returned")
SAVE = Moment("right after step() returned", "returned", "returned", 0.1)
UPDATE = Moment("around the update", "backward", "returned")
RESTART = Moment("while it starts again", "imported", "restored")
MOMENTS = (ANYWHERE, SAVE, UPDATE, RESTART)


@dataclass(frozen=True, slots=True)
class Aim:
    """A kill to come: at `part` (0 to 1) of the moment, at `step` or, for a restart, the next."""

    moment: Moment
    step: int
    part: float


def draw_aims(steps: int, kills: int, seed: int) -> list[Aim]:
    """Moments of all kinds, spread over the run: a random step in each of `kills` equal stretches.

    The kill of a restart comes right after another kill. None is aimed at the first step, or at the
    last two, in which the run may be over before the kill has come.
    """
    rng = random.Random(seed)
    moments = [MOMENTS[index % len(MOMENTS)] for index in range(kills)]
    rng.shuffle(moments)
    if moments and moments[0] is RESTART:
        moments.append(moments.pop(0))
    if moments and moments[0] is RESTART:
        moments[0] = ANYWHERE
    stretch = max(0, steps - 3) / max(1, kills)
    steps_of = [2 + int((index + rng.random()) * stretch) for index in range(kills)]
    return [Aim(*pair, rng.random()) for pair in zip(moments, steps_of, strict=True)]


class Trainer:
    """The child process of one role: started, listened to, killed, started again."""

    def __init__(self, settings: Settings, on_event: Callable[[Event], None]) -> None:
        self._settings = settings
        self._on_event = on_event
        self._log = EventLog(settings.events)
        self._tail = Tail(settings.events)
        self._output = Path(settings.directory) / f"{settings.role}.log"
        self._seconds: dict[tuple[str, str], list[float]] = {
            (moment.first, moment.second): [] for moment in MOMENTS
        }
        self._last: dict[str, float] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. What it prints goes to a file."""
        command = [sys.executable, "-m", "everstep.cli.demo.trainer", self._settings.to_json()]
        self._last.clear()
        self._log.write("spawn")
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def kill_at(self, aim: Aim) -> bool:
        """Listen up to the aim and kill. False where the run was over before."""
        for event in self._listen():
            restart = aim.moment is RESTART
            if event["event"] == aim.moment.first and (restart or event["step"] >= aim.step):
                time.sleep(aim.part * aim.moment.share * self._usual_s(aim.moment))
                return self._kill(aim)
        return False

    def finish(self) -> None:
        """Listen to the end. Raises DemoError where the process ended badly."""
        for _ in self._listen():
            pass

    def close(self) -> None:
        """End the process where it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _kill(self, aim: Aim) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            return False
        self._process.send_signal(signal.SIGKILL)
        self._log.write("kill", moment=aim.moment.name)
        self._process.wait()
        for event in self._tail.read():
            self._note(event)
        return True

    def _listen(self) -> Iterator[Event]:
        """Events as they come, until the process has ended well."""
        assert self._process is not None
        heard = time.monotonic()
        while True:
            status = self._process.poll()
            events = self._tail.read()
            for event in events:
                self._note(event)
            yield from events
            if status is not None:
                self._check(status)
                return
            if events:
                heard = time.monotonic()
            elif time.monotonic() - heard > SILENCE_S_MAX:
                raise DemoError(f"the trainer was silent for {SILENCE_S_MAX:.0f} s: {self._said()}")
            time.sleep(POLL_S)

    def _note(self, event: Event) -> None:
        for (first, second), seconds in self._seconds.items():
            if event["event"] == second and first in self._last:
                seconds.append(event["at"] - self._last[first])
        self._last[event["event"]] = event["at"]
        self._on_event(event)

    def _usual_s(self, moment: Moment) -> float:
        seconds = self._seconds[moment.first, moment.second]
        return median(seconds) if seconds else 0.1

    def _check(self, status: int) -> None:
        if status:
            raise DemoError(f"the trainer ended by itself with status {status}: {self._said()}")

    def _said(self) -> str:
        lines = self._output.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        return f"{last[:_OUTPUT_CHARACTERS]} (all that it printed: {self._output})"
