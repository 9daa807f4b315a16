"""The choice of a strategy: what the user named; or, of "auto", what writes least.

A log is taken where records and bases have much fewer bytes for each step than whole states. Sizes
are those of global shapes, which are the same on all ranks, so that nobody asks anybody. They are
known after the first update, when moments exist; until then, and else, states are spread over the
steps before they are due, which is `full` where one step is enough.
"""

import logging

import torch

from everstep import options
from everstep.capture.copy_speed import CopySpeed
from everstep.capture.log import STATES, Log
from everstep.capture.rank_agreement import RankAgreement
from everstep.capture.spread import Spread
from everstep.capture.strategy import Run, Strategy, why_no_replica
from everstep.capture.thin import Thin
from everstep.capture.trust import Trust
from everstep.capture.window import gradient_item
from everstep.errors import Unsupported
from everstep.redo.allowed import why_coupled, why_not_allowed
from everstep.redo.derived import Derived
from everstep.redo.recorder import Recorder
from everstep.sharding.world import group_size
from everstep.state.view import State

log = logging.getLogger("everstep")

CHEAPER = 0.6
"""A log is taken where it has less than this part of the bytes of whole states."""


class Choice:
    """What a user's options come to for a state, with what strategies share. For the thread that
    trains; all ranks make one."""

    def __init__(self, chosen: options.Options, state: State, derived: Derived) -> None:
        """Raises Unsupported, on all ranks, where a Log or Spread that the user asked for does not
        fit one of them."""
        how = chosen.strategy
        of_log = how if isinstance(how, options.Log) else options.Log()
        self._state = state
        self._every = chosen.every
        self._derived = derived
        self._base_every = of_log.base_every
        ranks = RankAgreement(state)
        self.run = Run(
            state.optimizers,
            Recorder(
                state.optimizers, of_log.verify == "full", state.world.number, of_log.pre_clip
            ),
            Trust(is_alone=state.world.is_alone, by_replica=of_log.replica),
            CopySpeed(),
            ranks,
            state.in_bases_alone,
            why_not_allowed(state.optimizers, state.modules) or why_coupled(state.optimizers),
        )
        self._is_open, self._is_lost = how is None, False
        self.reason: str | None = None
        """Why "auto" has taken what it has; None where the user chose."""
        whys = state.world.gather("choosing a strategy", self._why_no_log(of_log))
        self._strategy = self._first(how, next(filter(None, whys), None))

    @property
    def strategy(self) -> Strategy:
        """By which it is decided what is captured: whole states, once trust is lost."""
        lost = self.run.trust.lost
        if lost and not self._is_lost:
            self._strategy.break_off()
            self._strategy = Spread(self.run, self._every)
            self._is_lost, self._is_open = True, False
            self.reason = self.reason and f"full: {lost}"
        return self._strategy

    def settle(self) -> None:
        """Choose for the whole run, where "auto" is to, and it can be told by now."""
        have_moments = (each.has_stepped or each.state for each in self._state.optimizers)
        if not self._is_open or not all(have_moments):
            return
        self._is_open = False
        is_log, reason = weigh(*_sizes(self._state), self._every)
        if is_log:
            self._strategy.break_off()
            self._strategy = Log(self.run, self._base_every, self._derived)
        self.reason = reason
        log.info("strategy auto: %s", reason)

    def _first(
        self, how: options.Full | options.Spread | options.Log | None, why: str | None
    ) -> Strategy:
        """`why` there can be no log."""
        if isinstance(how, options.Full):
            if how.thin:
                return Thin(self.run, self._every, how.thin)
            return Spread(self.run, self._every, window=1)
        if isinstance(how, options.Log):
            if why:
                raise Unsupported(f"strategy='log': {why}. Use strategy='full' or 'auto'")
            if how.layerwise and group_size() > 1:
                raise Unsupported(
                    "everstep.Log(layerwise=True) and several ranks: their gradients are reduced "
                    "after they are there. Leave layerwise= out"
                )
            return Log(self.run, self._base_every, self._derived)
        if how is None and why:
            self._is_open, self.reason = False, f"full: {why}"
            log.warning("strategy auto saves whole states: %s", why)
        if how and self.run.ranks.is_on_nodes:
            raise Unsupported(
                "strategy='spread' and ranks on several nodes: that is for ranks of one node. Use "
                "strategy='full' or 'auto'"
            )
        if how and self.run.coupling:
            log.warning(
                "strategy='spread' copies each state at one step here, and not piece by piece over "
                "a window: %s",
                self.run.coupling,
            )
        return Spread(self.run, self._every, how.window if how else None)

    def _why_no_log(self, how: options.Log) -> str | None:
        why = why_not_allowed(self._state.optimizers, self._state.modules, how.optimizers)
        if why is None and self._derived.parts and self.run.ranks.is_on_nodes:
            return "derive= and ranks on several nodes do not go together with a log"
        if why is None and how.replica:
            found = why_no_replica(self._state.optimizers, self._derived)
            why = found and f"it cannot have a replica (leave replica= out): {found}"
        return why or self._derived.why_no_log()


def weigh(state_bytes: int, record_bytes: int, every: int) -> tuple[bool, str]:
    """Whether a log has much fewer bytes, and the figures in words."""
    log_bytes, full_bytes = record_bytes * (1 + 1 / STATES), state_bytes / every
    is_log = log_bytes < CHEAPER * full_bytes
    unit, name = (1e6, "MB") if full_bytes >= 1e6 else (1e3, "kB")
    return is_log, (
        f"{'log' if is_log else 'full'}: {name} a step: {log_bytes / unit:.1f} in records and "
        f"bases, or {full_bytes / unit:.1f} in whole states"
    )


def _sizes(state: State) -> tuple[int, int]:
    """Bytes of a whole state and of a record, as global shapes have them; without what no optimizer
    owns of a record, of which most runs change little."""
    record, tensors = 0, dict[int, torch.Tensor]()
    for optimizer in state.optimizers:
        for _, _, parameter, _ in optimizer.parameters():
            record += parameter.numel() * gradient_item(parameter)
            kept = optimizer.state.get(parameter, {}).values()
            members = [parameter, *(each for each in kept if isinstance(each, torch.Tensor))]
            tensors |= {id(each): each for each in members}
    for module in state.modules.values():
        tensors |= {id(each): each for each in (*module.parameters(), *module.buffers())}
    return sum(each.numel() * each.element_size() for each in tensors.values()), record
