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

Leaf = tuple[str, bytes]
"""A value's type (of a tensor also dtype and shape), and its bits."""


def compare(run: Run, settings: Settings) -> dict[str, Any]:
    """What was compared (tensors, bytes, values) and every difference, for the event log.

    The checkpoint is restored into a third run, of another seed. That may draw from the global
    generators: so the live run is looked at first.
    """
    live = dict(leaves("", state_of(run)))
    other = workload.build(
        workload.load_text(), seed=settings.seed + 1, steps=settings.steps, size=settings.size
    )
    try:
        with Checkpointer(settings.store, other.state()) as checkpointer:
            step = checkpointer.restore()
    except EverstepError as error:
        return {"step": None, "tensors": 0, "bytes": 0, "values": 0, "differences": [str(error)]}
    found = dict(leaves("", state_of(other)))
    problems = [
        f"{path}: {_what(live, path)} live, {_what(found, path)} restored"
        for path in sorted(live.keys() | found.keys())
        if live.get(path) != found.get(path)
    ]
    if step != settings.steps:
        problems.insert(0, f"the newest checkpoint is of step {step}, not {settings.steps}")
    tensors = [bits for kind, bits in found.values() if kind.startswith("torch.")]
    return {
        "step": step,
        "tensors": len(tensors),
        "bytes": sum(map(len, tensors)),
        "values": len(found) - len(tensors),
        "differences": problems[:_LISTED_MAX],
    }


def state_of(run: Run) -> dict[str, Any]:
    """All that a checkpoint of a run has to bring back; tied weights once."""
    return {
        "model": dict([*run.model.named_parameters(), *run.model.named_buffers()]),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "loader": run.loader.state_dict(),
        "note": run.note,
        "python": repr(random.getstate()),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
    }


def leaves(path: str, tree: object) -> Iterator[tuple[str, Leaf]]:
    """The leaves of a tree by path, copied; a container is one too, without bits."""
    kind = type(tree).__name__
    if isinstance(tree, dict | list | tuple):
        yield path, (kind, b"")
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, item in items:
            yield from leaves(f"{path}.{key}" if path else str(key), item)
    elif isinstance(tree, Tensor):
        flat = tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield path, (f"{tree.dtype}{list(tree.shape)}", flat.numpy().tobytes())
    elif isinstance(tree, np.ndarray):
        yield path, (f"numpy {tree.dtype}{list(tree.shape)}", tree.tobytes())
    else:
        yield path, (kind, (tree.hex() if isinstance(tree, float) else repr(tree)).encode())


def _what(side: dict[str, Leaf], path: str) -> str:
    """As "torch.float32[2, 2] of 0000803f…", or "nothing"."""
    if path not in side:
        return "nothing"
    kind, bits = side[path]
    text = bits.hex() if "[" in kind else bits.decode()
    return f"{kind} of {text if len(text) <= 32 else text[:32] + '…'}"
