"""How each contender saves and restores a run, behind the same few methods.

Each is used as its documentation shows and, where it has one, in its faster way on this kind of
machine. Each lives in processes of its own and imports its library there, so that none pays for
another's modules.
"""

import contextlib
import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

import everstep
from benchmarks.machine import filled_buffer, plain_read
from everstep.cli.workload import Run


@dataclass(frozen=True, slots=True)
class Finished:
    """A save that is finished in the contender's own sense. Times are of time.perf_counter."""

    at: float
    held_at: float | None = None
    """Of everstep: from then on the death of the trainer does no harm."""
    bytes: int | None = None


Finish = Callable[[], Finished]
"""Blocks until a save is finished."""

NO_BASE = 1000
"""Records between bases where none is to fall into what is timed."""


class Directory:
    """A contender whose saves are directories, or files, named by their step. By itself it saves
    nothing, and is what all others are compared with."""

    def __init__(self, run: Run, root: Path, every: int) -> None:
        self.run = run
        self.root = root
        self.every = every

    def open(self) -> int:
        """Get ready to save, and return the step from which the run goes on."""
        return 0

    def begin_block(self) -> None:
        """Prepare for some timed steps; the next save is not timed."""

    def step(self, step: int, due: bool) -> Finish | None:
        """What a training loop calls after each update. Returns how to wait for the end of the
        save; None where none was due, or it is finished already."""

    def settle(self) -> None:
        """Block until nothing is in flight."""

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        """What restores `step` into a run; it is made off the clock and called on it."""
        raise NotImplementedError

    def path(self, step: int) -> Path:
        """Where a step is saved."""
        return self.root / f"{step:08d}"

    def files(self, step: int) -> list[Path]:
        """The files of a finished save."""
        path = self.path(step)
        return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]

    def discard(self, steps: Iterable[int]) -> None:
        """Delete finished saves, off the clock."""
        for step in steps:
            if self.path(step).is_dir():
                shutil.rmtree(self.path(step))
            else:
                self.path(step).unlink(missing_ok=True)

    def close(self) -> None:
        """Release processes and threads."""


