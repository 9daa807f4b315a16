"""Lightning: every step is a checkpoint, and fit() goes on by itself, in mid-epoch, exactly.

    from everstep.integrations.lightning import EverstepCallback

    L.Trainer(callbacks=[EverstepCallback("runs/gpt")], ...).fit(model, data)

A step, counted as `trainer.global_step`, is saved after its logging, validation and schedulers, the
last of an epoch after those of the epoch: so a kill skips none of them. What comes back: loops and
their counters, the position in the data (torch's DataLoaders and StatefulDataLoaders, any number of
workers), states of callbacks, of the data module and of the module's own on_save_checkpoint(),
averages of weights, running means of what was logged, torchmetrics. Not exact: what
everstep.integrations.loaders tells; names of files that ModelCheckpoint had written before the
kill, and writes again ("-v1"); the time of val_check_interval. Tested with lightning 2.6.6.
"""

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException

from everstep import Checkpointer, EverstepError, Unsupported
from everstep.integrations.lightning_state import TrainerState, check
from everstep.integrations.loaders import LoaderPosition


class EverstepCallback(pl.Callback):  # type: ignore[misc]
    """Restores the newest step when fit() begins, and saves each one that is due.

    also: parts of the state beside the trainer's. options: those of everstep.Checkpointer.
    """

    def __init__(
        self, store: str | os.PathLike[str], *, also: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self._store, self._also, self._options = store, also or {}, options
        self._checkpointer: Checkpointer | None = None
        self._undo: list[tuple[Any, str]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore: before loaders are iterated. Raises Unsupported, and what restore() raises."""
        check(trainer, pl_module)
        self._loaders = _watch(trainer, _loaders_of(trainer))
        optimizers, schedulers = trainer.optimizers, trainer.lr_scheduler_configs
        state = {"model": pl_module, "optimizer": list(optimizers), "loader": self._loaders}
        state["scheduler"] = [config.scheduler for config in schedulers]
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            state["scaler"] = scaler
        self._averaging = [each for each in trainer.callbacks if isinstance(each, WeightAveraging)]
        if self._averaging:
            state["average"] = [each._average_model for each in self._averaging]
        state["trainer"] = TrainerState(trainer, self)
        self._checkpointer = Checkpointer(self._store, state | self._also, **self._options)
        self._saved = self._checkpointer.restore()
        if self._saved and trainer.ckpt_path:
            raise ValueError(
                f"fit(ckpt_path={trainer.ckpt_path!r}): step {self._saved} of {self._store} is "
                f"newer. Leave ckpt_path out, or give another store"
            )
        self._watch_loops(trainer.fit_loop)
        self._limit = trainer.limit_train_batches
        if self._saved:
            trainer.num_sanity_val_steps = 0
            if trainer.fit_loop.done:  # else an iterator would be made, and draw
                trainer.limit_train_batches = 0
                for each in self._averaging:
                    each.on_train_end(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the copies of weights in whose place an average comes."""
        if self._checkpointer and self._averaging:
            with contextlib.suppress(EverstepError):  # told already
                self._checkpointer.wait("captured")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until all is durable, before tensors are moved."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As at the end."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Where nothing was left to be trained."""
        if stage == "fit":
            trainer.limit_train_batches = self._limit
        self._close()

    def _watch_loops(self, fit: Any) -> None:
        """No hook of a callback is called when a step or an epoch is over: after plateau
        schedulers, and before the next batch is loaded."""
        epoch_loop = fit.epoch_loop
        step_ends, epoch_ends = epoch_loop.on_advance_end, fit.on_advance_end
        begins = epoch_loop.reset

        def on_step(fetcher: Any) -> None:
            self._after(fit, lambda: step_ends(fetcher), lambda: not epoch_loop.done)

        def on_epoch() -> None:
            for loader in self._loaders:
                if isinstance(loader, LoaderPosition):  # which is asked for no more
                    loader.is_at_end = True
            self._after(fit, epoch_ends, lambda: True)
            self.on_validation_start(None, None)  # training may be over

        def reset() -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*dataloader is not resumable")
                begins()
            # The validation of a saved step is over, and schedulers go on as ever.
            fit._restarting = epoch_loop._restarting = False

        self._undo = [(fit, "on_advance_end")]
        self._undo += [(epoch_loop, name) for name in ("on_advance_end", "reset")]
        epoch_loop.on_advance_end, fit.on_advance_end, epoch_loop.reset = on_step, on_epoch, reset

    def _after(self, fit: Any, end: Callable[[], None], is_over: Callable[[], bool]) -> None:
        try:
            end()
        except SIGTERMException:
            self._save(fit)
            raise
        if is_over():
            self._save(fit)

    def _save(self, fit: Any) -> None:
        step = fit.epoch_loop.global_step
        if self._checkpointer and step > self._saved:
            self._saved = step
            self._checkpointer.step(step)

    def _close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer:
            for loop, name in self._undo:
                delattr(loop, name)
            self._undo = []
            checkpointer.close()


def _loaders_of(trainer: Any) -> Any:
    """Those for training, as fit() will find them."""
    source = trainer.fit_loop._data_source
    loaders = data_connector._request_dataloader(source)
    if not isinstance(loaders, CombinedLoader):
        loaders = CombinedLoader(loaders, "max_size_cycle")
    stage = TrainerFn.FITTING, RunningStage.TRAINING
    loaders.flattened = [
        data_connector._process_dataloader(trainer, *stage, each) for each in loaders.flattened
    ]
    source.instance = loaders
    return loaders


def _watch(trainer: Any, loaders: Any) -> list[Any]:
    """Where no length is known, Lightning is one batch ahead. Raises Unsupported."""
    lengths = [sized_len(each) or float("inf") for each in loaders.flattened]
    length = min(lengths) if loaders._mode == "min_size" else max(lengths)
    is_known = length < float("inf") or type(trainer.limit_train_batches) is int
    return [_watched(each, 0 if is_known else 1) for each in loaders.flattened]


def _watched(loader: Any, ahead: int) -> Any:
    if isinstance(loader, torch.utils.data.DataLoader):
        return LoaderPosition(loader, ahead)
    if hasattr(loader, "load_state_dict") and not ahead:
        return loader
    raise Unsupported(
        f"training with everstep: nobody knows the position in a {type(loader).__name__}. Give a "
        f"DataLoader, or an object with a length, state_dict() and load_state_dict()"
    )
