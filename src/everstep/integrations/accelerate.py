"""Accelerate: all that an Accelerator has prepared, as a state for a Checkpointer.

    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    with everstep.Checkpointer("runs/llama", state_of(accelerator)) as checkpointer:
        step = checkpointer.restore()
        for epoch in range(loader.iteration, epochs):  # the epoch that goes on, or comes next
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                if accelerator.sync_gradients:
                    step += 1
                    checkpointer.step(step)

Loaders go on with the next batch, in this epoch and all later ones, whether they are torch's or
StatefulDataLoaders, with any number of workers; nothing is to be chosen (`use_stateful_dataloader`)
or called (`skip_first_batches`). What is not exact is told in everstep.integrations.loaders.
"""

from collections.abc import Iterator
from typing import Any

from everstep.errors import Unsupported
from everstep.integrations.loaders import LoaderPosition, samplers_of


def state_of(accelerator: Any) -> dict[str, Any]:
    """The state of a run: models, optimizers, schedulers, loaders, scaler, what
    register_for_checkpointing() got, and how far accumulation is. Parts of your own may be added.

    Call it once, after the last prepare(), and before loaders are iterated. Raises Unsupported
    where a loader's position could not be known, and for DeepSpeed.
    """
    if accelerator.distributed_type == "DEEPSPEED":
        raise Unsupported(
            "taking an Accelerator's state: DeepSpeed's engine has its own. Take parts(engine) of "
            "everstep.integrations.deepspeed in its place"
        )
    parts = {
        "model": accelerator._models,
        "optimizer": accelerator._optimizers,
        "scheduler": accelerator._schedulers,
        "loader": [_Prepared(loader) for loader in accelerator._dataloaders],
        "custom": accelerator._custom_objects,
        "scaler": [each for each in (accelerator.scaler,) if each is not None],
        "accelerator": [_Accumulation(accelerator)],
    }
    return {
        name: found[0] if len(found) == 1 else list(found)
        for name, found in parts.items()
        if len(found)
    }


class _Accumulation:
    """How many batches were accumulated."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        here = self._accelerator
        return {"step": here.step, "sync_gradients": here.gradient_state.sync_gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that."""
        self._accelerator.step = state["step"]
        self._accelerator.gradient_state._set_sync_gradients(state["sync_gradients"])


class _Prepared(LoaderPosition):
    """A prepared loader: the position in what it wraps, of which it is one batch ahead, and its
    epoch, from which Accelerate's sampler makes the order."""

    def __init__(self, prepared: Any) -> None:
        """Raises Unsupported."""
        if type(prepared).__name__ == "DataLoaderDispatcher" and prepared.state.num_processes > 1:
            raise Unsupported(
                "taking an Accelerator's state: one of its loaders dispatches batches to several "
                "processes, and its position is unknown. Say dispatch_batches=False in "
                "DataLoaderConfiguration"
            )
        if any(each is prepared for each in prepared.gradient_state.dataloader_references):
            raise Unsupported(
                "taking an Accelerator's state: one of its loaders is being iterated, or was left "
                "in mid-epoch, and its position is unknown. Call state_of(accelerator) right after "
                "prepare()"
            )
        super().__init__(prepared.base_dataloader, ahead=1)
        self._prepared = prepared
        self._epoch = -1

    def state_dict(self) -> dict[str, Any]:
        """Accelerate counts an epoch only when the loop asks for more than its last batch."""
        seeds = [each.initial_seed for each in self._seedable()]
        is_over = self.is_at_end and self._prepared.iteration == self._epoch
        own = {"iteration": self._prepared.iteration + is_over, "seeds": seeds}
        return super().state_dict() | own | {"shares": self._shares()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that. Raises Unsupported where other ranks share the batches."""
        here = self._shares()
        if (then := state.get("shares", here)) != here:
            raise Unsupported(
                f"restoring an Accelerator's loader: {then} ranks shared its batches, here are "
                f"{here}, which would train on some of them twice, or never. Restore without it "
                f"(only=[...] names the other parts), and begin an epoch"
            )
        super().load_state_dict(state)
        self._prepared.iteration = state["iteration"]
        for sampler, seed in zip(self._seedable(), state["seeds"], strict=True):
            sampler.initial_seed = seed

    def iterate(self) -> Iterator[Any]:
        self._epoch = self._prepared.iteration
        return super().iterate()

    def _shares(self) -> int:
        """Among how many ranks the batches are shared out."""
        found = (self._loader.batch_sampler, self._loader.sampler, self._loader.dataset)
        return next((each.num_processes for each in found if hasattr(each, "num_processes")), 1)

    def _seedable(self) -> list[Any]:
        return [each for each in samplers_of(self._loader) if hasattr(each, "initial_seed")]
