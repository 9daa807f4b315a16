"""everstep: a checkpoint of every training step. The names below are all there is."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from everstep.errors import (
    Conflict,
    Corrupt,
    EverstepError,
    Mismatch,
    Missing,
    Unavailable,
    Unsupported,
)

if TYPE_CHECKING:
    from everstep.checkpointer import Checkpointer
    from everstep.handle import SaveHandle
    from everstep.offload.optimizer import OffloadedOptimizer
    from everstep.options import Full, Log, Ranks, Spread, Tiers
    from everstep.redo.clipping import clip_grad_norm_
    from everstep.redo.compression import compress
    from everstep.restore.store import Store
    from everstep.sharding.mapped import Shard
    from everstep.store.retain import Keep

__version__ = "0.1.0"
__all__ = [
    "Checkpointer",
    "Conflict",
    "Corrupt",
    "EverstepError",
    "Full",
    "Keep",
    "Log",
    "Mismatch",
    "Missing",
    "OffloadedOptimizer",
    "Ranks",
    "SaveHandle",
    "Shard",
    "Spread",
    "Store",
    "Tiers",
    "Unavailable",
    "Unsupported",
    "clip_grad_norm_",
    "compress",
]

# Loaded at first use: the command and the keeper start without torch.
_HOMES = {
    "Checkpointer": "everstep.checkpointer",
    "Full": "everstep.options",
    "Log": "everstep.options",
    "OffloadedOptimizer": "everstep.offload.optimizer",
    "Ranks": "everstep.options",
    "SaveHandle": "everstep.handle",
    "Shard": "everstep.sharding.mapped",
    "Spread": "everstep.options",
    "Tiers": "everstep.options",
    "Keep": "everstep.store.retain",
    "Store": "everstep.restore.store",
    "clip_grad_norm_": "everstep.redo.clipping",
    "compress": "everstep.redo.compression",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
