"""What the bench measures, behind the same few methods; the peers themselves are in `peers`.

Each is used as its documentation shows and, where it has one, in its faster way on this kind of
machine. Each lives in a process of its own and imports its library there, so that none pays for
another's modules.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from everstep import Checkpointer, Keep, SaveHandle, Store, clip_grad_norm_
from everstep.cli.bench.floors import filled_buffer, page_multiple, plain_read
from everstep.cli.bench.machine import await_end_of
from everstep.cli.strategies import NO_BASE, Strategy
from everstep.cli.workload import Run
from everstep.store.names import CheckpointName, manifest_path

Finish = Callable[[], float]
"""Blocks until a save is finished, and returns when it was, by time.perf_counter."""


class Contender(Protocol):
    """What is driven: one way to save a run, or the run by itself."""

    def prepare(self) -> None:
        """Before the first step of a block, off the clock."""

    def step(self, step: int, due: bool) -> Finish | None:
        """What a training loop calls after each update.

        Returns how to wait for the end of the save, in the contender's own sense; None where none
        was due, or it is finished already.
        """

    def settle(self) -> None:
        """Block until nothing is under way, of steps for which `step` gave nothing to wait for
        either (a log's records between the saves that are due)."""

    def discard(self, steps: Iterable[int]) -> None:
        """Delete finished saves, off the clock; nothing where the contender does so by itself."""

    def close(self) -> None:
        """Release processes and threads."""


@runtime_checkable
class Saver(Contender, Protocol):
    """A contender that saves; the baseline is none."""

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        """What restores `step` into a run; made off the clock, called on it."""

    def files(self, step: int) -> list[Path]:
        """The files of a finished save."""


Maker = Callable[[Run, Path, int], Contender]
"""Makes a contender for a run, with a directory of its own, and how often saves are due."""


class Directory:
    """Part of a contender whose saves are directories, or files, named by their step."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Nothing to prepare."""

    def path(self, step: int) -> Path:
        """Where a step is saved."""
        return self.root / f"{step:08d}"

    def files(self, step: int) -> list[Path]:
        """The files of a finished save."""
        path = self.path(step)
        return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]

    def settle(self) -> None:
        """Nothing is under way but what `step` told of."""

    def discard(self, steps: Iterable[int]) -> None:
        """Delete finished saves."""
        for step in steps:
            if self.path(step).is_dir():
                shutil.rmtree(self.path(step))
            else:
                self.path(step).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing to release."""


def snapshot(run: Run) -> dict[str, Any]:
    """What a peer that takes dictionaries is given: the same as everstep captures."""
    return {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "loader": run.loader.state_dict(),
        "note": run.note,
        "rng": torch.get_rng_state(),
    }


def place(run: Run, state: dict[str, Any], *, model_is_in_place: bool) -> None:
    """Put what `snapshot` gave back into a run."""
    if not model_is_in_place:
        run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])
    run.loader.load_state_dict(state["loader"])
    run.note.update(state["note"])
    torch.set_rng_state(state["rng"])


def state_bytes(run: Run) -> int:
    """How many bytes of tensors a run's model and optimizer hold; tied weights count once."""
    tensors = [*run.model.state_dict().values()]
    for held in run.optimizer.state_dict()["state"].values():
        tensors += [value for value in held.values() if isinstance(value, torch.Tensor)]
    locals_ = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]  # of a DTensor
    storages = {
        local.untyped_storage().data_ptr(): tensor.nbytes
        for local, tensor in zip(locals_, tensors, strict=True)
    }
    return sum(storages.values())


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def finish_of(future: Future[Any]) -> Finish:
    """The end of a future, noted by the thread that ends it."""
    ended: list[float] = []
    future.add_done_callback(lambda _: ended.append(time.perf_counter()))

    def finish() -> float:
        future.result()
        while not ended:  # callbacks come just after the result
            time.sleep(0.0001)
        return ended[0]

    return finish


