"""Who writes to a store that has no locks: an object that its writer renews.

    writers/9f86d081884c7d65      of one process, while it may write

Who deletes looks first. A writer that died is taken for alive until its object is LIFE_S old; one
that was cut off for longer is taken for dead, and finds out by what it misses, or by its epoch.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time

from everstep.errors import Conflict, EverstepError
from everstep.format.document import FORMAT_VERSION, seal, unseal
from everstep.store import names
from everstep.store.commit import now
from everstep.tiers.tier import Tier

log = logging.getLogger("everstep")

RENEW_S = 30.0
LIFE_S = 300.0
LEAVE_S = 10.0
"""How long whoever deletes waits for a writer that is just leaving."""


class Presence:
    """Shows others that this process writes to a tier; a thread sees to it. Any thread. Where the
    tier has locks, nothing has to be shown."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._path = f"{names.WRITERS}/{secrets.token_hex(8)}"
        self._changed = threading.Event()
        self._is_wanted = self._is_over = False
        self._thread: threading.Thread | None = None

    def show(self, is_wanted: bool) -> None:
        """From now on, or not any more; does not block."""
        if self._tier.has_locks or is_wanted == self._is_wanted:
            return
        self._is_wanted = is_wanted
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="everstep-shows", daemon=True)
            self._thread.start()

    def end(self, patience_s: float = 5.0) -> None:
        """Not any more; waits at most so long until that is known."""
        self._is_over = True
        self.show(False)
        self._changed.set()
        if self._thread:
            self._thread.join(patience_s)

    def _work(self) -> None:
        is_shown = False
        while True:
            self._changed.clear()
            is_last, is_wanted = self._is_over, self._is_wanted
            try:
                if is_wanted:
                    said = {"writer": f"{socket.gethostname()}:{os.getpid()}", "renewed": now()}
                    self._tier.replace(self._path, seal({"format": FORMAT_VERSION, **said}))
                elif is_shown:
                    self._tier.delete(self._path)
                is_shown = is_wanted
            except EverstepError as error:  # a bucket that can only be read, or is away
                log.debug("showing that %s is written to: %s", self._tier.root, error)
            if is_last:
                return
            self._changed.wait(RENEW_S if is_wanted else None)


def is_empty(tier: Tier) -> bool:
    """Whether there is nothing but what a writer that died at once may have left."""
    return set(tier.list("")) <= {names.WRITERS, names.PROBES}


def living(tier: Tier) -> list[str]:
    """The paths of what writers that live have put there."""
    paths = [f"{names.WRITERS}/{name}" for name in tier.list(names.WRITERS)]
    ages = ((path, tier.age_s(path)) for path in paths)
    return [path for path, age_s in ages if age_s is not None and age_s < LIFE_S]


def check_alone(tier: Tier, what: str) -> None:
    """Raises Conflict where somebody writes to a store without locks; waits a little for who is
    just leaving."""
    if tier.has_locks:
        return
    deadline = time.monotonic() + LEAVE_S
    while found := living(tier):
        if time.monotonic() > deadline:
            who = "gone since"
            with contextlib.suppress(EverstepError):
                who = unseal(tier.read(found[0]), found[0], {"writer": str})["writer"]
            raise Conflict(
                f"{what} {tier.root}: somebody writes to it ({who}), and a bucket has no locks. "
                f"Try again when that has ended; who died is taken for alive for "
                f"{LIFE_S / 60:.0f} min"
            )
        time.sleep(min(0.5, LEAVE_S / 4))
