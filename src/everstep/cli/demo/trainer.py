"""The demo's child process: trains, checkpoints every step, and is killed at any moment.

`python -m everstep.cli.demo.trainer SETTINGS` with the settings as JSON. In the role "reference" it
trains the same run without checkpoints and without interruption, and compares its live state with
the last checkpoint of the run that was killed.
"""

import contextlib
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
SPREAD_WINDOW = 4
"""By itself the library would choose one step on a machine that copies this fast."""


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

    run.clip = everstep.clip_grad_norm_  # the run without interruption has torch's own
    is_spread = settings.strategy == "spread"
    with everstep.Checkpointer(
        settings.store,
        run.state(),
        every=settings.every,
        strategy=everstep.Spread(SPREAD_WINDOW) if is_spread else settings.strategy,
        keep=everstep.Keep(last=3),
    ) as checkpointer:
        start = checkpointer.restore()
        log.write("restored", step=start)
        watcher = Watcher(log, settings, start)
        for step in range(start + 1, settings.steps + 1):
            held_before_s = checkpointer.metrics.hold_seconds
            train_one_step(run, step, log)
            called = time.perf_counter()
            handle = checkpointer.step(step)
            stall_s = time.perf_counter() - called
            held_s = checkpointer.metrics.hold_seconds - held_before_s
            due = handle is not None
            log.write("returned", step=step, stall_s=stall_s, held_s=held_s, due=due)
            watcher.watch(handle)
        if settings.steps % settings.every:
            checkpointer.save(settings.steps)  # the last step is compared with the other run's
    watcher.close()
    log.write("finished")


def train_one_step(run: "Run", step: int, log: EventLog) -> None:
    """One step, with its phases on record, so that it can be told where a kill has hit."""
    log.write("begin", step=step)
    loss = run.train_step(lambda phase: log.write(phase, step=step))
    log.write("trained", step=step, loss=loss.hex())


class Watcher:
    """Puts on record what was replayed, and when each save reached each level, and as what; from a
    thread that looks now and then."""

    def __init__(self, log: EventLog, settings: Settings, start: int) -> None:
        """`start`: the step that was restored."""
        self._log = log
        self._settings = settings
        self._start = start
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
        self._note_replay()
        while not self._is_over.wait(_LOOK_S):
            self._look()

    def _note_replay(self) -> None:
        from everstep import EverstepError, Store

        with contextlib.suppress(EverstepError):  # nothing yet, or it came from memory only
            chain = Store(self._settings.store).chain(self._start)
            records = sum(len(manifest.records) for manifest in chain)
            self._log.write("replayed", step=self._start, base=chain[0].step, records=records)

    def _look(self) -> None:
        for entry in list(self._open):
            handle, seen = entry
            for level, at in list(handle.times.items()):
                if level in _LEVELS and level not in seen:
                    seen.add(level)
                    more = self._kind(handle.step) if level == "local" else {}
                    self._log.write(level, step=handle.step, at=at, **more)
            if handle.done():
                self._open.remove(entry)

    def _kind(self, step: int) -> dict[str, object]:
        """What was committed for a step, and its bytes; nothing where it is gone again."""
        from everstep import EverstepError, Store

        try:
            manifest = Store(self._settings.store).manifest(step)
        except EverstepError:
            return {}
        return {"kind": "record" if manifest.previous else "state", "bytes": manifest.size}


def train_reference(run: "Run", settings: Settings, log: EventLog) -> None:
    """The run that nothing interrupts, without checkpoints."""
    from everstep.cli.demo import compare

    log.write("restored", step=0)
    for step in range(1, settings.steps + 1):
        train_one_step(run, step, log)
    log.write("compared", **compare.compare(run, settings))
    log.write("finished")


if __name__ == "__main__":
    main()
