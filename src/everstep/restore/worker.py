"""python -m everstep.restore.worker STORE: the process that has torch, and the live replica of a
log.

The keeper starts it (keeper/live_replica.py) with a socket as its standard input, over which both
send messages as trainer and keeper do (keeper/wire.py). It ends when that closes: then its keeper
is gone.

    keeper → worker   follow: checkpoints that were committed, and where they lie in arenas
                      lend: the state is needed, by who restores
    worker → keeper   replica: it has come to there, and has written a base, or not
                      lent: the state's arena, or nothing; failed: with kind and message
"""

import contextlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.errors import Conflict, EverstepError, Missing
from everstep.format.manifest import CheckpointName
from everstep.keeper import wire
from everstep.keeper.arena import Arena
from everstep.keeper.job import ALL, Job
from everstep.tiers.tier import tier_at

if TYPE_CHECKING:
    from everstep.restore.replica import Replica

PATIENCE_S = 5.0
"""How long it may take to clean up when it is told to end."""

LATE_S = 2.0
"""How long it gives way with what it was asked for."""

_LOOK_MS = 500


class Worker:
    """Does what the keeper asks for, one thing after another."""

    def __init__(self, connection: socket.socket, replica: "Replica") -> None:
        self._connection = connection
        self._replica = replica
        self._arenas: dict[tuple[int, int], Arena] = {}

    def handle(self, message: wire.Message, fds: list[int]) -> None:
        """Answer one message; owns `fds`. Raises OSError where the keeper is gone."""
        try:
            if message["type"] == "lend":
                self._lend()
            else:
                self._follow(message["saves"], list(map(self._arena, fds)))
        except EverstepError as error:
            self._send({"type": "failed", **wire.failure(error)})
        except Exception as error:  # noqa: BLE001 - torch's and the optimizers'
            said = {"kind": "Unsupported", "message": repr(error)[: wire.TEXT_MAX]}
            self._send({"type": "failed", **said})

    def _follow(self, saves: list[Any], arenas: Sequence[Arena]) -> None:
        jobs = {CheckpointName(step, epoch): _jobs(arenas, places) for step, epoch, places in saves}
        has_base = False
        with contextlib.suppress(Missing, Conflict):  # retention was quicker; or another writer
            self._replica.follow([*jobs][-1], jobs)
            if self._replica.is_base_due:
                self._replica.write_base()
                has_base = True
        said = {"name": self._replica.at, "seconds": time.process_time(), "has_base": has_base}
        self._send({"type": "replica", **said})

    def _lend(self) -> None:
        """At once: somebody waits for it."""
        take_share()
        arena = self._replica.lend()
        self._send({"type": "lent"}, [arena.fd] if arena else [])

    def _arena(self, fd: int) -> Arena:
        """That of a trainer, which is mapped once."""
        found = os.fstat(fd)
        key = found.st_dev, found.st_ino
        if key in self._arenas:
            os.close(fd)
            return self._arenas[key]
        for other in list(self._arenas)[:-_ARENAS_MAX]:
            self._arenas.pop(other).close()
        self._arenas[key] = Arena(fd)
        return self._arenas[key]

    def _send(self, message: wire.Message, fds: list[int] | None = None) -> None:
        wire.send(self._connection, message, fds)


_ARENAS_MAX = 2 * wire.LOCAL_RANKS_MAX


def main(arguments: list[str] | None = None) -> int:
    """Serve until the keeper is gone."""
    (store,) = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    connection = socket.socket(fileno=0)
    watch = _Watch(connection)
    from everstep.restore.replica import Replica  # torch: slow

    worker = Worker(connection, Replica(tier_at(store)))
    give_way()
    with contextlib.suppress(OSError, ValueError):
        while received := wire.receive(connection):
            watch.begin()
            worker.handle(*received)
            watch.end()
    return 0


def _jobs(arenas: Sequence[Arena], places: list[Any]) -> list[Job]:
    """The slots of a checkpoint, if all of them still hold it."""
    found = [Job(arenas[at], slot, sequence) for at, slot, sequence in places]
    if any(job.arena.sequence_of(job.slot) != job.sequence for job in found):
        return []
    for job in found:
        job.arrival.advance(ALL)
    return found


def give_way() -> None:
    """Take processor and disk (by SCHED_IDLE) only when nobody else wants them, and be the first
    that goes when memory runs out. What the system does not allow is left out."""
    _set_priority(os.SCHED_IDLE, 19)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def take_share() -> None:
    """Take as much of the processor as anybody else."""
    _set_priority(os.SCHED_OTHER, 0)


def _set_priority(policy: int, nice: int) -> None:
    """Of all threads, but for the one that sees to the others."""
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread == _Watch.thread:
            continue
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, policy, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    with contextlib.suppress(OSError):  # else a session of its own would have a fair share
        Path("/proc/self/autogroup").write_text(str(nice))


class _Watch:
    """A thread that is never slowed down. Work gives way to all else that this machine does; but
    where it is not done after LATE_S, as there is no time that nobody wants, it takes its share: a
    replica that never comes would be of no use. And the process ends when its keeper is gone."""

    thread: int | None = None

    def __init__(self, connection: socket.socket) -> None:
        self._begun = math.inf
        threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def begin(self) -> None:
        """There is something to do."""
        self._begun = time.monotonic()

    def end(self) -> None:
        """It is done."""
        self._begun = math.inf
        give_way()

    def _run(self, connection: socket.socket) -> None:
        _Watch.thread = threading.get_native_id()
        end = select.poll()
        end.register(connection, select.POLLRDHUP)
        while not end.poll(_LOOK_MS):
            if time.monotonic() - self._begun > LATE_S:
                take_share()
        os.kill(os.getpid(), signal.SIGTERM)  # the main thread cleans up, if it can
        time.sleep(PATIENCE_S)
        os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