class PlainWrite(Directory):
    """The floor: a process beside the trainer writes as many bytes. No copy, digest or commit."""

    def open(self) -> int:
        command = [sys.executable, "-P", "-m", "benchmarks.machine", str(state_bytes(self.run))]
        self._writer = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
        self._watcher = ThreadPoolExecutor(1, "watch")
        self._wait()
        return 0

    def step(self, step: int, due: bool) -> Finish | None:
        if not due:
            return None
        print(self.path(step), file=self._writer.stdin, flush=True)
        return finish_of(self._watcher.submit(self._wait))

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        buffer = filled_buffer(self.path(step).stat().st_size)
        return lambda: plain_read(self.path(step), buffer)

    def close(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.communicate()
            self._watcher.shutdown()

    def _wait(self) -> None:
        assert self._writer.stdout
        if not self._writer.stdout.readline():
            raise RuntimeError("the process of the plain writes has ended")


class Everstep(Directory):
    """everstep.Checkpointer, `step` after each update. Few checkpoints are kept: deletes count.

    Each block of a log without bases begins with a base, and no other comes: then its records are
    alike, and those before are deleted.
    """

    def __init__(
        self,
        run: Run,
        root: Path,
        every: int,
        strategy: str,
        base_every: int = NO_BASE,
        when_full: str = "wait",
        keep: int = 2,
    ) -> None:
        super().__init__(run, root, every)
        self._when_full, self._keep = when_full, keep
        if strategy == "log":
            run.clip = everstep.clip_grad_norm_
        self._strategy = strategy
        self._base_every = base_every if strategy == "log" else 0
        self._wants_base = False
        self._checkpointer: everstep.Checkpointer | None = None

    def open(self) -> int:
        self._checkpointer = checkpointer_of(
            self.run,
            self.root,
            self.every,
            self._strategy,
            self._base_every,
            self._keep,
            self._when_full,
        )
        return self._checkpointer.restore()

    def begin_block(self) -> None:
        self._wants_base = self._base_every == NO_BASE

    def step(self, step: int, due: bool) -> Finish | None:
        assert self._checkpointer, "it was opened"
        if self._wants_base:
            self._wants_base = False
            base = self._checkpointer.save(step, tag="base")  # what is tagged is a whole state
            return lambda: _reached(base)
        handle = self._checkpointer.step(step)
        return (lambda: _reached(handle)) if handle else None

    def settle(self) -> None:
        assert self._checkpointer, "it was opened"
        self._checkpointer.wait("local")

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        assert self._checkpointer is None, "a process restores or saves"
        checkpointer = self._checkpointer = checkpointer_of(run, self.root, 1, self._strategy)
        return lambda: checkpointer.restore(step)

    def files(self, step: int) -> list[Path]:
        """Without the manifest, which is small."""
        store = everstep.Store(self.root)
        return [self.root / link.path for link in store.manifest(step).files]

    def discard(self, steps: Iterable[int]) -> None:
        """It deletes by itself."""

    def close(self) -> None:
        if self._checkpointer:
            self._checkpointer.close()


def checkpointer_of(
    run: Run,
    root: Path,
    every: int,
    strategy: str,
    base_every: int = NO_BASE,
    keep: int | None = None,
    when_full: str = "wait",
) -> everstep.Checkpointer:
    """A Checkpointer of the everstep that is imported, which may be one of before options were
    classes: `--against` measures old code beside new."""
    known = inspect.signature(everstep.Checkpointer).parameters
    by_rank = {"loader": "replicate"} if torch.distributed.is_initialized() else None
    options: dict[str, Any] = {"every": every, "strategy": strategy}
    if strategy == "log" and hasattr(everstep, "Log"):
        options["strategy"] = everstep.Log(base_every=base_every)
    elif strategy == "log":
        options["base_every"] = base_every
    elif strategy != "auto" and hasattr(everstep, strategy.title()):
        options["strategy"] = getattr(everstep, strategy.title())()
    options["when_full" if "when_full" in known else "under_pressure"] = when_full
    if by_rank:
        is_new = "ranks" in known
        options |= {"ranks": everstep.Ranks(by_rank=by_rank)} if is_new else {"by_rank": by_rank}
    if keep:
        options["keep"] = everstep.Keep(last=keep)
    return everstep.Checkpointer(root, run.state(), **options)


def _reached(handle: everstep.SaveHandle) -> Finished:
    handle.wait("local")  # times are of time.monotonic, which is time.perf_counter on Linux
    return Finished(handle.times["local"], handle.times["held"], handle.bytes)


class TorchSave(Directory):
    """torch.save, fsync, rename, fsync of the directory."""

    def step(self, step: int, due: bool) -> Finish | None:
        if due:
            draft = self.root / "draft"
            with draft.open("wb") as file:
                torch.save(snapshot(self.run), file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path(step))
            sync_directory(self.root)
        return None

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        path = self.path(step)
        return lambda: place(run, torch.load(path, weights_only=True), model_is_in_place=False)


class Dcp(Directory):
    """torch.distributed.checkpoint.save, one file per rank; it fsyncs what it has flushed."""

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(run, root, every)
        import torch.distributed.checkpoint

        self._dcp: Any = torch.distributed.checkpoint
        self._is_alone = not torch.distributed.is_initialized()

    def step(self, step: int, due: bool) -> Finish | None:
        if due:
            writer = self._dcp.FileSystemWriter(self.path(step))
            self._dcp.save(snapshot(self.run), storage_writer=writer, no_dist=self._is_alone)
        return None

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        def read() -> None:
            prime(run.optimizer)  # it loads into tensors, which a fresh optimizer does not have
            state = snapshot(run)
            source = self._dcp.FileSystemReader(self.path(step))
            self._dcp.load(state, storage_reader=source, no_dist=self._is_alone)
            place(run, state, model_is_in_place=True)

        return read


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save by a thread.

    Its staging buffers are kept and filled by another thread, which is faster than its default (a
    blocking copy into fresh memory): the update waits for the staging, a save for the last upload.
    On a GPU they are pinned. Its copies run on a stream that does not wait for the one that trains:
    that one has to be done.
    """

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(run, root, every)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._is_cuda = next(run.model.parameters()).is_cuda
        options = StagingOptions(
            use_pinned_memory=self._is_cuda,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=self._is_cuda,
        )
        self._stager = DefaultStager(options)
        # Of ranks, the thread that saves has collectives of its own: in a group of its own, then.
        self._group = None if self._is_alone else torch.distributed.new_group(backend="gloo")
        self._staging: Future[Any] | None = None
        self._upload: Future[Any] | None = None
        run.optimizer.register_step_pre_hook(self._before_update)

    def step(self, step: int, due: bool) -> Finish | None:
        if not due:
            return None
        if self._upload:
            self._upload.result()
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()
        response = self._dcp.async_save(
            snapshot(self.run),
            storage_writer=self._dcp.FileSystemWriter(self.path(step)),
            async_stager=self._stager,
            process_group=self._group,
            no_dist=self._is_alone,
        )
        self._staging, self._upload = response.staging_completion, response.upload_completion
        return finish_of(response.upload_completion)

    def close(self) -> None:
        self._stager.close()

    def _before_update(self, *_: Any) -> None:
        if self._staging:
            self._staging.result()


class Torchsnapshot(Directory):
    """torchsnapshot.Snapshot.async_take; a save waits for the one before."""

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(run, root, every)
        import torchsnapshot

        self._library = torchsnapshot
        self._application = self._application_of(run)
        self._pending: Any = None
        self._watcher = ThreadPoolExecutor(1, "watch")

    def step(self, step: int, due: bool) -> Finish | None:
        if not due:
            return None
        if self._pending:
            self._pending.wait()
        path = str(self.path(step))
        self._pending = self._library.Snapshot.async_take(path, self._application)
        return finish_of(self._watcher.submit(self._pending.wait))

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        application = self._application_of(run)
        path = str(self.path(step))
        return lambda: self._library.Snapshot(path).restore(application)

    def close(self) -> None:
        self._watcher.shutdown()

    def _application_of(self, run: Run) -> dict[str, Any]:
        note, rng = self._library.StateDict(**run.note), self._library.RNGState()
        return {**run.state(), "note": note, "rng": rng}


class TorchCheckpointing(Directory):
    """torch_checkpointing.CheckpointManager: staged in shared memory, written by its own process.

    `lock()` is held around the update, as its guide says. Direct I/O is off: ext4 and xfs refuse
    the unaligned writes of its default. It does not fsync.
    """

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(run, root, every)
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        # Without one, ranks save as they do on GPUs, but are loaded by as many again only.
        reshards = torch.distributed.is_initialized() and torch.cuda.is_available()
        item = ItemSpec(resharder=DefaultResharder() if reshards else None)
        config = CheckpointManager.Config(storage_config=storage, default=item)
        self._manager = CheckpointManager(config)
        self._held = contextlib.ExitStack()
        run.optimizer.register_step_pre_hook(self._before_update)
        run.optimizer.register_step_post_hook(lambda *_: self._held.close())

    def step(self, step: int, due: bool) -> Finish | None:
        if not due:
            return None
        return finish_of(self._manager.save(str(self.path(step)), snapshot(self.run)))

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        def read() -> None:
            into = {**dict.fromkeys(snapshot(run)), "model": run.model.state_dict()}
            if torch.distributed.is_initialized():  # shards are moved into what is there
                prime(run.optimizer)
                into = snapshot(run)
            loaded = self._manager.load(str(self.path(step)), into=into)
            place(run, dict(loaded), model_is_in_place=True)

        return read

    def close(self) -> None:
        self._manager.close()

    def _before_update(self, *_: Any) -> None:
        self._held.enter_context(self._manager.lock())


KINDS: dict[str, type[Directory]] = {
    "none": Directory,
    "plain": PlainWrite,
    "everstep": Everstep,
    "torch.save": TorchSave,
    "dcp": Dcp,
    "dcp-async": DcpAsync,
    "torchsnapshot": Torchsnapshot,
    "torch_checkpointing": TorchCheckpointing,
}


def snapshot(run: Run) -> dict[str, Any]:
    """What a peer that takes dictionaries is given: the same as everstep captures."""
    return {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "loader": run.loader.state_dict(),
        "note": run.note,
        "rng": torch.get_rng_state(),
        **({"cuda": torch.cuda.get_rng_state()} if run.device.type == "cuda" else {}),
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
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Make a fresh optimizer's state exist, as torch does: an update with zero gradients."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def digest(run: Run, *, with_generators: bool = True) -> str:
    """One digest of what must come back: model, optimizer, its rate, loader, torch's generators (of
    which another number of ranks has others). Of a sharded run: of the whole tensors, on each rank;
    all ranks have to call it."""
    hasher = xxhash.xxh3_128(repr(run.scheduler.get_last_lr()).encode())
    tensors = {**run.model.state_dict(), **run.loader.state_dict()}
    tensors.pop("batches_read", None)  # code of before has it
    if with_generators:
        tensors["rng"] = torch.get_rng_state()
    if with_generators and run.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state()
    for index, held in run.optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{key}": value for key, value in sorted(held.items())}
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor"):  # of a DTensor
            tensor = tensor.full_tensor()
        hasher.update(name.encode())
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return hasher.hexdigest()


def state_bytes(run: Run) -> int:
    """Bytes of the weights and of AdamW's two moments; all else is small."""
    return 3 * sum(parameter.nbytes for parameter in run.model.parameters())


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

    def finish() -> Finished:
        future.result()
        while not ended:  # callbacks come just after the result
            time.sleep(0.0001)
        return Finished(ended[0])

    return finish
