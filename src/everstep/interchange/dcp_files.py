"""Directories for torch.distributed.checkpoint, by its own writer: each tensor is read when it asks
for it."""

import ctypes
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.interchange.state_dicts import Lazy
from everstep.interchange.torch_files import Shapes
from everstep.interchange.whole import BATCH_BYTES

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def write_dcp(
    folder: Path, tree: dict[str, Any], shapes: Shapes, read: Callable[[str], torch.Tensor]
) -> None:
    """A new directory of that state dict, for dcp.load. Raises OSError."""
    planner = _Planner(read)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is alone
        try:
            save(
                _with_stand_ins(tree, shapes, planner.names),
                storage_writer=FileSystemWriter(folder, thread_count=1, sync_files=False),
                planner=planner,
                no_dist=True,
            )
        except CheckpointException as error:  # around what was raised
            raise error.failures[0][0] from None


class _Planner(DefaultSavePlanner):
    """torch's own, but for where tensors come from."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self.names: dict[int, tuple[torch.Tensor, str]] = {}
        self._read = read
        self._last: torch.Tensor | None = None
        self._freed = 0

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor for which a stand-in is in the state dict."""
        found = self.lookup_object(write_item.index)
        if id(found) not in self.names:
            return super().resolve_data(write_item)
        if self._last is not None:  # it is written; torch keeps it to the end all the same
            self._freed += self._last.nbytes
            self._last.untyped_storage().resize_(0)
        if self._freed > BATCH_BYTES and _trim:  # what torch.save takes lies between what is free
            _trim(0)
            self._freed = 0
        self._last = self._read(self.names[id(found)][1]).clone()
        return self._last


def _with_stand_ins(tree: Any, shapes: Shapes, names: dict[int, tuple[torch.Tensor, str]]) -> Any:
    """The same tree with tensors that have no memory of their own."""
    if isinstance(tree, dict):
        return {key: _with_stand_ins(each, shapes, names) for key, each in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_with_stand_ins(each, shapes, names) for each in tree])
    if not isinstance(tree, Lazy):
        return tree
    dtype, shape = shapes[tree.name]
    stand_in = torch.empty((), dtype=getattr(torch, dtype)).expand(shape)
    names[id(stand_in)] = stand_in, tree.name
    return stand_in
