"""Files as torch.save writes them: a zip of a pickle and, one after another, the tensors' bytes;
and directories for torch.distributed.checkpoint, whose file has one for each value.

These libraries want all tensors in memory; here each is read when its turn has come.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import _open_zipfile_writer

from everstep.interchange.pickles import STORAGES
from everstep.interchange.tensors import StandIn
from everstep.sharding.leaves import bytes_of, dtype_name

Read = Callable[[Sequence[str]], Iterator[torch.Tensor]]
_FILE = "__0_0.distcp"


def write_torch(path: Path, value: Any, read: Read) -> None:
    """A new file of `value`, for torch.load; `read` brings the tensors that it has stand-ins of.
    Raises OSError."""
    with path.open("xb") as file:
        _write_archive(file, value, read)


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
            _write_archive(file, each, lambda names: islice(tensors, len(names)))
            size = file.tell() - start
            found.append(WriteResult(item.index, size, _StorageInfo(_FILE, start, size)))
    FileSystemWriter(folder, sync_files=False).finish(metadata, [found])


def _write_archive(file: io.BufferedWriter, value: Any, read: Read) -> None:
    """From where `file` is written to now."""
    pickler = _Pickler()
    pickler.dump(value)
    data = pickler.file.getvalue()
    with _open_zipfile_writer(file) as archive:
        archive.write_record("data.pkl", data, len(data))
        archive.write_record("byteorder", b"little", len(b"little"))
        for (_, key), tensor in zip(pickler.keys.items(), read(list(pickler.keys)), strict=True):
            view = bytes_of(tensor)
            if view.untyped_storage().nbytes() != view.nbytes:
                view = view.clone()
            archive.write_record(f"data/{key}", view.untyped_storage(), view.nbytes)


class _Storage(tuple[Any, ...]):
    """The persistent id by which a pickle names one."""


class _Pickler(pickle.Pickler):
    """Writes what torch.save would of the tensors for which others stand in."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=2)
        self.keys: dict[str, str] = {}
        """Of the storages of these tensors, in their order."""

    def reducer_override(self, obj: Any) -> Any:
        """How a tensor is made again: by torch's own function, as a view of all of a storage."""
        if not isinstance(obj, StandIn):
            return NotImplemented
        kind = STORAGES.get(dtype_name(obj.dtype))
        key, count = self.keys.setdefault(obj.of, f"{len(self.keys)}"), obj.numel()
        told = (kind, key, "cpu", count) if kind else (torch.UntypedStorage, key, "cpu", obj.nbytes)
        hooks: OrderedDict[str, Any] = OrderedDict()
        shape = tuple(obj.shape)
        strides = torch.empty(shape, device="meta").stride()
        known = (_Storage(("storage", *told)), 0, shape, strides, False, hooks)
        if kind:
            return torch._utils._rebuild_tensor_v2, known
        return torch._utils._rebuild_tensor_v3, (*known, obj.dtype)

    def persistent_id(self, obj: Any) -> Any:
        """Of a storage."""
        return tuple(obj) if type(obj) is _Storage else None
