"""Compares a stored checkpoint with the live state of another run, byte for byte.

The live side is read from torch's own objects, not through everstep, so that a mistake in how a
state is walked cannot hide on both sides.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.cli.workload import Run
from everstep.errors import EverstepError
from everstep.state.objects import decode
from everstep.store.store import Store

_LISTED_MAX = 20


def compare(run: Run, store: Path, step: int) -> dict[str, Any]:
    """What was compared (tensors, bytes, values) and every difference, for the event log."""
    try:
        checkpoint = Store(store)
        latest, manifest, stored = checkpoint.latest(), checkpoint.manifest(), checkpoint.read()
    except EverstepError as error:
        return {"step": None, "tensors": 0, "bytes": 0, "values": 0, "differences": [str(error)]}
    used: set[str] = set()

    def take(name: str, device: str) -> Tensor:
        used.add(name)
        return stored[name]

    found = {
        "tensors": {name: stored[name] for name in live_tensors(run) if name in stored},
        "objects": decode(manifest.objects, take),
        "hyperparameters": decode(manifest.hyperparameters, take),
    }
    live = {
        "tensors": live_tensors(run),
        "objects": live_objects(run),
        "hyperparameters": {"optimizer": _hyperparameters(run)},
    }
    problems = [] if latest == step else [f"the newest checkpoint is of step {latest}, not {step}"]
    unknown = stored.keys() - used - live_tensors(run).keys()
    problems += [f"tensor {name!r} is only in the checkpoint" for name in sorted(unknown)]
    problems += differences(live, found)
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in stored.values()}
    return {
        "step": latest,
        "tensors": len(stored),
        "bytes": sum(distinct.values()),
        "stored_bytes": manifest.size,
        "values": len(dict(flatten("", live))) - len(live["tensors"]),
        "differences": problems[:_LISTED_MAX],
    }


def live_tensors(run: Run) -> dict[str, Tensor]:
    """Model and optimizer tensors under the names that they have in a checkpoint."""
    tensors = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state[parameter].items():
            tensors[f"optimizer.model.{name}.{key}"] = value
    return tensors


def live_objects(run: Run) -> dict[str, Any]:
    """All of the state that is not the model's or the optimizer's, in the form that is stored."""
    version, words, gauss = random.getstate()
    return {
        "scheduler": run.scheduler.state_dict(),
        "loader": run.loader.state_dict(),
        "note": run.note,
        "rng": {
            "python": (version, np.array(words, dtype=np.uint32), gauss),
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
        },
    }


def differences(live: object, found: object) -> Iterator[str]:
    """Where two trees of values differ, in type, shape or any bit."""
    one, other = dict(flatten("", live)), dict(flatten("", found))
    for path in sorted(one.keys() | other.keys()):
        if path not in one or path not in other:
            yield f"{path}: only in the {'live' if path in one else 'stored'} state"
        elif not _is_same(one[path], other[path]):
            yield f"{path}: {_brief(one[path])} live, {_brief(other[path])} stored"


def flatten(path: str, tree: object) -> Iterator[tuple[str, object]]:
    """The leaves of a tree by path; a container is there too, as the name of its type."""
    if isinstance(tree, dict):
        items: list[tuple[object, object]] = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    else:
        yield path, tree
        return
    yield path, type(tree).__name__
    for key, item in items:
        yield from flatten(f"{path}.{key}" if path else str(key), item)


def _is_same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same_form = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same_form and torch.equal(_bytes_of(one), _bytes_of(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same_form = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same_form and one.tobytes() == other.tobytes()
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()
    return bool(one == other)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _brief(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} from {value.detach().flatten()[:3].tolist()}"
    return repr(value)[:80]


def _hyperparameters(run: Run) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in run.optimizer.param_groups
    ]
