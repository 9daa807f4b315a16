"""What a Lightning trainer counts, what its callbacks and modules keep, and what it has logged so
far: running means of this epoch, and states of torchmetrics, too, which Lightning's own checkpoints
have not."""

import builtins
from dataclasses import fields
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from everstep.errors import Unsupported

_SHOWN = ["_callback_metrics", "_logged_metrics", "_progress_bar_metrics"]
_SHOWN += ["_first_loop_iter", "_current_fx"]
_META = [f.name for f in fields(result._Metadata) if f.name not in ("reduce_fx", "_sync")]
_RUNNING = ("value", "cumulated_batch_size", "has_reset", "_forward_cache", "_update_count")


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
    """For the state of a Checkpointer. `own`: the callback that is none of the others."""

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
    """Put it back."""
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
