"""Directories for torch.distributed.checkpoint: its planner and its metadata, but tensors are read
when their turn has come."""

import io
from itertools import islice
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from everstep.interchange.tensors import StandIn
from everstep.interchange.torch_files import Read, write_archive

_FILE = "__0_0.distcp"


def write_dcp(folder: Path, tree: dict[str, Any], read: Read) -> None:
    """A new directory of that state dict, for dcp.load. Raises OSError."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(tree, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    values = [planner.lookup_object(item.index) for item in plan.items]
    tensors = read([each.of for each in values if isinstance(each, StandIn)])
    found = []
    with (folder / _FILE).open("xb") as file:
        for item, each in zip(plan.items, values, strict=True):
            start = file.tell()
            if isinstance(each, StandIn):
                write_archive(file, each, lambda names: islice(tensors, 1))
            else:
                pickled = planner.resolve_data(item)
                assert isinstance(pickled, io.BytesIO)
                file.write(pickled.getbuffer())
            size = file.tell() - start
            found.append(WriteResult(item.index, size, _StorageInfo(_FILE, start, size)))
    FileSystemWriter(folder, sync_files=False).finish(metadata, [found])