class _NoCheckpoints(Directory):
    """The run by itself: what every other one is compared with."""

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(root)

    def step(self, step: int, due: bool) -> Finish | None:
        return None


class _PlainWrite(Directory):
    """The floor: a process beside the trainer writes as many bytes. No copy, digest or commit."""

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(root)
        self._size = page_multiple(state_bytes(run))
        self._watcher = ThreadPoolExecutor(1, "watch")
        self._writer = subprocess.Popen(
            [sys.executable, "-m", "everstep.cli.bench.floors", str(self._size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait()

    def step(self, step: int, due: bool) -> Finish | None:
        if not due:
            return None
        assert self._writer.stdin is not None
        print(self.path(step), file=self._writer.stdin, flush=True)
        return finish_of(self._watcher.submit(self._wait))

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        buffer = filled_buffer(self._size)
        return lambda: plain_read(self.path(step), buffer)

    def close(self) -> None:
        self._writer.communicate()
        self._watcher.shutdown()

    def _wait(self) -> None:
        assert self._writer.stdout is not None
        if not self._writer.stdout.readline():
            raise RuntimeError("the process of the plain writes has ended")


class _Everstep:
    """everstep.Checkpointer, `step` after each update; the two last are kept, its deletes count.

    Of a log each block begins with a base, and no other comes: then its records are alike, and the
    old ones are deleted.
    """

    def __init__(self, strategy: Strategy, run: Run, root: Path, every: int) -> None:
        self._run = run
        self._root = root
        self._strategy = strategy
        self._every = every
        self._wants_base = False
        if strategy == "log":
            run.clip = clip_grad_norm_
        self._checkpointer: Checkpointer | None = None
        self._is_over = False

    def prepare(self) -> None:
        self._wants_base = self._strategy == "log"

    def step(self, step: int, due: bool) -> Finish | None:
        assert not self._is_over, "nothing is saved after a restore"
        if self._checkpointer is None:
            self._checkpointer = self._open(self._run, self._every)
            self._checkpointer.restore()
        if self._wants_base:
            self._wants_base = False
            tagged = self._checkpointer.save(step, tag="base")  # what is tagged is a whole state
            return lambda: _reached_local(tagged)
        handle = self._checkpointer.step(step)
        return (lambda: _reached_local(handle)) if handle else None

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        self.close()  # and with it the keeper, which would serve the restore from its memory
        checkpointer = self._checkpointer = self._open(run, 1)
        return checkpointer.restore

    def files(self, step: int) -> list[Path]:
        manifest = Store(self._root).manifest(step)
        links = [self._root / link.path for link in manifest.files]
        return [*links, self._root / manifest_path(CheckpointName(step, manifest.epoch))]

    def settle(self) -> None:
        if self._checkpointer:
            self._checkpointer.wait("local")

    def discard(self, steps: Iterable[int]) -> None:
        pass

    def close(self) -> None:
        self._is_over = True
        if self._checkpointer:
            self._checkpointer.close()
            self._checkpointer = None
            await_end_of(str(self._root))

    def _open(self, run: Run, every: int) -> Checkpointer:
        return Checkpointer(
            self._root,
            run.state(),
            every=every,
            strategy=self._strategy,
            base_every=NO_BASE if self._strategy == "log" else None,
            keep=Keep(last=2),
            under_pressure="wait",
            by_rank={"loader": "replicate"} if torch.distributed.is_initialized() else None,
        )


def _reached_local(handle: SaveHandle) -> float:
    handle.wait("local")
    return handle.times["local"]  # by time.monotonic, which is time.perf_counter on Linux


OWN: dict[str, Maker] = {
    "none": _NoCheckpoints,
    "plain": _PlainWrite,
    "everstep": partial(_Everstep, "full"),
    "everstep-spread": partial(_Everstep, "spread"),
    "everstep-log": partial(_Everstep, "log"),
}
