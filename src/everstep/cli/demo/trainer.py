"""The demo's child process: trains, checkpoints every step, and is killed at any moment.

`python -m everstep.cli.demo.trainer SETTINGS` with the settings as JSON. In the role "reference" it
trains the same run without checkpoints and without interruption, compares its live state with the
last checkpoint of the run that was killed, and then measures what checkpoints cost.
"""

import sys
import threading
import time
from typing import TYPE_CHECKING

from everstep.cli.demo.events import EventLog, Settings

if TYPE_CHECKING:
    from everstep import SaveHandle
    from everstep.cli.workload import Run

_LEVELS = ("captured", "held", "local")
_LOOK_S = 0.01
BLOCK_STEPS = 5


def main() -> None:
    """Run one role. The start is on record before torch is imported, which takes seconds."""
    settings = Settings.from_json(sys.argv[1])
    log = EventLog(settings.events)
    log.write("start")
    import torch

    import everstep.checkpointer  # noqa: F401
    from everstep.cli import workload

    torch.set_num_threads(settings.threads)
    log.write("imported")
    run = workload.build(
        workload.load_text(settings.text),
        seed=settings.seed,
        steps=settings.steps,
        size=settings.size,
    )
    log.write("built", parameters=sum(p.numel() for p in run.model.parameters()))
    if settings.role == "killed":
        train(run, settings, log)
    else:
        train_reference(run, settings, log)


def train(run: "Run", settings: Settings, log: EventLog) -> None:
    """The run that is killed: goes on from the newest checkpoint, and saves every step."""
    import everstep

    with everstep.Checkpointer(
        settings.store,
        run.state(),
        every=1,
        strategy=settings.strategy,
        keep=everstep.Keep(last=3),
        under_pressure="wait",
    ) as checkpointer:
        start = checkpointer.restore()
        log.write("restored", step=start)
        watcher = Watcher(log)
        for step in range(start + 1, settings.steps + 1):
            held_before_s = checkpointer.metrics.hold_seconds
            train_one_step(run, step, log)
            called = time.perf_counter()
            handle = checkpointer.step(step)
            stall_s = time.perf_counter() - called
            held_s = checkpointer.metrics.hold_seconds - held_before_s
            log.write("returned", step=step, stall_s=stall_s, held_s=held_s)
            watcher.watch(handle)
    watcher.close()
    log.write("finished")


def train_one_step(run: "Run", step: int, log: EventLog) -> None:
    """One step, with its phases on record, so that it can be told where a kill has hit."""
    log.write("begin", step=step)
    loss = run.train_step(lambda phase: log.write(phase, step=step))
    log.write("trained", step=step, loss=loss.hex())


class Watcher:
    """Puts on record when each save reached each level, from a thread that looks now and then."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._open: list[tuple[SaveHandle, set[str]]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def watch(self, handle: "SaveHandle | None") -> None:
        """From now on, this save too."""
        if handle is not None:
            self._open.append((handle, set()))

    def close(self) -> None:
        """Record what is left, and end."""
        self._is_over.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        for entry in list(self._open):
            handle, seen = entry
            for level, at in list(handle.times.items()):
                if level in _LEVELS and level not in seen:
                    seen.add(level)
                    self._log.write(level, step=handle.step, at=at)
            if handle.done():
                self._open.remove(entry)


def train_reference(run: "Run", settings: Settings, log: EventLog) -> None:
    """The run that nothing interrupts, without checkpoints."""
    from everstep.cli.demo import compare

    log.write("restored", step=0)
    for step in range(1, settings.steps + 1):
        train_one_step(run, step, log)
    log.write("compared", **compare.compare(run, settings.store, settings.steps))
    if settings.timed_steps:
        time_checkpoints(run, settings, log)
    log.write("finished")


def time_checkpoints(run: "Run", settings: Settings, log: EventLog) -> None:
    """Blocks of steps without and with a checkpoint each, in the order ABBA: drift cancels out."""
    import everstep

    with everstep.Checkpointer(
        settings.scratch,
        run.state(),
        strategy=settings.strategy,
        keep=everstep.Keep(last=1),
        under_pressure="wait",
    ) as checkpointer:
        step = settings.steps
        for block in range(settings.timed_steps // BLOCK_STEPS):
            checkpoints = block % 4 in (1, 2)
            for index in range(BLOCK_STEPS):
                step += 1
                begun = time.perf_counter()
                run.train_step()
                if checkpoints:
                    checkpointer.step(step)
                seconds = time.perf_counter() - begun
                # The first of a block has no save behind it, or finds the caches of the other kind.
                if index:
                    log.write("timed", block=block, checkpoints=checkpoints, seconds=seconds)
            checkpointer.wait("local")


if __name__ == "__main__":
    main()
