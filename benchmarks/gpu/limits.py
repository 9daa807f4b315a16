"""A part in a process of its own, which ends in time: where its limit is passed, the stacks of all
threads of all its processes are written down, then everything that it started is killed.

Nothing here loads torch or touches the device: whatever hangs there, this goes on.
"""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MARK = "EVERSTEP_GPU_PART"
"""An environment variable, by which all processes of a part are known: keepers outlive trainers."""
DUMP_S = 4.0
KILL_S = 5.0


def run(
    command: Sequence[str], mark: str, log: Path, limit_s: float, environment: Mapping[str, str]
) -> str:
    """Run a command with what it prints in `log`, and end all that carries its mark after it.
    Returns how it ended: "ok", "exit CODE", or what was done. Blocks for `limit_s` and some seconds
    at most, also where a process cannot be killed."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # aborting must not write out a state
    told = {MARK: mark, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, **told},
            start_new_session=True,
        )
    try:
        code = process.wait(limit_s)
        how = f"exit {code}" if code else "ok"
    except subprocess.TimeoutExpired:
        how = f"stopped at its limit of {limit_s:.0f} s"
        end(mark, signal.SIGABRT, DUMP_S)  # Python's faulthandler writes all stacks
    left = end(mark, signal.SIGKILL, KILL_S)
    process.poll()
    return f"{how}; processes {left} cannot be killed" if left else how


def end(mark: str, number: signal.Signals, timeout_s: float) -> list[int]:
    """Send a signal to all that carries the mark; returns who is left after the time."""
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + timeout_s
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _marked(mark: str) -> list[int]:
    """Who has the mark in its environment. A process that has ended has no environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found
