"""A million pieces: what a checkpoint of 1,000 tensors costs beside its bytes, as ranks grow.

    python -m benchmarks.pieces [--ranks 1 10 100 1000] [--json FILE] [--plot FILE]

Each tensor is cut by rows, as FSDP does, so that ranks times tensors is the number of pieces. All
ranks are played one after another in this process, by the classes that DCP is given
(everstep.integrations.dcp) and by DCP's own; what is measured is the work of the coordinator, and
of one rank. Pieces have 64 bytes: what their bytes cost is another matter.
"""

import argparse
import gc
import io
import json
import pickle
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from everstep.cli.main import main as everstep
from everstep.integrations.dcp import StorageReader, StorageWriter

TENSORS, ROWS, COLUMNS = 1000, 1, 16
NAMES = [f"model.layers.{index // 10}.block_{index % 10}.weight" for index in range(TENSORS)]


class Rank(DefaultSavePlanner):
    """One rank's planner, whose tensors need not be there."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.data = torch.full((ROWS, COLUMNS), float(rank))

    def create_local_plan(self) -> SavePlan:
        size = torch.Size([self.ranks * ROWS, COLUMNS])
        chunk = chunk_of(self.rank)
        data = TensorWriteData(chunk, TensorProperties(torch.float32), size)
        items = [
            WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
            for name in NAMES
        ]
        return SavePlan(items, planner_data={name: ("model", name[6:]) for name in NAMES})

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.data


def chunk_of(rank: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([rank * ROWS, 0]), torch.Size([ROWS, COLUMNS]))


class Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, what: str, work: Callable[[], Any]) -> Any:
        gc.collect()
        began = time.perf_counter()
        found = work()
        self.seconds[what] = time.perf_counter() - began
        return found


def measure(ranks: int, folder: Path) -> dict[str, Any]:
    clock = Clock()
    store = folder / "store"
    planners = [Rank(rank, ranks) for rank in range(ranks)]
    writers = [StorageWriter(store, 1) for _ in planners]
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(rank == 0, rank=rank)
    local = [
        writer.prepare_local_plan(planner.create_local_plan())
        for planner, writer in zip(planners, writers, strict=True)
    ]
    plans, metadata = clock("dcp_global_plan", lambda: planners[0].create_global_plan(local))
    stored = {item.index: ("__0_0.distcp", 0, 64) for plan in plans for item in plan.items}
    metadata.storage_data = stored
    document = clock("dcp_metadata_write", lambda: pickle.dumps(metadata))
    dcp_bytes = len(document)
    read = clock("dcp_metadata_read", lambda: pickle.loads(document))
    clock("dcp_rank_plan", lambda: plan_of(read, ranks))
    del read, document
    metadata.storage_data = None

    plans = clock("claim", lambda: writers[0].prepare_global_plan(plans))
    results = []
    for rank, (writer, planner, plan) in enumerate(zip(writers, planners, plans, strict=True)):
        write = lambda w=writer, p=plan, q=planner: w.write_data(p, q).wait()  # noqa: E731
        results.append(clock("rank_write", write) if rank == ranks - 1 else write())
    clock("commit", lambda: writers[0].finish(metadata, results))
    del writers, planners, plans, local, results, metadata
    reader = StorageReader(store)
    found = clock("read_metadata", reader.read_metadata)
    items = clock("rank_plan", lambda: plan_of(found, ranks))
    clock("rank_read", lambda: read_rank(reader, items))
    del found, items, reader
    for command in ("ls", "show"):
        with redirect_stdout(io.StringIO()):
            clock(command, lambda c=command: everstep([c, str(store)]))
    (manifest,) = (store / "checkpoints").glob("*/manifest.json")
    tables = list((store / "data" / "tables").iterdir())
    return {
        "pieces": ranks * TENSORS,
        "manifest_bytes": manifest.stat().st_size,
        "table_bytes": sum(table.stat().st_size for table in tables),
        "dcp_metadata_bytes": dcp_bytes,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **clock.seconds,
    }


def plan_of(metadata: Any, ranks: int) -> list[Any]:
    """What the default planner asks for the last rank."""
    own = [chunk_of(ranks - 1)]
    return [
        item
        for name in NAMES
        for item in create_read_items_for_chunk_list(name, metadata.state_dict_metadata[name], own)
    ]


class Into(DefaultLoadPlanner):
    """Of one rank's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.zeros(ROWS, COLUMNS)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.zeros(ROWS, COLUMNS)


def read_rank(reader: StorageReader, items: list[Any]) -> None:
    from torch.distributed.checkpoint.planner import LoadPlan

    reader.read_data(LoadPlan(items), Into()).wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 10, 100, 1000])
    args = parser.parse_args()
    for ranks in args.ranks:
        folder = Path(tempfile.mkdtemp())
        try:
            print(json.dumps(measure(ranks, folder)), flush=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
