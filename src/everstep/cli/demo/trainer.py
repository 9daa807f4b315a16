"""The demo's child process: trains, checkpoints every step, and is killed at any moment.

`python -m everstep.cli.demo.trainer SETTINGS` with the settings as JSON. In the role "reference" it
trains the same run without checkpoints and without interruption, and compares its live state with
the last checkpoint of the run that was killed.
"""

import contextlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import everstep
from everstep import EverstepError, SaveHandle, Store
from everstep.cli import workload
from everstep.cli.demo.compare import compare
from everstep.cli.demo.events import Settings, tell
from everstep.cli.workload import Run

THREADS_MAX = 8
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
        everstep.Checkpointer(
            settings.store,
            run.state(),
            every=settings.every,
            strategy=everstep.Spread(SPREAD_WINDOW) if is_spread else settings.strategy,
            keep=everstep.Keep(last=3),
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


if __name__ == "__main__":
    main()
