"""How a trainer starts the keeper: a process that shares nothing with it and outlives it."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from everstep.errors import Unavailable
from everstep.keeper import wire
from everstep.keeper.home import LOG_BYTES_MAX

log = logging.getLogger("everstep")

START_S = 20.0
"""How long a keeper may take until it listens."""


def spawn(store: Path, idle_s: float, stop: threading.Event) -> None:
    """Start a keeper, and wait until it listens (or another does), or `stop`. Raises Unavailable.

    It gets a session and stdio of its own, and is no child: nobody who waits for the trainer's
    pipes or children waits for the keeper, and no signal to the trainer's group reaches it.
    """
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    options = ["--idle-s", str(idle_s), "--detach"]
    endpoint = wire.endpoint(store)
    output = _open_log(endpoint.with_suffix(".log"))
    try:
        process = subprocess.Popen(
            [sys.executable, *("-P", "-m", "everstep.keeper", os.path.realpath(store), *options)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={
                **os.environ,
                "PYTHONPATH": path,
                "EVERSTEP_RUNTIME_DIR": str(endpoint.parent),  # it may be known only here
            },
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(cannot_start(store, error)) from error
    finally:
        os.close(output)
    deadline = time.monotonic() + START_S
    while (status := process.poll()) is None and not stop.wait(0.002):
        if time.monotonic() > deadline:
            break
    if status is None:
        process.kill()
        process.wait()
    if status and status > 0:  # one that was killed is started again by the client
        raise Unavailable(cannot_start(store, f"it ended at once with status {status}"))


def cannot_start(store: Path, reason: object) -> str:
    """The message for whoever needs a keeper, and where to look."""
    text = f"starting the keeper of {store}: {reason}"
    with contextlib.suppress(Unavailable):
        text += f". Its log is {wire.endpoint(store).with_suffix('.log')}"
    return text


def _open_log(path: Path) -> int:
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    try:
        if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
            flags |= os.O_TRUNC
        return os.open(path, flags, 0o600)
    except OSError as error:  # a keeper without a log is better than none
        log.warning("the keeper's log %s: %s", path, error.strerror)
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
