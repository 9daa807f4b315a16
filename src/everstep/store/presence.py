"""Who writes to a store that has no locks: an object that its writer renews.

    writers/9f86d081884c7d65      of one process, while it may write

Who deletes looks first. A writer that was cut off for so long that its object counts no more finds
out by what it misses, or by its epoch.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from everstep.errors import Conflict, EverstepError, Missing
from everstep.store import names
from everstep.tiers.tier import Tier

log = logging.getLogger("everstep")

RENEW_S = 30.0
LIFE_S = 300.0
"""How long an object counts that nobody renews."""

LEAVE_S = 10.0
"""How long whoever deletes waits for a writer that is just leaving."""


class Presence:
    """Shows others that this process writes to a tier. For one thread. Where the tier has locks,
    nothing has to be shown."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._over: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def show(self, is_wanted: bool) -> None:
        """From now on, or not any more; does not block."""
        if self._over and not is_wanted:
            self._over.set()
            self._over = None
        elif is_wanted and not self._over and not self._tier.is_directory:
            self._over = threading.Event()
            self._thread = threading.Thread(
                target=_renew, args=(self._tier, self._over), name="everstep-shows", daemon=True
            )
            self._thread.start()

    def end(self, patience_s: float = 5.0) -> None:
        """Not any more; waits at most so long until that is known."""
        self.show(False)
        if self._thread:
            self._thread.join(patience_s)


def _renew(tier: Tier, over: threading.Event) -> None:
    path = f"{names.WRITERS}/{secrets.token_hex(8)}"
    while not over.is_set():
        try:
            tier.replace(path, f"{socket.gethostname()}:{os.getpid()}".encode())
        except EverstepError as error:  # a bucket that can only be read, or is away
            log.debug("showing that %s is written to: %s", tier.root, error)
        over.wait(RENEW_S)
    tier.forget([path])


@contextlib.contextmanager
def shown(tier: Tier) -> Iterator[None]:
    """While this lasts, others know that this process writes there."""
    presence = Presence(tier)
    presence.show(True)
    try:
        yield
    finally:
        presence.end()


def is_empty(tier: Tier) -> bool:
    """Whether there is nothing but what a writer that died at once may have left."""
    found = {name for name in tier.list("") if not name.startswith(f"{names.STORE}.")}
    return found <= {names.WRITERS, names.PROBES}


def living(tier: Tier) -> list[str]:
    """The paths of what writers that live have put there; nothing where they have locks."""
    if tier.is_directory:
        return []
    files = tier.files(names.WRITERS).items()
    since = tier.now() - LIFE_S if files else 0.0
    return [f"{names.WRITERS}/{name}" for name, (_, at) in files if at > since]


def check_alone(tier: Tier, what: str) -> None:
    """Raises Conflict where somebody writes to a store without locks; waits a little for who is
    just leaving."""
    deadline, who = time.monotonic() + LEAVE_S, "gone since"
    while found := living(tier):
        if time.monotonic() > deadline:
            with contextlib.suppress(Missing):
                who = tier.read(found[0]).decode(errors="replace") or who
            raise Conflict(
                f"{what} {tier.root}: somebody writes to it ({who}), and a bucket has no locks. "
                f"Try again when that has ended; who died is taken for alive for "
                f"{LIFE_S / 60:.0f} min"
            )
        time.sleep(min(0.5, LEAVE_S / 4))
