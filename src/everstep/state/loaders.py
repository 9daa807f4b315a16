"""torchdata's StatefulDataLoader, which alone does not come back as it was: see LoaderState."""

import logging
import random
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from everstep.state.placement import Placement
from everstep.state.stateful import GeneratorState, StatefulState

log = logging.getLogger("everstep")

_CANNOT_RESUME = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""torch's own: they have no state, and draw another order when they are skipped forward."""


class LoaderState(StatefulState):
    """A StatefulDataLoader.

    When it resumes, at the next iter(), it draws what the run that was interrupted drew when its
    epoch began: a seed, and the order. The generators from which it does are restored already, to
    where that run had come with them, so that it would draw twice, and the next epoch, or whatever
    else draws from the global generators, would differ. So they are put back once more.
    """

    def __init__(self, name: str, loader: Any) -> None:
        super().__init__(name, loader)
        self._loader = loader
        if isinstance(loader.sampler, _CANNOT_RESUME):
            log.warning(
                "%s: torchdata cannot resume torch's %s, which draws another order then. Use "
                "shuffle=True, or a sampler that has state_dict() and load_state_dict()",
                name,
                type(loader.sampler).__name__,
            )

    def prepare(self, placement: Placement) -> None:
        """As for anything with a state_dict."""
        super().prepare(placement)
        placement.then(self._watch)

    def _watch(self) -> None:
        """Wrap the one call that resumes."""
        self._loader.__dict__["_get_iterator"] = self._resume

    def _resume(self) -> Any:
        loader = self._loader
        loader.__dict__.pop("_get_iterator", None)
        if loader.next_iter_state is None:
            return loader._get_iterator()
        python, numpy, default = random.getstate(), np.random.get_state(), torch.get_rng_state()
        own = loader.generator and loader.generator.get_state()
        try:
            return loader._get_iterator()
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(default)
            if own is not None:
                loader.generator.set_state(own)


class LoaderGenerator(GeneratorState):
    """The generator that a StatefulDataLoader was given. Its own state_dict does not have it."""

    def prepare(self, placement: Placement) -> None:
        """At the very end; a checkpoint without one was written before it was saved."""
        if placement.saved.has(self.name):
            super().prepare(placement)


def is_loader(value: object) -> bool:
    """Whether LoaderState can take it."""
    module = sys.modules.get("torchdata.stateful_dataloader")  # else it is none
    kind = getattr(module, "StatefulDataLoader", None)
    return kind is not None and isinstance(value, kind) and hasattr(value, "_get_iterator")
