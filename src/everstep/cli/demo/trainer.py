"""The demo's child process: trains, checkpoints every step, and is killed at any moment.

`python -m everstep.cli.demo.trainer SETTINGS` with the settings as JSON. In the role "reference" it
trains the same run without checkpoints and without interruption, compares its live state with the
last checkpoint of the run that was killed, and then measures what checkpoints cost.
"""

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING

from everstep.cli.demo.events import EventLog, Settings
from everstep.cli.strategies import NO_BASE, WARM_SAVES

if TYPE_CHECKING:
    from everstep import Checkpointer, Log, SaveHandle, Spread
    from everstep.cli.workload import Run

_LEVELS = ("captured", "held", "local")
_LOOK_S = 0.01
BLOCK_STEPS, BASE_BLOCKS = 5, 4


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


def _strategy(settings: Settings, base_every: int | None) -> "str | Spread | Log":
    import everstep

    if settings.strategy == "log":
        return everstep.Log(base_every=base_every)
    if settings.strategy == "spread":
        return everstep.Spread(window=settings.window)
    return settings.strategy


def train(run: "Run", settings: Settings, log: EventLog) -> None:
    """The run that is killed: goes on from the newest checkpoint, and saves every step."""
    import everstep

    run.clip = everstep.clip_grad_norm_  # the run without interruption has torch's own
    with everstep.Checkpointer(
        settings.store,
        run.state(),
        every=settings.every,
        strategy=_strategy(settings, settings.base_every),
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
    if settings.timed_steps:
        time_checkpoints(run, settings, log)
    log.write("finished")


def time_checkpoints(plain: "Run", settings: Settings, log: EventLog) -> None:
    """Blocks of steps without and with checkpoints, in the order ABBA: drift cancels out.

    They are of two runs: updates that no step() follows would all lie in the next record. Of a log
    the records are timed first, then blocks with a base at every step.
    """
    import everstep
    from everstep.cli import workload

    saved = workload.build(
        workload.load_text(settings.text),
        seed=settings.seed,
        steps=settings.steps,
        size=settings.size,
    )
    is_log = settings.strategy == "log"
    if settings.strategy != "full":
        saved.clip = everstep.clip_grad_norm_
    with everstep.Checkpointer(
        settings.scratch,
        saved.state(),
        every=settings.every,
        strategy=_strategy(settings, NO_BASE),
        keep=everstep.Keep(last=1),
    ) as checkpointer:
        block_steps = -(-BLOCK_STEPS // settings.every) * settings.every
        timing = Timing(plain, saved, checkpointer, is_log, block_steps, log)
        timing.warm_up()
        blocks = settings.timed_steps // BLOCK_STEPS
        timing.blocks(0, blocks, "record" if is_log else "state")
        if is_log:
            timing.blocks(blocks, blocks + BASE_BLOCKS, "state")


class Timing:
    """Steps of two runs in turn: one by itself, one with a checkpoint at each."""

    def __init__(
        self,
        plain: "Run",
        saved: "Run",
        checkpointer: "Checkpointer",
        is_log: bool,
        block_steps: int,
        log: EventLog,
    ) -> None:
        self._plain, self._saved = plain, saved
        self._checkpointer = checkpointer
        self._is_log = is_log
        self._block_steps = block_steps
        # Whole blocks, so that the same steps of each block are due.
        self._warm_steps = -(-WARM_SAVES // block_steps) * block_steps
        self._log = log
        self._step = 0

    def warm_up(self) -> None:
        """What is done for the first time takes longer."""
        for _ in range(self._warm_steps):
            self._one("record")
            self._one("none")
        self._checkpointer.wait("local")

    def blocks(self, first: int, end: int, kind: str) -> None:
        """Blocks of these numbers, the two middle ones of each four with checkpoints."""
        for block in range(first, end):
            here = kind if (block - first) % 4 in (1, 2) else "none"
            for index in range(self._block_steps):
                begun = time.perf_counter()
                self._one(here)
                seconds = time.perf_counter() - begun
                # The first of a block has no save behind it, or finds the caches of the other kind.
                if index:
                    self._log.write("timed", block=block, kind=here, seconds=seconds)
            self._checkpointer.wait("local")

    def _one(self, kind: str) -> None:
        """A step; "state" is a whole one, of which only a tag makes sure under `log`."""
        if kind == "none":
            self._plain.train_step()
            return
        self._step += 1
        self._saved.train_step()
        if kind == "state" and self._is_log:
            self._checkpointer.save(self._step, tag="base")
        else:
            self._checkpointer.step(self._step)


if __name__ == "__main__":
    main()
