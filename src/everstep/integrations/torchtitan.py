"""torchtitan: a checkpoint manager that saves every step; its own config chooses it.

    from everstep.integrations.torchtitan import EverstepCheckpointManager

    def llama3_mine() -> Trainer.Config:
        return Trainer.Config(..., checkpoint=EverstepCheckpointManager.Config())

The store is the folder that the config names; a run goes on from it by itself. What torchtitan's
own manager wrote is taken to start from, and written where it is asked for: docs/trainers.md.
Tested with torchtitan 0.3.
"""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    CheckpointManager,
)
from torchtitan.components.dataloader import ParallelAwareDataloader

from everstep import Checkpointer, Keep, Ranks, Unsupported


class EverstepCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """torchtitan's interface of a checkpoint manager, by a Checkpointer of everstep."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's options. `interval` is everstep's `every`, `keep_latest_k` its `Keep.last`;
        a log keeps in addition what those are rebuilt from."""

        enable: bool = True
        interval: int = 1
        last_save_model_only: bool = False
        strategy: Literal["auto", "full", "spread", "log"] = "auto"
        memory_bytes: int | None = None

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """As BaseCheckpointManager is made. Raises Unsupported, ValueError."""
        self.enable = config.enable
        self.save_future = None
        if not config.enable:
            return
        _check(config, base_folder, model_parts)
        self._config = config
        self._folder = Path(base_folder, config.folder)
        self._titans = partial(
            CheckpointManager,
            # As its class speaks, which pickles: in torchtitan's own checkpoints.
            dataloader=None if dataloader is None else _Speech(dataloader, type(dataloader)),
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            sd_adapter=sd_adapter,
        )
        self._states, own = states, list(optimizers)
        parts = {
            MODEL: _bare(model_parts[0]),
            OPTIMIZER: own[0] if len(own) == 1 else own,  # and not the container: hooks go there
            LR_SCHEDULER: lr_schedulers,
            **states,
        }
        by_rank: dict[str, Any] = dict.fromkeys(states, "replicate")
        if dataloader is not None:
            parts[DATALOADER] = dataloader
            by_rank[DATALOADER] = _own_position(dataloader)
        self._checkpointer = Checkpointer(
            self._folder,
            parts,
            every=config.interval,
            strategy=config.strategy,
            keep=Keep(last=config.keep_latest_k) if config.keep_latest_k else None,
            memory_bytes=config.memory_bytes,
            ranks=Ranks(by_rank=by_rank),
        )
        self._parts = list(parts)

    def _load(self, step: int = -1) -> bool:
        """Restore a step, or for -1 the newest, if there is one; else start from what
        `initial_load_path` names."""
        config = self._config
        if unknown := set(config.exclude_from_loading) - set(self._parts):
            raise ValueError(f"exclude_from_loading: the state has no {sorted(unknown)}")
        left = [name for name in self._parts if name not in config.exclude_from_loading]
        only = left if config.exclude_from_loading else None
        if self._checkpointer.restore(None if step == -1 else step, only=only):
            return True
        path = config.initial_load_path
        if path is None and not config.initial_load_in_hf:
            return False
        if path is not None and Path(path, "everstep.json").is_file():
            only = [MODEL] if config.initial_load_model_only else only
            return self._checkpointer.restore(from_store=path, only=only) > 0
        return bool(self._own_manager(self._folder, load_only=True).load())

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Tell of a step; save it where it is due."""
        config = self._config
        if config.load_only:
            return False
        is_asked = last_step or (curr_step == 1 and config.enable_first_step_checkpoint)
        tell = self._checkpointer.save if is_asked else self._checkpointer.step
        is_saved = tell(curr_step) is not None
        if last_step and config.last_save_model_only:
            beside = self._folder.with_name(f"{self._folder.name}-export")
            self._own_manager(beside, load_only=False).save(curr_step, last_step=True)
        return is_saved

    def _maybe_wait_for_staging(self) -> None:
        """Nothing: a hook on the optimizers holds the update until their tensors are copied."""

    def _wait_for_saving(self) -> None:
        """Never called: there is no `save_future`."""

    def _close(self) -> None:
        """Wait until all is durable. Raises the newest save's error if it was lost."""
        if hasattr(self, "_checkpointer"):  # not where __init__ raised
            self._checkpointer.close()

    def _own_manager(self, folder: Path, *, load_only: bool) -> Any:
        """torchtitan's, with the same options, for what is DCP or Hugging Face."""
        names = [each.name for each in fields(BaseCheckpointManager.Config)]
        options = {name: getattr(self._config, name) for name in names}
        options |= {"folder": str(folder), "load_only": load_only, "keep_latest_k": 0}
        return self._titans(CheckpointManager.Config(**options), states=dict(self._states))


def _check(config: Any, base_folder: str, model_parts: list[Any]) -> None:
    """Raises Unsupported for what has no counterpart."""
    where = "checkpointing by everstep"
    if any("://" in each for each in (base_folder, config.folder)):
        raise Unsupported(f"{where}: {config.folder!r} is remote; a store lies in a directory")
    if len(model_parts) > 1:
        raise Unsupported(
            f"{where}: this rank has {len(model_parts)} stages of the model. Choose a pipeline "
            f"schedule with one for each rank, such as 1F1B"
        )
    if config.create_seed_checkpoint:
        raise Unsupported(
            f"{where}: let torchtitan's manager make the seed, and name it by initial_load_path"
        )


def _bare(module: nn.Module) -> nn.Module:
    """A tree with the same parameters and buffers, and none of the hooks by which a state_dict of
    torchtitan's has others (fused projections, which it gathers and splits). So what is trained is
    what is saved, and no collective is called."""
    bare = nn.Module()
    bare._parameters, bare._buffers = module._parameters, module._buffers
    bare._non_persistent_buffers_set = module._non_persistent_buffers_set
    for name, child in module._modules.items():
        bare.add_module(name, child and _bare(child))
    return bare


def _own_position(dataloader: Any) -> Any:
    """Which position of the data this rank has, as Ranks(by_rank=...) wants it. torchtitan's loader
    pickles its own, which no store of everstep should hold: it says it plainly from now on."""
    if not isinstance(dataloader, ParallelAwareDataloader):
        return "exact"
    vars(dataloader).update(vars(_Speech(dataloader, StatefulDataLoader)))
    return "exact", dataloader.dp_rank, dataloader.dp_world_size


class _Speech:
    """How a loader tells its state and takes it, as one of that class."""

    def __init__(self, dataloader: Any, kind: Any) -> None:
        self.state_dict = partial(kind.state_dict, dataloader)
        self.load_state_dict = partial(kind.load_state_dict, dataloader)
