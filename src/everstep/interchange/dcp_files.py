"""Directories for torch.distributed.checkpoint: its planner and its metadata, but tensors are read
when their turn has come."""

import io
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from everstep.interchange.state_dicts import Lazy
from everstep.interchange.torch_files import Read, Shapes, write_archive

_FILE = "__0_0.distcp"
_StandIns = dict[int, tuple[torch.Tensor, Lazy]]


def write_dcp(folder: Path, tree: dict[str, Any], shapes: Shapes, read: Read) -> None:
    """A new directory of that state dict, for dcp.load. Raises OSError."""
    planner, stand_ins = DefaultSavePlanner(), _StandIns()
    planner.set_up_planner(_with_stand_ins(tree, shapes, stand_ins), is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    values = [planner.lookup_object(item.index) for item in plan.items]
    lazy = [stand_ins[id(each)][1] if id(each) in stand_ins else None for each in values]
    tensors = read([each.name for each in lazy if each])
    found = []
    with (folder / _FILE).open("xb") as file:
        for item, each in zip(plan.items, lazy, strict=True):
            start = file.tell()
            if each is None:
                pickled = planner.resolve_data(item)
                assert isinstance(pickled, io.BytesIO)
                file.write(pickled.getbuffer())
            else:
                write_archive(file, each, shapes, lambda names: islice(tensors, 1))
            size = file.tell() - start
            found.append(WriteResult(item.index, size, _StorageInfo(_FILE, start, size)))
    FileSystemWriter(folder, sync_files=False).finish(metadata, [found])


def _with_stand_ins(tree: Any, shapes: Shapes, found: _StandIns) -> Any:
    """The same tree with tensors that have no memory of their own."""
    if isinstance(tree, dict):
        return {key: _with_stand_ins(each, shapes, found) for key, each in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_with_stand_ins(each, shapes, found) for each in tree])
    if not isinstance(tree, Lazy):
        return tree
    dtype, shape = shapes[tree.name]
    stand_in = torch.empty((), dtype=getattr(torch, dtype)).expand(shape)
    found[id(stand_in)] = stand_in, tree
    return stand_in
