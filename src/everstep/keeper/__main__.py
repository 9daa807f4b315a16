"""python -m everstep.keeper STORE: what the trainer starts; nobody needs to do it by hand."""

import argparse
import logging
import os
import resource
import signal
import sys

from everstep.keeper import process
from everstep.keeper.home import BACKLOG, IDLE_S, Home, endpoint, take_lock


def main(arguments: list[str] | None = None) -> int:
    """Run a keeper for a store; returns at once where one is running."""
    parser = argparse.ArgumentParser(prog="everstep.keeper", description=process.__doc__)
    parser.add_argument("store")
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    parser.add_argument(
        "--detach", action="store_true", help="return when it runs, in a process of its own"
    )
    chosen = parser.parse_args(arguments)
    path = endpoint(chosen.store)
    lock = take_lock(path.with_suffix(".lock"))
    if lock is None:
        return 0
    home = Home(path, lock)
    if chosen.detach:
        _detach(home)
    _prepare_process()
    keeper = process.Keeper(chosen.store, home, chosen.idle_s)
    signal.signal(signal.SIGTERM, lambda *_: keeper.leave_when_free())
    try:
        keeper.run()
    finally:
        home.leave()
    return 0


def _detach(home: Home) -> None:
    """Go on in a child; this process ends as soon as the child is the one that listens."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    home.listener.listen(BACKLOG)  # else its peers would take it for the one before the fork
    os.close(writing)


def _prepare_process() -> None:
    """What must not depend on the trainer that happened to start it."""
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
