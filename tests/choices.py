"""The arguments of a Checkpointer from flat ones, which a test can list, merge and draw."""

import everstep
from everstep.capture import log

_OF_LOG = ("base_every", "verify", "replica", "pre_clip", "layerwise", "optimizers")
_OF_RANKS = ("by_rank", "layout", "alone", "check")


def chosen(strategy="auto", window=None, **flat):
    """`window` is of a Spread, the names in _OF_LOG of a Log, those in _OF_RANKS of Ranks; the rest
    is Checkpointer's own. What is None is left out.

    A log's `window` is that over which its bases are spread, which no user chooses, and which would
    hang on how busy the machine is: 1 where none is given. It holds from here on, for all logs of
    this process, until the next call."""
    flat = {name: value for name, value in flat.items() if value is not None}
    own = {name: flat.pop(name) for name in _OF_LOG if name in flat}
    ranks = {name: flat.pop(name) for name in _OF_RANKS if name in flat}
    if strategy == "spread":
        strategy = everstep.Spread(window=window)
    elif strategy == "log":
        strategy = everstep.Log(**own)
        log.steps_of_base = lambda *_: window or 1
    if ranks:
        flat["ranks"] = everstep.Ranks(**ranks)
    return {"strategy": strategy, **flat}
