"""The pool of slots: which memory the next capture goes to, within a budget.

Invariant: the newest complete state is never overwritten, so that one good copy is always whole in
memory while the next one is being made. A slot is free for the next capture when it holds nothing
that still has to be written, and is not that newest one.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from everstep.capture.plan import STILL_GROUPS, Plan
from everstep.errors import Unavailable
from everstep.format.packs import PAGE_BYTES, round_up
from everstep.keeper.arena import SUBMITTED, Arena, SlotState
from everstep.keeper.client import Client
from everstep.keeper.measured import available_memory
from everstep.keeper.ranks.node_save import place_of

SLOTS = 3
SLOTS_MIN = 2
"""So that one good copy is whole while the next one is made."""
_STILL_SLACK_BYTES = 2 * (STILL_GROUPS + 1) * PAGE_BYTES
"""In each image, for packs more: what is seen not to change gets its own (still.py)."""
_DOCUMENT_SLACK_BYTES = 1 << 20
_LOOK_S = 0.2


@dataclass(slots=True)
class Slot:
    """A slot that a capture may fill, which is the job of that number: rising, over all arenas."""

    key: str
    arena: Arena
    index: int
    sequence: int


class Pool:
    """The arena in use, those that are being retired, and who may write where. Thread-safe."""

    def __init__(self, client: Client, budget: int | None) -> None:
        """`budget`: bytes of host memory for captures; None: of SLOTS where these fit into half of
        the available memory (of all ranks), else of SLOTS_MIN."""
        self._client = client
        self._budget = budget
        self._chosen_budget = budget
        self._changed = threading.Condition()
        self._current: tuple[str, Arena] | None = None
        self._retired: list[tuple[str, Arena]] = []
        self._inherited: list[tuple[str, Arena]] = []
        self._plans: dict[tuple[str, int], Plan] = {}
        self._sequence = 0
        self.lent: Slot | None = None
        """The last that `acquire` gave, until it is in other hands."""
        self.on_release: Callable[[Arena], None] = lambda arena: None

    def describe(self) -> dict[str, object]:
        """What `everstep show` prints of the memory."""
        arena = self._current[1] if self._current else None
        return {
            "slots": arena.slot_count if arena else 0,
            "arena_bytes": arena.size if arena else 0,
            "budget_bytes": self._chosen_budget,
        }

    def inherit(self, arenas: list[tuple[str, Arena]]) -> None:
        """Arenas of trainers that died, in which the next capture may go on: their pages are warm.
        Of several ranks each takes what was in its place: what they hold together stays whole."""
        self._inherited = [
            (key, arena)
            for key, arena in arenas
            if place_of(arena) in (self._client.place.here, None) and not arena.is_file
        ]

    def close(self) -> None:
        """Let go of all arenas; nothing is being copied any more, and the client has closed
        them."""
        self.inherit([])
        for _, arena in [*self._retired, *([self._current] if self._current else [])]:
            self.on_release(arena)
        self._current, self._retired, self.lent = None, [], None
        self._plans.clear()

    def acquire(self, plan: Plan, descriptor_size: int, *, waits: bool) -> Slot | None:
        """A slot for this plan, in state CAPTURING and with its headers in place.

        `descriptor_size`: of the last one, as the next is not made yet; there is room for growth.
        Where it `waits`, it blocks while no slot is free or there is no keeper, as long as the
        client's patience lasts. None where no slot is free then. Raises Unavailable where the
        budget is too small, or there is no keeper.
        """
        since = time.monotonic() if waits else None
        with self._changed:
            self._await_keeper(since)
        if not self.reserve(plan, descriptor_size, since):
            return None
        assert self._current
        key, arena = self._current
        with self._changed:
            while (index := arena.free_slot()) is None:
                if not self._wait(since):
                    return None
                self._await_keeper(since)
            self._sequence += 1
            slot = self.lent = Slot(key, arena, index, self._sequence)
            arena.set_state(index, SlotState.CAPTURING)
        if self._plans.get((key, index)) is not plan:
            self._plans.pop((key, index), None)  # should an interrupt come in the midst of it
            for offset, header in plan.headers():
                arena.image(index)[offset : offset + len(header)] = header
            _clear_gaps(arena, index, plan)
            self._plans[key, index] = plan
        return slot

    def take_back(self, slot: Slot) -> None:
        """Nobody writes to it, or will: an interrupt came before it was used."""
        if slot.arena.state(slot.index) is SlotState.CAPTURING:
            slot.arena.set_state(slot.index, SlotState.FREE)
        self.lent = None

    def reserve(self, plan: Plan, descriptor_size: int, since: float | None) -> bool:
        """Make sure that there is an arena for this plan: one that is outgrown is retired.

        Blocks while the one before it is still in use, as long as who waits since then
        (time.monotonic(); None: does not wait) may go on; False then. So there are never more than
        two, however fast a state grows. Raises Unavailable.
        """
        local, here = self._client.place.here
        said = 3 * descriptor_size + 64 * plan.layout.digest_count
        documents = round_up(len(plan.table) + said * (1 if local else here))  # one has all ranks'
        documents += _DOCUMENT_SLACK_BYTES
        image = plan.layout.size
        if self._current and _fits(self._current[1], image, documents // 2):
            return True
        with self._changed:
            while not self._release_retired(is_needed=True):
                if not self._wait(since):
                    return False
                self._await_keeper(since)
        adopted = self._adopt(image, documents)
        outgrown, self._current = self._current, adopted or self._create(image, documents)
        if outgrown:
            self._retired.append(outgrown)
        return True

    def _wait(self, since: float | None) -> bool:
        """For what changes meanwhile, not long: a new keeper changes states without a message to
        us. False where who waits since then has no patience left. `_changed` is locked."""
        may_wait = since is not None and self._client.patience.lasts(since)
        if may_wait:
            self._changed.wait(_LOOK_S)
        return may_wait

    def _await_keeper(self, since: float | None) -> None:
        """Raises Unavailable where there is none in time. `_changed` is locked."""
        while True:
            try:
                self._client.ensure()
            except Unavailable:
                if not self._wait(since):
                    raise
            else:
                return

    def notify(self) -> None:
        """A slot may have become free."""
        with self._changed:
            self._changed.notify_all()

    def retire_old(self) -> None:
        """Release the arena that was outgrown, once it has nothing left to write and the one in use
        holds a whole state: one good copy stays in memory. Any thread."""
        with self._changed:
            self._release_retired()

    def _release_retired(self, *, is_needed: bool = False) -> bool:
        """Whether no retired arena is left. `is_needed`: there are not to be three."""
        has_successor = self._current and self._current[1].newest_complete() is not None
        for key, arena in list(self._retired):
            if (has_successor or is_needed) and not _is_busy(arena):
                self._retired.remove((key, arena))
                self._release(key, arena)
        return not self._retired

    def _release(self, key: str, arena: Arena) -> None:
        self.on_release(arena)
        self._plans = {at: plan for at, plan in self._plans.items() if at[0] != key}
        self._client.release_arena(key)

    def _adopt(self, image: int, documents: int) -> tuple[str, Arena] | None:
        chosen = None
        for key, arena in self._inherited:
            is_close = arena.image_size <= round_up(image) * 1.5
            fits = is_close and _fits(arena, image, documents // 2)
            if not chosen and fits and self._client.adopt(key, arena):
                chosen = key, arena
                rows = (arena.row(slot) for slot in range(arena.slot_count))
                newest = max((row.sequence for row in rows if row), default=0)
                self._sequence = max(self._sequence, newest)
        self._inherited = []
        return chosen

    def _create(self, image: int, documents: int) -> tuple[str, Arena]:
        if self._current:  # it has grown, and may go on to do so
            image += image // 4
        image += _STILL_SLACK_BYTES
        slot_bytes = round_up(image) + round_up(documents)
        budget = self._budget
        if budget is None:
            half = available_memory() // 2 // self._client.place.here[1]  # all take some now
            budget = max(SLOTS_MIN * slot_bytes, min(SLOTS * slot_bytes, half))
        self._chosen_budget = budget
        if budget < SLOTS_MIN * slot_bytes:
            raise Unavailable(
                f"capturing: memory_bytes={budget} bytes is too small. This state needs "
                f"{slot_bytes} bytes a "
                f"slot, and two slots, so that one good copy is whole while the next is made"
            )
        arena = Arena.create(min(SLOTS, budget // slot_bytes), documents, image)
        key = secrets.token_hex(8)
        self._client.add_arena(key, arena)
        return key, arena


def _is_busy(arena: Arena) -> bool:
    """Whether something is being copied into it, or waits to be written."""
    busy = (SlotState.CAPTURING, *SUBMITTED)
    return any(arena.state(slot) in busy for slot in range(arena.slot_count))


def _fits(arena: Arena, image: int, documents: int) -> bool:
    return image <= arena.image_size and documents <= arena.documents_size


def _clear_gaps(arena: Arena, slot: int, plan: Plan) -> None:
    """Zero the padding: another plan's bytes may lie there."""
    used = [(start, len(header)) for start, header in plan.headers()]
    used += [(plan.offsets[spec.entry], spec.size) for spec in plan.layout.specs]
    image, at = arena.image(slot), 0
    for start, size in (*sorted(used), (plan.layout.size, 0)):
        if start > at:
            image[at:start] = bytes(start - at)
        at = max(at, start + size)
