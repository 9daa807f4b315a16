"""Ray Train: ray.train.report with a save of everstep.

    from everstep.integrations.ray import report

    def train_function(config):                     # what a TorchTrainer runs on each worker
        with everstep.Checkpointer("/shared/gpt", state) as checkpointer:
            for step in range(checkpointer.restore() + 1, steps + 1):
                ...
                report({"loss": loss}, checkpointer.step(step), store="/shared/gpt")

The bytes stay in the store. What Ray gets for a checkpoint is a directory with one small file,
`everstep.json`, which names store and step (`Pointer`): Ray may score, keep and delete that as it
likes. It is uploaded once the step is durable, by a thread of Ray's, so that the call does not wait
for the disk. All workers make the same calls, as for ray.train.report.
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstep import EverstepError, SaveHandle

_FILE = "everstep.json"


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a checkpoint of Ray's says. `error`: why the step is not in the store; else None."""

    step: int
    store: str | None = None
    error: str | None = None

    @classmethod
    def of(cls, checkpoint: Any) -> "Pointer":
        """Read a ray.train.Checkpoint that `report` has made (`result.checkpoint`, say)."""
        with checkpoint.as_directory() as folder:
            return cls(**json.loads((Path(folder) / _FILE).read_text()))

    def write(self, folder: str) -> None:
        """Into a directory."""
        (Path(folder) / _FILE).write_text(json.dumps(asdict(self)))


def report(
    metrics: dict[str, Any],
    handle: SaveHandle | None,
    *,
    store: str | os.PathLike[str] | None = None,
    validation: Any = False,
) -> None:
    """Report metrics, and with them the save of `handle` (as step() or save() returned it) when it
    has become durable; metrics alone where that is None. Waits for no disk.

    store: the Checkpointer's, to be named to those who read the checkpoint. validation: as for
    ray.train.report, which gets it.

    A save that fails ends no run: its checkpoint tells the error (`Pointer.error`).
    """
    from ray import train

    context = train.get_context()
    if handle is None or context.get_world_rank() > 0:  # one pointer is enough for all ranks
        train.report(metrics, checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC)
        return
    storage = context.get_storage()
    pointer = Pointer(handle.step, None if store is None else os.path.abspath(store))
    folder = tempfile.mkdtemp(prefix="everstep-ray-")  # deleted by Ray when it is uploaded
    pointer.write(folder)

    def upload(checkpoint: Any, name: str) -> Any:
        try:
            handle.wait("local")
        except EverstepError as error:
            Pointer(pointer.step, pointer.store, str(error)).write(checkpoint.path)
        return storage.persist_current_checkpoint(checkpoint, name)

    train.report(
        metrics,
        checkpoint=train.Checkpoint.from_directory(folder),
        checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=upload,
        validation=validation,
    )
