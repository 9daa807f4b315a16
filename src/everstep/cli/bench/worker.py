"""A process of the bench: one contender with its own model, driven over a pipe by the parent.

Requests and replies are lines of JSON; between them the process sleeps, so that at any moment only
one contender runs. Standard output belongs to the replies: whatever else prints there is sent to
standard error, which the parent keeps as this worker's log.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.cli import workload
from everstep.cli.bench import tensors
from everstep.cli.bench.checks import chill, digest
from everstep.cli.bench.contenders import OWN, Contender, Finish, Saver, state_bytes, sync_directory
from everstep.cli.bench.machine import ProcessorWatch
from everstep.cli.bench.peers import PEERS
from everstep.cli.bench.plan import CONTENDERS

RUN_STEPS = 1000


@dataclass(slots=True)
class Call:
    """One call after an update. Times are of `time.perf_counter`."""

    step: int
    due: bool
    began: float
    returned: float
    finish: Finish | None

    @property
    def stall_s(self) -> float:
        """How long the training loop stood in the call."""
        return self.returned - self.began

    def wait(self) -> float:
        """Block until the save is finished; the seconds since the call began."""
        end = self.finish() if self.finish else self.returned
        return end - self.began


class Worker:
    """One contender, its run, and the number of the last step."""

    def __init__(self, name: str, root: Path, text: bytes, size: workload.Size, every: int) -> None:
        self._name = name
        self._root = root
        self._text = text
        self._size = size
        self._every = every
        self._step = 0
        self._kept = 0
        self._each_prepared = False

    def warm_up(self) -> dict[str, Any]:
        """Build the run; then steps and saves off the clock: they fill buffers, start processes,
        build plans."""
        self._run = self._build(seed=1)
        self._run.train_step()
        self._contender = self._make(self._run)
        saves = CONTENDERS[self._name].warm_saves
        if self._every == 1:
            self.block(int(self._name != "none"), saves - 1, 1)
        else:
            for _ in range(saves):
                self._drop([self._save_alone()])
        return {"state_bytes": state_bytes(self._run)}

    def block(self, every: int, steps: int, lead: int, bases: bool = False) -> dict[str, Any]:
        """Train `lead` (at least one) untimed and `steps` timed steps, saving where due; let the
        saves finish.

        Processor time is that of the trainer and of all that works for it, from when the first step
        and its save are over (a log's base) until all other saves of the block are finished: so no
        save counts in part, and untimed steps count as well. `bases`: each save is prepared for,
        which makes a log write a base.
        """
        self._contender.prepare()
        self._each_prepared = bases
        first = self._next_due(max(1, every), lead)
        early = [self._one(first - lead, every)]
        early[0].wait()
        watch = ProcessorWatch(str(self._root))
        early += [self._one(number, every) for number in range(first - lead + 1, first)]
        self._line_up()
        began = time.perf_counter()
        calls, ends = [], []
        for number in range(first, first + steps):
            calls.append(self._one(number, every))
            ends.append(time.perf_counter())
        seconds = ends[-1] - began
        self._step = first + steps - 1
        finished = [call.wait() for call in calls if call.due]
        self._contender.settle()
        processor = watch.seconds()
        self._drop([call for call in early + calls if call.due])
        return {
            "seconds": seconds,
            "step_s": [end - start for start, end in zip([began, *ends], ends, strict=False)],
            "stall_s": [call.stall_s for call in calls if call.due],
            "idle_call_s": [call.stall_s for call in calls if not call.due],
            "finished_s": finished,
            "processor_s": processor,
            "processor_steps": lead - 1 + steps,
        }

    def alone(self) -> dict[str, Any]:
        """One save while no training goes on: how long until it is finished, and durable."""
        call = self._save_alone()
        reply = self._measured(call)
        self._drop([call])
        return reply

    def keep_one(self) -> dict[str, Any]:
        """Save a last time and keep it for the restores; its state is what they must give back."""
        self._contender.prepare()
        for _ in range(CONTENDERS[self._name].saves_before_kept):
            self._drop([self._save_alone()])
        call = self._save_alone()
        reply = self._measured(call)
        self._kept, self._expected = call.step, self._digest(self._run)
        return reply

    def restore(self) -> dict[str, Any]:
        """Restore the kept save into a fresh run from a cold cache, and compare."""
        return self._restore(self._saver, self._kept, self._expected)

    def tensors(self, count: int, saves: int) -> dict[str, Any]:
        """The section about a model of many small tensors; see tensors.py."""
        return tensors.measure(self._root / "tensors", count, saves)

    def close(self) -> dict[str, Any]:
        """End the contender's processes."""
        self._contender.close()
        return {}

    def _restore(self, saver: Saver, step: int, expected: str) -> dict[str, Any]:
        run = self._build(seed=2)
        read = saver.reader(run, step)
        cache = chill(self._root)
        self._line_up()
        began = time.perf_counter()
        read()
        seconds = time.perf_counter() - began
        equal = self._name == "plain" or self._digest(run) == expected
        return {"seconds": seconds, "equal": equal, "cache": cache}

    def _build(self, seed: int) -> workload.Run:
        return workload.build(self._text, seed=seed, steps=RUN_STEPS, size=self._size)

    def _make(self, run: workload.Run) -> Contender:
        return {**OWN, **PEERS}[self._name](run, self._root, self._every)

    def _digest(self, run: workload.Run) -> str:
        return digest(run)

    def _line_up(self) -> None:
        """Wait for the other ranks, where there are some."""

    @property
    def _saver(self) -> Saver:
        assert isinstance(self._contender, Saver), f"{self._name} saves nothing to look at"
        return self._contender

    def _one(self, number: int, every: int) -> Call:
        if self._each_prepared:
            self._contender.prepare()
        self._run.train_step()
        return self._call(number, bool(every) and number % every == 0)

    def _call(self, number: int, due: bool) -> Call:
        began = time.perf_counter()
        finish = self._contender.step(number, due)
        return Call(number, due, began, time.perf_counter(), finish)

    def _save_alone(self) -> Call:
        self._step = self._next_due(self._every, 0)
        self._run.train_step()
        self._line_up()
        call = self._call(self._step, due=True)
        call.wait()
        return call

    def _next_due(self, every: int, lead: int) -> int:
        """The first step that is due, with `lead` steps between it and the last."""
        return -(-(self._step + lead + 1) // every) * every

    def _measured(self, call: Call) -> dict[str, Any]:
        finished = call.wait()
        self._line_up()
        files = self._saver.files(call.step)
        began = time.perf_counter()
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        for directory in {path.parent for path in files} | {self._root}:
            sync_directory(directory)
        synced = time.perf_counter() - began
        return {
            "stall_s": call.stall_s,
            "finished_s": finished,
            "extra_sync_s": synced,
            "bytes": sum(path.stat().st_size for path in files),
            "files": len(files),
        }

    def _drop(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call.wait()
        self._contender.discard([call.step for call in calls])


def serve(make: Callable[..., object] = Worker) -> None:
    """Serve requests with what `make` makes, until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    text = workload.load_text(settings.pop("text"))
    root = Path(settings.pop("root"))
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = worker or make(root=root, text=text, **settings)
            reply = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001  whatever it is, the other contenders go on
            traceback.print_exc()
            reply = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    serve()
