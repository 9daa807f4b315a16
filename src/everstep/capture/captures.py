"""Captures: from the live state to a sealed slot.

collect the state → the strategy chooses what of it → a slot → eager copies → (background) lazy
copies → seal → the keeper, which is told of it
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from everstep.capture.choice import Choice
from everstep.capture.copier import Capture, Copier
from everstep.capture.hooks import Hook
from everstep.capture.layerwise import Early, Layerwise
from everstep.capture.optimizer_arenas import OptimizerArenas
from everstep.capture.plan import Plan, Planner
from everstep.capture.pool import SLOTS_MIN, Pool, Slot
from everstep.capture.saves import STALLED, Saves
from everstep.capture.strategy import Captured, Request, Strategy
from everstep.capture.streams import Streams, links_of
from everstep.errors import EverstepError, Unavailable, Unsupported
from everstep.format.manifest import CheckpointName
from everstep.format.tables import is_own
from everstep.handle import Metrics, SaveHandle
from everstep.keeper.arena import check_file_size, file_size_limit
from everstep.keeper.client import Client
from everstep.keeper.ranks.node_save import PLACE
from everstep.options import Log, Options
from everstep.redo.allowed import Overwritten
from everstep.redo.rolling_digest import DERIVED_OWNER
from everstep.sharding.topology import topology
from everstep.state.view import Collected, State
from everstep.tiers.tier import Tier

log = logging.getLogger("everstep")

_HELD_BYTES = 128
"""In a descriptor for each tensor of which several ranks' are compared, about."""
_SLOW_S = 10.0
"""Training that has waited so long in all is told that the disk is slower."""
_PASSES_TOLD = 64
"""After the last record: the other ranks will have heard by then."""


