"""The demo's child process: trains, checkpoints every step, and is killed at any moment.

`python -m everstep.cli.demo.trainer SETTINGS` with the settings as JSON. In the role "reference" it
trains the same run without checkpoints and without interruption, and compares its live state with
the last checkpoint of the run that was killed: both are read from torch's own objects, never
through everstep's walk of a state, so that a mistake in that cannot hide on both.
"""

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep import Checkpointer, EverstepError, Keep, SaveHandle, Spread, Store
from everstep.cli import workload
from everstep.cli.demo.events import Settings, tell
from everstep.cli.workload import Run

THREADS_MAX = 8
_LISTED_MAX = 20
LOOK_S = 0.01
WATCHERS = 8
SPREAD_WINDOW = 4
"""By itself the library would choose one step on a machine that copies this fast."""


def main() -> None:
    """Run one role."""
    settings = Settings(**json.loads(sys.argv[1]))
    tell("imported")
    torch.set_num_threads(min(THREADS_MAX, len(os.sched_getaffinity(0))))
    run = workload.build(
        workload.load_text(), seed=settings.seed, steps=settings.steps, size=settings.size
    )
    tell("built")
    if settings.role == "killed":
        train(run, settings)
    else:
        for step in range(1, settings.steps + 1):
            train_one_step(run, step)
        tell("compared", state=compare(run, settings))


def train(run: Run, settings: Settings) -> None:
    """The run that is killed: goes on from the newest checkpoint, and saves every step."""
    is_spread = settings.strategy == "spread"
    with (
        ThreadPoolExecutor(WATCHERS) as watchers,
        Checkpointer(
            settings.store,
            run.state(),
            every=settings.every,
            strategy=Spread(SPREAD_WINDOW) if is_spread else settings.strategy,
            keep=Keep(last=3),
        ) as checkpointer,
    ):
        start = checkpointer.restore()
        tell("restored", step=start, **replayed(settings, start))
        for step in range(start + 1, settings.steps + 1):
            train_one_step(run, step)
            handle = checkpointer.step(step)
            tell("returned", step=step)
            if handle:
                tell("saving", step=step)
                watchers.submit(watch, handle, settings)
        if settings.steps % settings.every:
            checkpointer.save(settings.steps)  # the last step is compared with the other run's


def train_one_step(run: Run, step: int) -> None:
    """One step, with its phases on record, so that it can be told where a kill has hit."""
    tell("begin", step=step)
    loss = run.train_step(lambda phase: tell(phase, step=step))
    tell("trained", step=step, loss=loss.hex())


def replayed(settings: Settings, step: int) -> dict[str, Any]:
    """The state that a restore began with, and how many records it replayed after that."""
    try:
        chain = Store(settings.store).chain(step)
    except EverstepError:  # nothing yet, or it came from memory only
        return {}
    return {"base": chain[0].step, "records": sum(len(manifest.records) for manifest in chain)}


def watch(handle: SaveHandle, settings: Settings) -> None:
    """Puts on record when a save was copied and when it was durable. In a thread of its own: it
    looks now and then, since to wait for a copy would have it checked."""
    for level in ("captured", handle.durable):
        while level not in handle.times:
            if handle.error:
                return
            time.sleep(LOOK_S)
        if level == "captured":
            tell("captured", step=handle.step, at=handle.times[level])
    kind = None
    with contextlib.suppress(EverstepError):  # it is gone again
        kind = "record" if Store(settings.store).manifest(handle.step).previous else "state"
    tell("durable", step=handle.step, at=handle.times[handle.durable], kind=kind)


# ---- the last checkpoint, and the live state of the other run ------------------------------------


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
    found, nothing = dict(leaves("", state_of(other))), ("nothing", b"")
    problems = [
        f"{path} differs: {live.get(path, nothing)[0]} live, {found.get(path, nothing)[0]} restored"
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


def leaves(path: str, tree: object) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """The leaves of a tree by path: what each is, and its bits, copied; a container has none."""
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


if __name__ == "__main__":
    main()
