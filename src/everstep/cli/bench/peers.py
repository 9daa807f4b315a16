"""The peers: the other libraries that `everstep bench` measures, each in its own words.

Where a library leaves something to its user (what to wait for before the next save, or before an
update), the code here does what its guide says.
"""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from everstep.cli.bench.contenders import (
    Directory,
    Finish,
    Maker,
    finish_of,
    place,
    snapshot,
    sync_directory,
)
from everstep.cli.workload import Run


class _TorchSave(Directory):
    """torch.save, fsync, rename, fsync of the directory."""

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(root)
        self._run = run

    def step(self, step: int, due: bool) -> Finish | None:
        if due:
            draft = self.root / "draft"
            with draft.open("wb") as file:
                torch.save(snapshot(self._run), file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path(step))
            sync_directory(self.root)
        return None

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        path = self.path(step)
        return lambda: place(run, torch.load(path, weights_only=True), model_is_in_place=False)


class _Dcp(Directory):
    """torch.distributed.checkpoint.save, one file per rank; it fsyncs what it has flushed."""

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(root)
        import torch.distributed.checkpoint

        self._dcp: Any = torch.distributed.checkpoint
        self._run = run
        self._is_alone = not torch.distributed.is_initialized()

    def step(self, step: int, due: bool) -> Finish | None:
        if due:
            writer = self._dcp.FileSystemWriter(self.path(step))
            self._dcp.save(snapshot(self._run), storage_writer=writer, no_dist=self._is_alone)
        return None

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        def read() -> None:
            _prime(run.optimizer)  # it loads into tensors, which a fresh optimizer does not have
            state = snapshot(run)
            source = self._dcp.FileSystemReader(self.path(step))
            self._dcp.load(state, storage_reader=source, no_dist=self._is_alone)
            place(run, state, model_is_in_place=True)

        return read


class _DcpAsync(_Dcp):
    """torch.distributed.checkpoint.async_save by a thread.

    Its staging buffers are kept and filled by another thread, which is faster than its default (a
    blocking copy into fresh memory): the update waits for the staging, a save for the last upload.
    """

    where = "thread"

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(run, root, every)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=self.where == "process",
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)
        self._type = AsyncCheckpointerType(self.where)
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
        response = self._dcp.async_save(
            snapshot(self._run),
            storage_writer=self._dcp.FileSystemWriter(self.path(step)),
            async_stager=self._stager,
            async_checkpointer_type=self._type,
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


class _DcpProcess(_DcpAsync):
    """The same by a process beside each rank; staged in memory that both share."""

    where = "process"


class _Torchsnapshot(Directory):
    """torchsnapshot.Snapshot.take."""

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(root)
        import torchsnapshot

        self._library = torchsnapshot
        self._application = self._application_of(run)

    def step(self, step: int, due: bool) -> Finish | None:
        if due:
            self._library.Snapshot.take(str(self.path(step)), self._application)
        return None

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        application = self._application_of(run)
        path = str(self.path(step))
        return lambda: self._library.Snapshot(path).restore(application)

    def _application_of(self, run: Run) -> dict[str, Any]:
        note, rng = self._library.StateDict(**run.note), self._library.RNGState()
        return {**run.state(), "note": note, "rng": rng}


class _TorchsnapshotAsync(_Torchsnapshot):
    """torchsnapshot.Snapshot.async_take; a save waits for the one before."""

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(run, root, every)
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

    def close(self) -> None:
        self._watcher.shutdown()


class _TorchCheckpointing(Directory):
    """torch_checkpointing.CheckpointManager: staged in shared memory, written by its own process.

    `lock()` is held around the update, as its guide says. Direct I/O is off: ext4 and xfs refuse
    the unaligned writes of its default. It does not fsync.
    """

    def __init__(self, run: Run, root: Path, every: int) -> None:
        super().__init__(root)
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        # Without one, ranks save as they do on GPUs, but are loaded by as many again only.
        self._reshards = torch.distributed.is_initialized() and torch.cuda.is_available()
        item = ItemSpec(resharder=DefaultResharder() if self._reshards else None)
        config = CheckpointManager.Config(storage_config=storage, default=item)
        manager = CheckpointManager(config)
        held = contextlib.ExitStack()
        run.optimizer.register_step_pre_hook(lambda *_: _enter(held, manager.lock()))
        run.optimizer.register_step_post_hook(lambda *_: held.close())
        self._manager = manager
        self._run = run

    def step(self, step: int, due: bool) -> Finish | None:
        if not due:
            return None
        return finish_of(self._manager.save(str(self.path(step)), snapshot(self._run)))

    def reader(self, run: Run, step: int) -> Callable[[], object]:
        def read() -> None:
            into = {**dict.fromkeys(snapshot(run)), "model": run.model.state_dict()}
            if torch.distributed.is_initialized():  # shards are moved into what is there
                _prime(run.optimizer)
                into = snapshot(run)
            loaded = self._manager.load(str(self.path(step)), into=into)
            place(run, dict(loaded), model_is_in_place=True)

        return read

    def close(self) -> None:
        self._manager.close()


def _enter(stack: contextlib.ExitStack, lock: Any) -> None:
    """A step hook that returned something would change the arguments of the step."""
    stack.enter_context(lock)


def _prime(optimizer: torch.optim.Optimizer) -> None:
    """Make a fresh optimizer's state exist, as torch does: an update with zero gradients."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


PEERS: dict[str, Maker] = {
    "torch.save": _TorchSave,
    "dcp": _Dcp,
    "dcp-async": _DcpAsync,
    "torchsnapshot": _Torchsnapshot,
    "torchsnapshot-async": _TorchsnapshotAsync,
    "torch_checkpointing": _TorchCheckpointing,
}
RANKED: dict[str, Maker] = {
    "dcp": _Dcp,
    "dcp-async": _DcpAsync,
    "dcp-process": _DcpProcess,
    "torch_checkpointing": _TorchCheckpointing,
}
"""Of several ranks."""