class Captures:
    """All captures of one Checkpointer, one after another. For the thread that trains, but for what
    says something else."""

    def __init__(
        self,
        state: State,
        choice: Choice,
        options: Options,
        disk: Tier,
        client: Client,
        saves: Saves,
        metrics: Metrics,
    ) -> None:
        """Puts hooks on the optimizers."""
        self._choice = choice
        self._trust = choice.run.trust
        self._recorder = choice.run.recorder
        self._losses = client.losses
        self._whole_call = -1
        """Of the whole state (or of the begin of a window) that all goes on from."""
        self.parent: CheckpointName | None = None
        self.epoch: int | None = None
        """Of what is saved from now on; None before the first save after a restore."""
        self._state = state
        self._every = options.every
        self._waits = options.when_full == "wait"
        self._waited_s = 0.0
        self._client = client
        self._saves = saves
        self._metrics = metrics
        self.pool = Pool(client, options.memory_bytes)
        self.optimizer_arenas = OptimizerArenas(state, client)
        saves.attach(client, self.pool)
        self._passes = 0
        """So many more steps are told that are not saved here."""
        self._planners: dict[object, Planner] = {}
        self._plan: Plan | None = None
        """Of what was captured last."""
        self._streams = Streams(disk, state.streams)
        self._descriptor_size = 0
        self._unannounced: threading.Event | None = None
        self._copier = Copier(self._announce, self._seal, self._on_failure, choice.run.pace)
        self.pool.on_release = self._copier.devices.unpin
        self._layerwise: Layerwise | None = None
        if isinstance(options.strategy, Log) and options.strategy.layerwise:
            self._layerwise = Layerwise(self.pool, self._copier.devices)
            self._recorder.settle = self._layerwise.settle
        self._hooks = [
            Hook(optimizer, self._copier, self._recorder, metrics, state.settle)
            for optimizer in state.optimizers
        ]

    @property
    def strategy(self) -> Strategy:
        """By which it is decided what is captured."""
        return self._choice.strategy

    def collect(self) -> Collected:
        """The state as it is now, by reference."""
        self._state.settle()
        for hook in self._hooks:
            hook.put_in_order()
        self._copier.settle()
        for handle, names, problem in self._copier.take_torn():
            self._state.suspect(name for name in names if not is_own(name))
            self._recorder.distrust([name for name in names if is_own(name)])
            if self._state.world.is_alone:  # else all hear of it from their keepers
                self._saves.fail(handle, Unsupported(problem))
        collected = self._state.collect()
        self._metrics.user_seconds = self._state.user_seconds
        return collected

    def begin(self, request: Request) -> SaveHandle | None:
        """Capture what the strategy wants of the state as it is now; None where this commits
        nothing. Returns when all that must be copied at once is copied.

        Raises Unsupported; what is Unavailable is on the handle.
        """
        step = request.step
        levels = self._saves.levels
        further = levels.further(step, is_tagged=request.tag is not None)
        handle = SaveHandle(step, self._saves.calls, levels.durable, further)
        try:
            if not self._begin(handle, request):
                return None
        except BaseException as error:
            self.strategy.break_off()  # what was taken for a record is gone
            known: EverstepError = Unavailable(_interrupted(step, error))
            if isinstance(error, EverstepError):
                known = error
            is_raised = not isinstance(error, Unavailable)
            self._saves.fail(handle, known, is_told=is_raised)
            self._leave_out(step, handle.call, str(known))
            if is_raised:
                self._saves.note(handle)
                raise
        self._saves.note(handle)
        return handle

    def pass_by(self, step: int) -> None:
        """Capture nothing of this step. A rank that has not heard yet that there is no log any more
        would wait for it."""
        if self._passes:
            self._passes -= 1
            self._leave_out(step, self._saves.calls, "it records nothing any more")

    def restored(self, origin: CheckpointName) -> None:
        """A step of this run is restored: what is saved from now on goes on from `origin`, in an
        epoch of its own."""
        self.parent, self.epoch = origin, None

    def hold_derived(self) -> None:
        """Before rules bring parts forward: wait until those are digested."""
        self._copier.hold(DERIVED_OWNER)

    def close(self) -> None:
        """Hold and note nothing any more; end the copying thread when it has nothing left."""
        for hook in self._hooks:
            hook.remove()
        self._recorder.stop()
        if self._layerwise:
            self._layerwise.close()
        self._streams.close()
        self._copier.close()

    def abandon_in_child(self) -> None:
        """In a forked child, where the threads do not exist, and the memory is the parent's."""
        for hook in self._hooks:
            hook.remove()
        if self._layerwise:
            self._layerwise.remove_hooks()

    def _begin(self, handle: SaveHandle, request: Request) -> bool:
        """Whether this commits something. See begin."""
        collected = self.collect()
        # What a keeper that is gone had of a window is gone with it; ranks hear of that by the
        # failure of a step.
        is_lost = self._state.world.is_alone and self._losses != self._client.losses
        self._losses = self._client.losses
        if is_lost or not self._trust.may_follow(self._whole_call):
            self.strategy.break_off()
        captured = self._choose(handle, request, collected)
        if captured is None:
            if not self._state.world.is_alone:  # nobody waits for what has come to nothing here
                self._leave_out(handle.step, handle.call, "its window has ended")
            return False
        is_awaited = captured.continues or captured.is_awaited
        is_awaited |= self._trust.joins_at(handle.call) or request.must_wait
        self._capture(handle, request, captured, waits=self._waits or is_awaited)
        return captured.commits

    def _choose(
        self, handle: SaveHandle, request: Request, collected: Collected
    ) -> Captured | None:
        """What the strategy wants; where it cannot go on, what it wants without what was before."""
        self._choice.settle()
        strategy = self.strategy
        try:
            return strategy.choose(request, collected)
        except Unsupported as error:
            is_new = not isinstance(error, Overwritten)
            self._trust.surprise(handle.call, request.step, str(error), counts=is_new)
        strategy.break_off()
        return strategy.choose(request, collected)

    def _capture(
        self, handle: SaveHandle, request: Request, captured: Captured, *, waits: bool
    ) -> None:
        self.optimizer_arenas.give()
        plan = self._planner(captured).plan(captured.collected, captured.turns)
        if plan is not self._plan:  # what was saved before lies in other packs
            captured = replace(captured, kept=frozenset())
        if (lent := self.pool.lent) and not self._copier.was_given(lent):  # that call was cut off
            self._copier.devices.synchronize()  # nothing may arrive in a slot that is free
            self.pool.take_back(lent)
        captured, early = self._early(captured, plan)
        slot = early.slot if early else self._slot(handle.step, plan, waits)
        if slot is None:
            self._saves.skip(handle)
            self._leave_out(handle.step, handle.call, "it had no memory for it")
            self.strategy.break_off()
            return
        streams = {}
        if captured.commits:
            streams = self._streams.take(handle.step, self.epoch, self._metrics.failures)
        said = self._describe(captured, request) | {"call": handle.call}
        capture = self._copier.begin(handle, captured, plan, slot, said, early)
        capture.streams = streams
        try:
            self.strategy.begun(captured, handle)
            self._plan = plan
            if not captured.continues:
                self._whole_call = handle.call
            if captured.record is not None and not self._state.world.is_alone:
                self._passes = _PASSES_TOLD
            self._saves.begin(capture)
            self._copier.go_on(capture)
        except BaseException as error:
            problem = _interrupted(handle.step, error)
            self._saves.fail(handle, Unavailable(problem), is_told=True)
            self._copier.give_up(capture, problem)
            raise
        self.pool.lent = None
        if self._layerwise and captured.record is not None and captured.share is None:
            self._layerwise.expect(plan, self._recorder.plain, self._descriptor_size)

    def _early(self, captured: Captured, plan: Plan) -> tuple[Captured, Early | None]:
        """What of a record was copied into its slot while backward ran; where it lies otherwise
        than was expected, the record has those copies."""
        if self._layerwise is None:
            return captured, None
        known = self._recorder.early if captured.record is not None else frozenset()
        leaves = captured.collected.walk.leaves if known else ()
        wanted = {leaf.entry: leaf.tensor for leaf in leaves if leaf.entry in known}
        early, copies = self._layerwise.take(plan, wanted)
        if copies:
            copied = (leaf._replace(tensor=copies.get(leaf.entry, leaf.tensor)) for leaf in leaves)
            walk = replace(captured.collected.walk, leaves=tuple(copied))
            captured = replace(captured, collected=replace(captured.collected, walk=walk))
        return captured, early

    def _slot(self, step: int, plan: Plan, waits: bool) -> Slot | None:
        """Memory for a capture; None where none is free, and it does not wait. Raises Unavailable
        where it has waited in vain."""
        began = time.monotonic()
        size = max(self._descriptor_size, _HELD_BYTES * self._state.held_count)
        slot = self.pool.acquire(plan, size, waits=waits)
        waited_s = time.monotonic() - began
        if slot is None and waits:
            raise Unavailable(f"saving step {step}: after {waited_s:.0f} s of waiting, {STALLED}")
        if self._waited_s <= _SLOW_S < self._waited_s + waited_s:
            log.warning(
                "training has waited %.0f s for saves: the disk takes longer for one than training "
                "for what is between two. Save less often (every=), record a log (strategy='log'), "
                "or leave steps out (when_full='skip')",
                self._waited_s + waited_s,
            )
        self._waited_s += waited_s
        return slot

    def _planner(self, captured: Captured) -> Planner:
        """One for each thing that comes again: states, records, the n-th shares of windows."""
        kind = captured.record is not None, len(captured.share["steps"]) if captured.share else 0
        still = None if kind == (True, 0) else self._saves.still
        return self._planners.setdefault(kind, Planner(still))

    def _describe(self, captured: Captured, request: Request) -> dict[str, Any]:
        now = topology(self._state.world.size, self._state.layout())  # threads may be set anew
        share = captured.share
        is_whole = share["ends"] if share else captured.record is None
        return {
            "held": self._state.held() if is_whole else {},
            "objects": captured.collected.objects,
            "own": captured.collected.own,
            "digests": captured.collected.digests,
            "hyperparameters": captured.collected.hyperparameters,
            "topology": {**now, "optimizers": self._state.classes()},
            "capture": {
                "every": self._every,
                "memory": self.pool.describe(),
                **self.strategy.describe(),
                **({"auto": {"reason": self._choice.reason}} if self._choice.reason else {}),
            },
            "metrics": request.metrics,
            "tag": request.tag,
            PLACE: self._client.place.here,
            "record": captured.record,
            "share": captured.share,
            "kept": sorted(captured.kept),
        }

    def _leave_out(self, step: int, call: int, reason: str) -> None:
        """Nothing of this step comes from this rank: no other waits for it. The keeper is told
        when what was captured before was handed over. Any thread."""
        self._copier.in_order(lambda: self._client.leave_out(step, call, reason))

    def _on_failure(self, capture: Capture, error: EverstepError, is_announced: bool) -> None:
        """The copy of it failed, or could not be sealed. `is_announced`: the keeper works on it
        already. Any thread."""
        self._saves.fail(capture.handle, error)  # before the keeper says so, and knows no reason
        if is_announced:
            self._client.submit(capture.slot.key, self._metrics.figures())
        else:
            self._leave_out(capture.step, capture.handle.call, str(error))
        self._saves.forget(capture)

    def _announce(self, capture: Capture) -> Callable[[int], None] | None:
        """Let the keeper work on what is copied already. Copying thread, which must not wait: so
        the first save, for which an epoch has to be claimed, is not announced; nor is any before
        that is sealed."""
        if self._unannounced and not self._unannounced.is_set():
            is_next = False  # jobs are submitted in their order
        else:
            is_next = self.epoch is not None and capture.handle.error is None
            is_next &= not capture.streams
        self._unannounced = None if is_next else capture.sealed
        if not is_next:
            return None
        slot = capture.slot
        self._descriptor_size = len(capture.descriptor)
        slot.arena.announce(slot.index, capture.row, capture.plan.table, capture.descriptor)
        self._client.submit(slot.key, self._metrics.figures())
        return lambda count: self._client.tell_copied(slot.sequence, count)

    def _seal(self, capture: Capture) -> None:
        """All is copied: hand it to the keeper, or to the next one. Sealing thread."""
        if self.epoch is None:
            self.epoch = self._client.claim(self.parent)
        if capture.handle.error:
            raise Unavailable(f"saving step {capture.step}: the keeper was lost meanwhile")
        slot = capture.slot
        capture.description["streams"] = links_of(capture.streams)
        self._descriptor_size = len(capture.descriptor)
        slot.arena.seal(slot.index, capture.row, capture.plan.table, capture.descriptor)
        capture.handle.epoch = self.epoch
        capture.handle.advance("captured")
        self._client.submit(slot.key, self._metrics.figures())


def _interrupted(step: int, error: BaseException) -> str:
    return f"saving step {step}: interrupted by {error!r}. Go on with the next step"


def check_room(state: State) -> None:
    """Raises Unavailable, on all ranks, where no copy of the state can be made on one of them."""

    def check() -> None:
        if file_size_limit() is not None:  # to walk a state takes a while
            tensors = {id(tensor): tensor for tensor in state.live_tensors().values()}
            size = sum(tensor.nbytes for tensor in tensors.values()) // state.world.size
            check_file_size("copying this state in memory", SLOTS_MIN * size)

    state.world.together("looking for room", check)
