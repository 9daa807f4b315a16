"""The demo's trainer as its parent sees it, and the moments at which it is killed."""

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

from everstep.cli.demo.events import Event, Settings
from everstep.errors import EverstepError
from everstep.keeper.home import status_of

SILENCE_S_MAX = 180.0
_EVENT_BYTES_MAX = 1 << 20
_OUTPUT_CHARACTERS = 500
_MOMENTS = (("returned", 1.0), ("backward", 0.2), ("imported", 0.5), ("returned", 0.1))
"""After this event, within that part of a step's usual time: anywhere in a step, around an update,
while the trainer starts again, and right after step() returned."""


class DemoError(EverstepError):
    """The demo could not go on: the trainer ended by itself, or fell silent."""


def draw_aims(steps: int, kills: int, seed: int) -> Iterator[tuple[str, int, float]]:
    """Kills to come, spread over the run: after this event of a random step in each of `kills`
    equal stretches (or of a start), when that part of a step's time has gone by.

    None is aimed at the first step, or at the last two, in which the run may be over before the
    kill has come.
    """
    rng = random.Random(seed)
    stretch = max(0, steps - 3) / max(1, kills)
    for index, (event, share) in zip(range(kills), cycle(_MOMENTS), strict=False):
        step = 0 if event == "imported" else 2 + int((index + rng.random()) * stretch)
        yield event, step, share * rng.random()


def end_keeper(store: str) -> None:
    """Have the keeper of a store write what it holds, and wait until it has ended: then nothing of
    the run is left on this machine."""
    status = status_of(store) or {}
    try:
        pidfd = os.pidfd_open(status["pid"])
    except (KeyError, ProcessLookupError):  # there is none, or none any more
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not select.select([pidfd], [], [], SILENCE_S_MAX)[0]:
            raise DemoError(f"the keeper of {store} has not ended for {SILENCE_S_MAX:.0f} s")
    finally:
        os.close(pidfd)


class Trainer:
    """The child process of one role: started, listened to, killed, started again."""

    def __init__(self, settings: Settings, on_event: Callable[[Event], None]) -> None:
        self._settings = settings
        self._on_event = on_event
        self._events: list[Event] = []
        self._output = Path(settings.directory) / f"{settings.role}.log"
        self._begun, self._step_s = 0.0, 0.1
        """The last step; its length is a guess before there is one."""
        self.start()

    def start(self) -> None:
        """Start the process (again). What it prints goes to a file."""
        words = json.dumps(asdict(self._settings))
        command = [sys.executable, "-m", "everstep.cli.demo.trainer", words]
        self._events.append({"event": "spawn", "at": time.monotonic()})
        self._socket, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(SILENCE_S_MAX)
        with others, self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=others.fileno(), stdout=output, stderr=output
            )

    @property
    def events(self) -> list[Event]:
        """All so far, of all its processes, as they happened; `at` in seconds since the first."""
        found = sorted(self._events, key=lambda event: event["at"])
        return [{**event, "at": event["at"] - found[0]["at"]} for event in found]

    def kill_at(self, event: str, step: int, wait: float) -> bool:
        """Kill it `wait` of a step's time after this event of `step`, or of a later one. False
        where the run was over before."""
        found = (each for each in self._listen() if each["event"] == event)
        if not any(each.get("step", 0) >= step for each in found):
            return False
        time.sleep(wait * self._step_s)
        if self._process.poll() is not None:
            return False
        self._process.kill()
        self._events.append({"event": "kill", "at": time.monotonic()})
        self._process.wait()
        if self._settings.url:
            end_keeper(self._settings.url)
        for _ in self._listen():
            pass
        self._socket.close()
        return True

    def finish(self) -> None:
        """Listen to the end. Raises DemoError where the process ended badly."""
        for _ in self._listen():
            pass
        if status := self._process.wait():
            raise DemoError(f"the trainer ended by itself with {status}: {self._said()}")

    def close(self) -> None:
        """End the process where it still runs."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _listen(self) -> Iterator[Event]:
        """Events as they come, until the process has ended."""
        try:
            while data := self._socket.recv(_EVENT_BYTES_MAX):
                event = json.loads(data)
                if event["event"] == "begin":
                    self._begun = event["at"]
                elif event["event"] == "returned":
                    self._step_s = event["at"] - self._begun
                self._events.append(event)
                self._on_event(event)
                yield event
        except TimeoutError:
            silent = f"the trainer was silent for {SILENCE_S_MAX:.0f} s: {self._said()}"
            raise DemoError(silent) from None

    def _said(self) -> str:
        said = self._output.read_text(errors="replace").strip() or "it printed nothing"
        last = said.splitlines()[-1][:_OUTPUT_CHARACTERS]
        return f"{last} (all that it printed: {self._output})"
