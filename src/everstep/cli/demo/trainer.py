"""The demo's child process: trains, checkpoints every step, and is killed at any moment.

`python -m everstep.cli.demo.trainer SETTINGS` with the settings as JSON. In the role "reference" it
trains the same run without checkpoints and without interruption, and compares its live state with
the last checkpoint of the run that was killed.
"""

import contextlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from everstep.cli.demo.events import Settings, Teller

if TYPE_CHECKING:
    from everstep import SaveHandle
    from everstep.cli.workload import Run

LOOK_S = 0.01
WATCHERS = 8
SPREAD_WINDOW = 4
"""By itself the library would choose one step on a machine that copies this fast."""


def main() -> None:
    """Run one role. The start is on record before torch is imported, which takes seconds."""
    settings = Settings(**json.loads(sys.argv[1]))
    log = Teller()
    log.write("start")
    import torch

    import everstep.checkpointer  # noqa: F401
    from everstep.cli import workload

    torch.set_num_threads(settings.threads)
    log.write("imported")
    run = workload.build(
        workload.load_text(), seed=settings.seed, steps=settings.steps, size=settings.size
    )
    log.write("built", parameters=sum(p.numel() for p in run.model.parameters()))
    if settings.role == "killed":
        train(run, settings, log)
    else:
        train_reference(run, settings, log)
    log.write("finished")


def train(run: "Run", settings: Settings, log: Teller) -> None:
    """The run that is killed: goes on from the newest checkpoint, and saves every step."""
    import everstep

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
        at = time.monotonic()
        log.write("restored", step=start, at=at, **replayed(settings, start))
        for step in range(start + 1, settings.steps + 1):
            train_one_step(run, step, log)
            handle = checkpointer.step(step)
            log.write("returned", step=step, due=handle is not None)
            if handle:
                watchers.submit(watch, handle, settings, log)
        if settings.steps % settings.every:
            checkpointer.save(settings.steps)  # the last step is compared with the other run's


def train_reference(run: "Run", settings: Settings, log: Teller) -> None:
    """The run that nothing interrupts, without checkpoints."""
    from everstep.cli.demo.compare import compare

    for step in range(1, settings.steps + 1):
        train_one_step(run, step, log)
    log.write("compared", **compare(run, settings))


def train_one_step(run: "Run", step: int, log: Teller) -> None:
    """One step, with its phases on record, so that it can be told where a kill has hit."""
    log.write("begin", step=step)
    loss = run.train_step(lambda phase: log.write(phase, step=step))
    log.write("trained", step=step, loss=loss.hex())


def replayed(settings: Settings, step: int) -> dict[str, Any]:
    """The state that a restore began with, and how many records it replayed after that."""
    from everstep import EverstepError, Store

    try:
        chain = Store(settings.store).chain(step)
    except EverstepError:  # nothing yet, or it came from memory only
        return {}
    return {"base": chain[0].step, "records": sum(len(manifest.records) for manifest in chain)}


def watch(handle: "SaveHandle", settings: Settings, log: Teller) -> None:
    """Puts on record when a save was copied and when it was durable. In a thread of its own: it
    looks now and then, since to wait for a copy would have it checked."""
    from everstep import EverstepError, Store

    for name, level in (("captured", "captured"), ("local", settings.level)):
        while level not in handle.times:
            if handle.error:
                return
            time.sleep(LOOK_S)
        facts: dict[str, Any] = {}
        if name == "local":
            with contextlib.suppress(EverstepError):  # it is gone again
                manifest = Store(settings.store).manifest(handle.step)
                kind = "record" if manifest.previous else "state"
                facts = {"kind": kind, "bytes": manifest.size}
        log.write(name, step=handle.step, at=handle.times[level], **facts)


if __name__ == "__main__":
    main()
