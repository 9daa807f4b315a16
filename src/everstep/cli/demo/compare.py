"""Compares the last checkpoint of the run that was killed with the live state of the other run.

Both sides are read from torch's own objects, never through everstep's walk of a state, so that a
mistake in that cannot hide on both.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.checkpointer import Checkpointer
from everstep.cli import workload
from everstep.cli.demo.events import Settings
from everstep.cli.workload import Run
from everstep.errors import EverstepError

_LISTED_MAX = 20


def compare(run: Run, settings: Settings) -> dict[str, Any]:
    """What was compared (tensors, bytes, values) and every difference, for the event log.

    The checkpoint is restored into a third run, of another seed. That may draw from the global
    generators: so the live run is looked at first.
    """
    live = state_of(run)
    other = workload.build(
        workload.load_text(settings.text),
        seed=settings.seed + 1,
        steps=settings.steps,
        size=settings.size,
    )
    try:
        with Checkpointer(settings.store, other.state()) as checkpointer:
            step = checkpointer.restore()
    except EverstepError as error:
        return {"step": None, "tensors": 0, "bytes": 0, "values": 0, "differences": [str(error)]}
    found = state_of(other)
    problems = list(differences(live, found))
    if step != settings.steps:
        problems.insert(0, f"the newest checkpoint is of step {step}, not {settings.steps}")
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in found["tensors"].values()}
    return {
        "step": step,
        "tensors": len(found["tensors"]),
        "bytes": sum(distinct.values()),
        "values": len(dict(flatten("", live))) - len(live["tensors"]),
        "differences": problems[:_LISTED_MAX],
    }


def state_of(run: Run) -> dict[str, Any]:
    """All of a run, copied: tensors, hyperparameters, and what is neither."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in run.optimizer.param_groups
    ]
    tensors = {name: tensor.clone() for name, tensor in live_tensors(run).items()}
    return {"tensors": tensors, "hyperparameters": groups, "objects": live_objects(run)}


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
            yield f"{path}: only in the {'live' if path in one else 'restored'} state"
        elif not _is_same(one[path], other[path]):
            yield f"{path}: {_brief(one[path])} live, {_brief(other[path])} restored"


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
