"""Lightning: every step is a checkpoint, and fit() goes on by itself, in mid-epoch, exactly.

    from everstep.integrations.lightning import EverstepCallback

    L.Trainer(callbacks=[EverstepCallback("runs/gpt")], ...).fit(model, data)

A step, counted as `trainer.global_step`, is saved after its logging, validation and schedulers, the
last of an epoch after those of the epoch: so a kill skips none of them. What comes back, and what
is not exact: docs/trainers.md; nor is the time of val_check_interval. Tested with lightning 2.6.6.
"""

import builtins
import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from everstep import Checkpointer, EverstepError, Unsupported
from everstep.integrations.loaders import LoaderPosition

_SHOWN = ["_callback_metrics", "_logged_metrics", "_progress_bar_metrics"]
_SHOWN += ["_first_loop_iter", "_current_fx"]
_META = [f.name for f in fields(result._Metadata) if f.name not in ("reduce_fx", "_sync")]
_RUNNING = ("value", "cumulated_batch_size", "has_reset", "_forward_cache", "_update_count")


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


def check(trainer: Any, module: Any) -> None:
    """Raises Unsupported for what has a state that nobody here knows."""
    why = None
    if trainer.overfit_batches or trainer.reload_dataloaders_every_n_epochs:
        why = (
            "with overfit_batches or reload_dataloaders_every_n_epochs the loader is another one "
            "than before. Leave them out"
        )
    elif any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        why = (
            "StochasticWeightAveraging makes a scheduler and an epoch of its own in mid-training. "
            "Take WeightAveraging, whose average comes along"
        )
    elif isinstance(trainer.strategy, DeepSpeedStrategy):
        why = (
            "DeepSpeedStrategy divides the state in its own way. Take DDP, or an engine in a loop "
            "of your own: everstep.integrations.deepspeed"
        )
    elif is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        why = "training_step(dataloader_iter) reads ahead, nobody knows how far. Take a batch"
    if why:
        raise Unsupported(f"training with everstep: {why}")


class TrainerState:
    """What a trainer counts, what its callbacks and modules keep, and what it has logged so far:
    running means of this epoch, and states of torchmetrics, too, which Lightning's own checkpoints
    have not. `own`: the callback that is none of the others."""

    is_by_rank = True

    def __init__(self, trainer: Any, own: Any) -> None:
        self._trainer = trainer
        modules = trainer.lightning_module.named_modules()
        self._metrics = {name: each for name, each in modules if isinstance(each, Metric)}
        self._callbacks = [each for each in trainer.callbacks if each is not own]

    def state_dict(self) -> dict[str, Any]:
        """Between two steps, or two epochs."""
        trainer, extra = self._trainer, dict[str, Any]()
        trainer.lightning_module.on_save_checkpoint(extra)
        fit = trainer.fit_loop
        # The loaders' state is a part by itself.
        loaders, fit._combined_loader = fit._combined_loader, None
        loops = fit.state_dict()
        fit._combined_loader = loaders
        data = trainer.datamodule
        return {
            "loops": loops,
            "should_stop": trainer.should_stop,
            "callbacks": {each.state_key: each.state_dict() for each in self._callbacks},
            "module": extra,
            "data": data.state_dict() if data is not None else {},
            "logged": _logged(trainer, self._metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before fit() asks for the first batch."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        fit.load_state_dict(state["loops"])
        epochs = fit.epoch_progress.current
        if epochs.ready == epochs.completed:  # the next epoch begins as ever
            _Loop.restarting.fset(fit, False)
            fit._loaded_from_state_dict = False
        for loader in fit._data_source.instance.flattened:
            _set_sampler_epoch(loader, epochs.processed)
        trainer.should_stop = state["should_stop"]
        for callback in self._callbacks:
            if callback.state_key in state["callbacks"]:
                _load(callback, state["callbacks"][callback.state_key])
        trainer.lightning_module.on_load_checkpoint(state["module"])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["data"])
        _put_logged(trainer, self._metrics, state["logged"])


def _load(callback: Any, state: dict[str, Any]) -> None:
    callback.load_state_dict(state)
    if isinstance(callback, ModelCheckpoint):  # which leaves some out, and most in a new folder
        vars(callback).update({name: state[name] for name in state if name != "dirpath"})


def _logged(trainer: Any, metrics: dict[str, Any]) -> dict[str, Any]:
    """All of it, as plain values and tensors."""
    results = trainer.fit_loop.epoch_loop._results
    return {
        "shown": {name: getattr(trainer._logger_connector, name) for name in _SHOWN},
        "running": {key: _running(each) for key, each in results.items()},
        "metrics": {
            name: {key: getattr(each, key) for key in [*each._defaults, "_update_count"]}
            for name, each in metrics.items()
        },
    }


def _put_logged(trainer: Any, metrics: dict[str, Any], state: dict[str, Any]) -> None:
    vars(trainer._logger_connector).update(state["shown"])
    for name, metric in metrics.items():
        vars(metric).update(state["metrics"].get(name, {}))
    for key, running in state["running"].items():
        trainer.fit_loop.epoch_loop._results[key] = _result(trainer, running)


def _running(running: Any) -> dict[str, Any]:
    """Sum and count of what self.log() got under one name."""
    meta, reduce = running.meta, running.meta.reduce_fx
    values = {name: getattr(running, name) for name in _RUNNING if hasattr(running, name)}
    return {
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": [reduce in (max, min, sum), reduce.__name__],
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": running.is_tensor,
        "values": values if running.is_tensor else values | {"value": None},
    }


def _result(trainer: Any, running: dict[str, Any]) -> Any:
    is_builtin, name = running["reduce"]
    reduce = getattr(builtins if is_builtin else torch, name)
    meta = result._Metadata(**running["meta"], reduce_fx=reduce)
    meta.sync = result._Sync(fn=trainer.strategy.reduce, **running["sync"])
    made = result._ResultMetric(meta, running["is_tensor"])
    vars(made).update(running["values"])
    if not running["is_tensor"]:
        made.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    return made
