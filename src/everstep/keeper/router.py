"""Where a step becomes durable first, where there is a remote tier: tiers/route.py decides, by the
speeds that were measured.

What stands by itself may go to the remote tier straight from memory: whole states of a run that
keeps no log, without a tag. It is a checkpoint of that tier alone then, which restores read beside
the store. Where that tier does not take it, the store does. For the team's thread.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from everstep.errors import Conflict, EverstepError, Unavailable
from everstep.keeper.copies import RemoteCopies
from everstep.keeper.persist import persist
from everstep.keeper.ranks.node_save import NodeSave
from everstep.keeper.writer import Outcome, Writer
from everstep.tiers.route import Durable, Name, Route, choose

log = logging.getLogger("everstep.keeper")

AWAY_S = 30.0
"""For so long nothing is routed to a tier that has not taken a step."""

_ENDLESS = 1 << 62


class Router:
    """Of one writer, and the copies to its remote tier."""

    def __init__(self, route: Route, writer: Writer, copies: RemoteCopies) -> None:
        self._route, self._writer, self._copies = route, writer, copies
        self._beside = Writer(copies.tier, None, encoder=writer.encoder, hasher=writer.hasher)
        """The same, as it writes to the remote tier."""
        self._beside.traffic = copies.traffic
        self._favourite: Name = "local"
        self._away_until = 0.0

    def persist(
        self, save: NodeSave, announce_written: Callable[[NodeSave], None]
    ) -> Outcome | Exception | None:
        """Commit a step in the remote tier, and say what became of it; None where it is to be
        committed in the store."""
        try:
            if self._place_of(save) == "local":
                return None
        except Exception:  # noqa: BLE001 - what a trainer says is no sense: told with the others
            return None
        writer, beside = self._writer, self._beside
        beside.epoch, beside.parent, beside.run = writer.epoch, writer.parent, writer.run
        try:
            self._copies.copier.lead()
            [(_, outcome)] = persist(beside, [save], announce_written)
        except Conflict as error:
            return error
        except EverstepError as error:
            outcome = Unavailable(str(error))
        if type(outcome) is Unavailable:
            log.warning("%s. The store takes what comes in the next %.0f s", outcome, AWAY_S)
            self._away_until = time.monotonic() + AWAY_S
            return None
        if isinstance(outcome, Outcome):
            writer.parent, writer.parent_digest = outcome.name, None  # no record goes on from it
            self._copies.tidy()
            return replace(outcome, is_routed=True)
        return outcome

    def _place_of(self, save: NodeSave) -> Name:
        said = save.describe()
        capture = said["capture"]
        is_whole = not (said["record"] or said["share"] or said["tag"] or said["streams"])
        leads_on = capture.get("strategy") == "log" or "thin" in capture
        if not is_whole or leads_on or not self._writer.epoch:
            return "local"
        local, size = _measured(self._writer), save.size
        tiers: dict[Name, Durable] = {"local": local}
        if time.monotonic() >= self._away_until and self._copies.traffic.problem is None:
            tiers["remote"] = _measured(self._beside)
        chosen = choose(size, tiers, self._favourite, self._route) or "local"
        self._favourite = chosen
        if self._route == "auto" and local.is_unknown and size <= local.free_bytes:
            return "local"  # to measure it; the other one is, by what is copied
        return chosen


def _measured(writer: Writer) -> Durable:
    free, root, traffic = _ENDLESS, writer.disk.root, writer.traffic
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(root).free if isinstance(root, Path) else free
    return Durable(free, traffic.bytes_per_s, time.monotonic() - traffic.noted)
