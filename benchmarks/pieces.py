"""A million pieces: what a checkpoint of 1,000 tensors costs beside its bytes, as ranks grow.

    python -m benchmarks.pieces [--ranks 1 10 100 1000] [--plot FILE]

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
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from everstep import Checkpointer, Ranks, Shard
from everstep.cli.main import main as everstep
from everstep.integrations.dcp import StorageReader, StorageWriter

TENSORS, ROWS, COLUMNS = 1000, 1, 16
NAMES = [f"model.layers.{index // 10}.block_{index % 10}.weight" for index in range(TENSORS)]

LINES = {
    "claim+commit": ("coordinator: claim and commit", "C0o-"),
    "rank_write": ("one rank: plan and write its pieces", "C1o-"),
    "read_metadata+rank_plan+rank_read": ("one rank: plan and read its own", "C2o-"),
    "ls": ("everstep ls", "C3o-"),
    "show": ("everstep show", "C4o-"),
    "dcp_global_plan": ("DCP: global plan", "C0s:"),
    "dcp_metadata_write": ("DCP: writes its metadata", "C1s:"),
    "dcp_metadata_read+dcp_rank_plan": ("DCP: one rank reads them, and plans", "C2s:"),
}


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
    """Processor seconds by what they were spent on: a shared machine has others."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, what: str, work: Callable[..., Any], *of: Any) -> Any:
        gc.collect()
        began = time.process_time()
        found = work(*of)
        self.seconds[what] = time.process_time() - began
        return found


def measure(ranks: int, folder: Path) -> dict[str, Any]:
    clock = Clock()
    store = folder / "store"
    dcp_bytes = saved(clock, store, ranks)
    reader = StorageReader(store)
    metadata = clock("read_metadata", reader.read_metadata)
    clock("rank_read", read_rank, reader, clock("rank_plan", plan_of, metadata, ranks))
    clock("restore", partial(restore, store, ranks))
    for command in ("ls", "show"):
        with redirect_stdout(io.StringIO()):
            clock(command, everstep, [command, str(store)])
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


def saved(clock: Clock, store: Path, ranks: int) -> int:
    """Save by both; the size of DCP's metadata."""
    planners = [Rank(rank, ranks) for rank in range(ranks)]
    writers = [StorageWriter(store, 1) for _ in planners]
    local = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        writer.set_up_storage_writer(rank == 0, rank=rank)
        local.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = clock("dcp_global_plan", planners[0].create_global_plan, local)
    size = dcp_alone(clock, plans, metadata, ranks)
    plans = clock("claim", writers[0].prepare_global_plan, plans)
    last = partial(clock, "rank_write", writers[-1].write_data)
    results = []
    for writer, planner, plan in zip(writers, planners, plans, strict=True):
        begin = writer.write_data if writer is not writers[-1] else last
        results.append(begin(plan, planner).wait())
    clock("commit", writers[0].finish, metadata, results)
    return size


def dcp_alone(clock: Clock, plans: list[SavePlan], metadata: Any, ranks: int) -> int:
    """What DCP does beside: its metadata, and what a rank makes of them."""
    infos = {item.index: _StorageInfo("__0_0.distcp", 0, 64) for p in plans for item in p.items}
    document = clock("dcp_metadata_write", pickle.dumps, replace(metadata, storage_data=infos))
    read = clock("dcp_metadata_read", pickle.loads, document)
    clock("dcp_rank_plan", plan_of, read, ranks)
    return len(document)


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

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.zeros(ROWS, COLUMNS)


def read_rank(reader: StorageReader, items: list[Any]) -> None:
    reader.read_data(LoadPlan(items), Into()).wait()


def restore(store: Path, ranks: int) -> None:
    """By a Checkpointer, the last rank's rows."""
    block = partial(nn.ParameterDict, {"weight": torch.zeros(ROWS, COLUMNS)})
    layers = [
        nn.ModuleDict({f"block_{number}": block() for number in range(10)})
        for _ in range(TENSORS // 10)
    ]
    shape, start = (ranks * ROWS, COLUMNS), ((ranks - 1) * ROWS, 0)
    mine = Ranks(layout=lambda name, tensor: [Shard(name, shape, start, tensor)])
    state = {"model": nn.ModuleDict({"layers": nn.ModuleList(layers)})}
    with Checkpointer(store.parent / "own", state, ranks=mine) as checkpointer:
        checkpointer.restore(from_store=store, only=["model"])
    assert all((each == ranks - 1).all() for each in state["model"].parameters())


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for what, (label, style) in LINES.items():
        seconds = [sum(row[key] for key in what.split("+")) for row in rows]
        axes.loglog([row["pieces"] for row in rows], seconds, style, label=label)
    axes.set_xlabel("pieces (1,000 tensors x ranks)")
    axes.set_ylabel("processor seconds")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--plot", metavar="FILE", help="where to draw the figures")
    args = parser.parse_args()
    rows = []
    for ranks in args.ranks:
        folder = Path(tempfile.mkdtemp())
        try:
            rows.append(measure(ranks, folder))
            print(json.dumps(rows[-1]), flush=True)
        finally:
            shutil.rmtree(folder)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
