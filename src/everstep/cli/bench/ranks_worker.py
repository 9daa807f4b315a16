"""A rank of the bench: the worker's requests, of a run that FSDP2 shards over several of them.

All ranks draw the same text: what they learn is of no account here. Each is asked the same, at the
same time (see gang.py), and calls what its contender asks each rank to call.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from everstep.cli import workload
from everstep.cli.bench.checks import digest
from everstep.cli.bench.contenders import OWN, Contender, Maker, Saver
from everstep.cli.bench.peers import RANKED
from everstep.cli.bench.worker import RUN_STEPS, Call, Worker, serve


class RankWorker(Worker):
    """One rank of one contender."""

    def __init__(self, rank: int, ranks: int, port: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._rank = rank
        torch.set_num_threads(1)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        numbers["MASTER_PORT"] = port
        os.environ.update({name: str(value) for name, value in numbers.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        dist.init_process_group("gloo")

    def keep_one(self) -> dict[str, Any]:
        """Save a last time; the reply is what `load` needs to know."""
        super().keep_one()
        return {"step": self._kept, "expected": self._expected, "root": str(self._root)}

    def load(self, step: int, expected: str, root: str) -> dict[str, Any]:
        """What other ranks have saved, into a fresh run; nothing else was done before in here."""
        self._root = Path(root)
        contender = self._contender = self._make(self._build(seed=3))
        assert isinstance(contender, Saver), f"{self._name} saves nothing to load"
        return self._restore(contender, step, expected)

    def close(self) -> dict[str, Any]:
        """End the contender's processes, on all ranks."""
        super().close()
        dist.barrier()  # the store is rank 0's
        dist.destroy_process_group()
        return {}

    def _build(self, seed: int) -> workload.Run:
        return workload.build(self._text, seed=seed, steps=RUN_STEPS, size=self._size, shard=_shard)

    def _make(self, run: workload.Run) -> Contender:
        makers: dict[str, Maker] = {**OWN, **RANKED}
        return makers[self._name](run, self._root, self._every)

    def _digest(self, run: workload.Run) -> str:
        return digest(run, is_sharded=True)

    def _line_up(self) -> None:
        dist.barrier()

    def _drop(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call.wait()
        dist.barrier()
        if self._rank == 0:
            self._contender.discard([call.step for call in calls])
        dist.barrier()


def _shard(model: nn.Module) -> None:
    """FSDP2: a group for each block, and one for the rest."""
    assert isinstance(model, workload.GPT)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


if __name__ == "__main__":
    serve(RankWorker)
