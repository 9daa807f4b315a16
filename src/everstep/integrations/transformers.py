"""transformers' Trainer: every step is a checkpoint, and train() goes on in mid-epoch, exactly.

    from everstep.integrations.transformers import everstep_trainer

    trainer = everstep_trainer(Trainer)(model=model, args=args, ..., everstep="runs/gpt")
    trainer.train(resume_from_checkpoint=True)

A step is saved after its logging, evaluation and schedulers, the last of an epoch after those of
the epoch: so a kill skips none of them. The Trainer skips what it was trained on in its own way,
with the generators as they were when the epoch began. Not exact: what a data set draws at random
by itself, since it draws nothing for what is skipped. Tested with transformers 5.23.
"""

import logging
import os
from typing import Any

from everstep import Checkpointer, Unsupported
from everstep.integrations.loaders import generators_of, set_generators
from everstep.interchange.sources import COUNTED

log = logging.getLogger("everstep")

_BEST = "best"
_SUMS = ["current_flos", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"]
_SUMS += ["_tr_loss", "_epoch_generators"]
"""Of the Trainer, which begins them anew in each process, or in each epoch."""
_Trainer: Any = object  # what it is, is known at run time only


def everstep_trainer(base: Any) -> Any:
    """Return a subclass of `base` (a Trainer) that checkpoints with everstep and without folders.

    Its constructor takes one more argument. everstep: the store, or a dict of Checkpointer's
    arguments ({"store": "runs/gpt", "every": 10}). Where the Trainer would save (save_strategy),
    the step is saved whatever `every` says; the best one (metric_for_best_model) gets the tag
    "best", which load_best_model_at_end=True restores.

    train(resume_from_checkpoint=True) goes on from the newest checkpoint, or begins where there is
    none; a tag or "step-epoch" goes on from that; a folder of the Trainer's is read by the Trainer.
    Raises Unsupported for DeepSpeed and for a search of hyperparameters.
    """
    return type(f"Everstep{base.__name__}", (_EverstepTrainer, base), {})


class _EverstepTrainer(_Trainer):  # type: ignore[misc]
    """A Trainer that is a part of its own Checkpointer's state (state_dict, load_state_dict)."""

    is_by_rank = True
    everstep_attributes: tuple[str, ...] = ("_metrics", "_total_train_tokens")
    """What a subclass counts beside the Trainer, as plain values; these are TRL's."""

    def __init__(self, *args: Any, everstep: Any, **rest: Any) -> None:
        self._options = everstep if isinstance(everstep, dict) else {"store": everstep}
        self._checkpointer: Any = None
        self._loaded: dict[str, Any] | None = None
        super().__init__(*args, **rest)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *rest: Any) -> Any:
        if trial is not None or self.is_deepspeed_enabled:
            raise Unsupported(
                "training with everstep: a search of hyperparameters, and DeepSpeed within the "
                "Trainer, are not known here. For an engine see everstep.integrations.deepspeed"
            )
        is_path = isinstance(resume_from_checkpoint, (str, os.PathLike))
        folder = is_path and os.path.isdir(resume_from_checkpoint) and resume_from_checkpoint
        self._asked = None if folder else resume_from_checkpoint
        try:
            return super().train(folder or None, trial, *rest)
        finally:
            self._close()

    def get_train_dataloader(self) -> Any:
        self._loader = super().get_train_dataloader()
        return self._loader

    def _init_training_state(self, max_steps: int, per_epoch: int, *rest: Any) -> Any:
        """Prepares for training, too: what is restored has to be there before steps are counted."""
        begin = super()._init_training_state(max_steps, per_epoch, *rest)
        self._steps_per_epoch = per_epoch
        self._prepared = super()._prepare_for_training(max_steps, self._loader, rest[1])
        self._close()  # of a try with a larger batch
        self._loaded, self._must_save = None, False
        self._checkpointer = Checkpointer(**self._options, state=self._parts())
        asked = None if self._asked is True else self._asked
        restored = self._checkpointer.restore(asked) if self._asked else 0
        self._restored_generators, self._saved = generators_of(self._loader), self.state.global_step
        if not restored:
            return begin
        epochs, steps = divmod(self.state.global_step, per_epoch)
        steps = 0 if self.args.ignore_data_skip else steps
        return epochs, steps * self.args.gradient_accumulation_steps

    def _prepare_for_training(self, *_: Any) -> Any:
        return self._prepared

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        parts |= {"trainer": self, "scaler": self.accelerator.scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def _close(self) -> None:
        if self._checkpointer:
            self._checkpointer.close()

    def _run_epoch(self, **arguments: Any) -> None:
        if self._loaded is None:
            self._epoch_generators = generators_of(self._loader)
        else:
            self._go_on(self._loaded)
            arguments["resume_from_checkpoint"] = True
        if not self.control.should_training_stop:
            super()._run_epoch(**arguments)
            self._save()

    def _go_on(self, loaded: dict[str, Any]) -> None:
        """Put what the Trainer has set to 0 since the restore."""
        self._loaded = None
        self.__dict__.update(loaded["sums"])
        self._tr_loss = loaded["sums"]["_tr_loss"].to(self.args.device)
        is_over = self.state.global_step >= self.state.max_steps
        self.control.should_training_stop |= is_over or loaded["was_stopped"]
        if self.state.global_step % self._steps_per_epoch == 0:
            self._epoch_generators = self._restored_generators
        elif not self.args.ignore_data_skip:  # its order and its workers' seeds are drawn anew
            set_generators(self._loader, self._epoch_generators)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint is True:
            set_generators(self._loader, self._restored_generators)
        else:
            super()._load_rng_state(checkpoint)

    def _maybe_log_save_evaluate(self, *args: Any, **rest: Any) -> None:
        """Saves the step, if nothing of it comes any more; at an epoch's end more does."""
        super()._maybe_log_save_evaluate(*args, **rest)
        ends_epoch = self.control.should_epoch_stop or self.control.should_training_stop
        if not ends_epoch and self.state.global_step % self._steps_per_epoch:
            self._save()

    def _save(self) -> None:
        step, history = self.state.global_step, self.state.log_history
        if self._must_save:
            tag = _BEST if self.state.best_global_step == step else None
            self._checkpointer.save(step, tag=tag, metrics=history[-1] if history else None)
        elif step != self._saved:
            self._checkpointer.step(step)
        self._saved, self._must_save = step, False

    def _save_checkpoint(self, *_: Any) -> None:
        self.store_flos()
        self._must_save = True
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = _BEST

    def _load_best_model(self) -> None:
        self._checkpointer.restore(_BEST, only="model")

    def _finalize_training(self, *args: Any) -> Any:
        if self._loaded:  # nothing was left to be trained
            self._go_on(self._loaded)
        return super()._finalize_training(*args)

    def state_dict(self) -> dict[str, Any]:
        was_stopped = self.control.should_training_stop
        return {
            "state": _take(self.state, COUNTED),
            "sums": _take(self, _SUMS),
            "attributes": _take(self, self.everstep_attributes),
            "callbacks": [_state_of(each) for each in self.callback_handler.callbacks],
            "was_stopped": was_stopped and self.state.global_step < self.state.max_steps,
            "steps_per_epoch": self._steps_per_epoch,
        }

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        """Put that back, but for what the Trainer sets to 0 afterwards."""
        self._loaded = loaded
        self.state.__dict__.update(loaded["state"])
        self.__dict__.update(loaded["attributes"])
        rows = zip(self.callback_handler.callbacks, loaded["callbacks"], strict=False)
        for callback, (kind, state) in rows:
            if kind == type(callback).__name__:
                callback.__dict__.update(state)
            else:
                log.warning("there was a %s when this was saved: %r begins anew", kind, callback)
        if loaded["steps_per_epoch"] != self._steps_per_epoch:
            log.warning("an epoch has another number of steps than when this was saved: other data")


def _take(holder: Any, names: Any) -> dict[str, Any]:
    return {name: getattr(holder, name) for name in names if hasattr(holder, name)}


def _state_of(callback: Any) -> list[Any]:
    state = getattr(callback, "state", None)  # of transformers' ExportableState
    return [type(callback).__name__, state()["attributes"] if callable(state) else {}]
