"""python -m everstep.restore.worker STORE: the worker (keeper/workers.py) that holds the live
replica of a log, for a keeper (keeper/live_replica.py).

It is asked to `follow` the checkpoint that was committed last, which may still lie in arenas, and
to lend the state, if who restores waits for it. It answers how far it has come, whether it has
written a base, and with the state's arena.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from everstep.format.manifest import CheckpointName
from everstep.keeper import wire
from everstep.keeper.arena import Arena
from everstep.keeper.workers import Sent, serve
from everstep.restore.replica import Replica
from everstep.tiers.tier import tier_at

LATE_S = 2.0
"""How long it gives way to all else that this machine does, with what it is asked for. Where there
is no time that nobody wants it takes its share then: a replica that never comes is of no use."""

_LOWEST, _FAIR = 19, 0


class Follower:
    """Of one log."""

    def __init__(self, store: str) -> None:
        self._replica = Replica(tier_at(store))
        signal.signal(signal.SIGALRM, lambda *_: set_priority(_FAIR))
        set_priority(_LOWEST)

    def answer(self, message: wire.Message, fds: list[int]) -> Sent:
        """Raises what keeps the replica from following."""
        arenas, name = list(map(Arena, fds)), message["name"]
        signal.setitimer(signal.ITIMER_REAL, LATE_S)
        has_base = bool(name) and self._replica.follow(CheckpointName(*name), arenas)
        lent = None
        if message["lends"]:  # somebody waits for it
            set_priority(_FAIR)
            lent = self._replica.lend()
        signal.setitimer(signal.ITIMER_REAL, 0)
        set_priority(_LOWEST)
        said = {"name": self._replica.at, "seconds": time.process_time(), "has_base": has_base}
        return {"type": "replica", **said}, [lent.fd] if lent else []


def set_priority(nice: int) -> None:
    """Of all threads. What the system does not allow is left out."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, 0, nice)
    with contextlib.suppress(OSError):  # else a session of its own would have a fair share
        Path("/proc/self/autogroup").write_text(str(nice))


def end_with_owner() -> None:
    """End at once when the keeper is gone, and delete what is half written."""
    end = select.poll()
    end.register(0, select.POLLRDHUP)

    def watch() -> None:
        end.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Serve until the keeper is gone."""
    end_with_owner()
    with contextlib.suppress(OSError):  # be the first that goes when memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    return serve(Follower(sys.argv[1]).answer)


if __name__ == "__main__":
    sys.exit(main())
