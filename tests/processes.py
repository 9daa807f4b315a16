"""Other processes: waiting for what they do, and making them stand still."""

import contextlib
import os
import select
import signal
import time
from pathlib import Path

PATIENCE_S = 60.0


def until(condition, what, patience_s=PATIENCE_S):
    """Wait for a condition that nothing announces."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return found


@contextlib.contextmanager
def stopped(pid):
    """A process that stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        stat = Path(f"/proc/{pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stops")
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def ended(pid, timeout=PATIENCE_S):
    """Whether a process that is no child ends within the time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(pidfd)
