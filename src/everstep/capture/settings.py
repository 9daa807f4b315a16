"""The strategy that a user's choice makes."""

import logging
from collections.abc import Mapping

from torch import nn

from everstep.capture.auto import Auto
from everstep.capture.base_interval import BaseInterval
from everstep.capture.copy_speed import Pace
from everstep.capture.log import Log
from everstep.capture.rank_agreement import Ranks
from everstep.capture.spread import Spread
from everstep.errors import Unsupported
from everstep.options import Full as ChosenFull
from everstep.options import Log as ChosenLog
from everstep.options import Options
from everstep.options import Spread as ChosenSpread
from everstep.redo.coupling import why_not
from everstep.redo.derived import Derived
from everstep.redo.refusals import check
from everstep.state.optimizers import OptimizerState

log = logging.getLogger("everstep")

Strategy = Log | Spread | Auto


def make_strategy(
    options: Options,
    optimizers: list[OptimizerState],
    modules: Mapping[str, nn.Module],
    pace: Pace,
    derived: Derived | None,
    ranks: Ranks | None = None,
) -> Strategy | None:
    """None for whole states: then there is nothing to decide. `modules`: of the state. Raises
    Unsupported where the strategy does not fit these. `ranks`: of several."""
    chosen = options.strategy
    if isinstance(chosen, ChosenFull):
        return None
    if isinstance(chosen, ChosenSpread) and (why := why_not(optimizers)):
        log.warning(
            "strategy='spread' copies each state at one step here, and not piece by piece over a "
            "window: %s",
            why,
        )

    def make_log(chosen: ChosenLog) -> Log:
        check(optimizers, modules, is_alone=ranks is None)
        if ranks and derived:
            _check_nodes(ranks, "derive= with a log")
        if derived:
            derived.check_log(is_alone=ranks is None)
        interval = BaseInterval(chosen.base_every)
        return Log(optimizers, interval, pace, chosen.verify == "full", derived, ranks)

    if isinstance(chosen, ChosenLog):
        return make_log(chosen)
    if isinstance(chosen, ChosenSpread):
        if ranks:
            _check_nodes(ranks, "strategy='spread'")
        check(optimizers, modules, is_alone=ranks is None)
    window = chosen.window if chosen else None
    spread = Spread(optimizers, options.every, pace, window, ranks)
    if chosen:
        return spread
    return Auto(lambda: make_log(ChosenLog()), spread, options.every, ranks)


def _check_nodes(ranks: Ranks, what: str) -> None:
    if ranks.is_on_nodes:
        raise Unsupported(
            f"{what} and ranks on several nodes: that is for ranks of one node. Use "
            f"strategy='full' or 'auto'"
        )
