"""Compares a stored checkpoint with the live state of another run, byte for byte.

Both sides are read from torch's own objects or from the store, never through everstep's walk of a
state, so that a mistake in that cannot hide on both.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.checkpointer import Checkpointer
from everstep.cli import workload
from everstep.cli.demo.events import Settings
from everstep.cli.workload import Run
from everstep.errors import EverstepError
from everstep.state.objects import decode
from everstep.store.store import Store

_LISTED_MAX = 20


@dataclass(frozen=True, slots=True)
class Stored:
    """The newest checkpoint, as values to compare with those of a live run."""

    step: int
    tensors: dict[str, Tensor]
    objects: object
    hyperparameters: object


def compare(run: Run, settings: Settings) -> dict[str, Any]:
    """What was compared (tensors, bytes, values) and every difference, for the event log.

    A state is read from the store. What is replayed is restored into another run, which may draw
    from the global generators: so what is live is looked at first.
    """
    live = {
        "tensors": live_tensors(run),
        "objects": live_objects(run),
        "hyperparameters": {"optimizer": _hyperparameters(run)},
    }
    try:
        manifest = Store(settings.store).manifest()
        is_replayed = manifest.previous or manifest.is_spread
        stored = (_restored if is_replayed else _read)(settings)
    except EverstepError as error:
        return {"step": None, "tensors": 0, "bytes": 0, "values": 0, "differences": [str(error)]}
    found = {
        "tensors": stored.tensors,
        "objects": stored.objects,
        "hyperparameters": stored.hyperparameters,
    }
    wanted = settings.steps
    problems = []
    if stored.step != wanted:
        problems.append(f"the newest checkpoint is of step {stored.step}, not {wanted}")
    problems += differences(live, found)
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in stored.tensors.values()}
    return {
        "step": stored.step,
        "tensors": len(stored.tensors),
        "bytes": sum(distinct.values()),
        "values": len(dict(flatten("", live))) - len(live["tensors"]),
        "differences": problems[:_LISTED_MAX],
    }


def _read(settings: Settings) -> Stored:
    """A state, read without a model and without anything that restores."""
    store = Store(settings.store)
    manifest, tensors = store.manifest(), store.read()
    of_values: set[str] = set()

    def take(name: str, device: str) -> Tensor:
        of_values.add(name)
        return tensors[name]

    objects = decode(manifest.objects, take)
    hyperparameters = decode(manifest.hyperparameters, take)
    own = {name: tensor for name, tensor in tensors.items() if name not in of_values}
    return Stored(manifest.step, own, objects, hyperparameters)


def _restored(settings: Settings) -> Stored:
    """Replayed by everstep into a run of another seed."""
    run = workload.build(
        workload.load_text(settings.text),
        seed=settings.seed + 1,
        steps=settings.steps,
        size=settings.size,
    )
    with Checkpointer(settings.store, run.state()) as checkpointer:
        step = checkpointer.restore()
    hyperparameters = {"optimizer": _hyperparameters(run)}
    return Stored(step, live_tensors(run), live_objects(run), hyperparameters)


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
