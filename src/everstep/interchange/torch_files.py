"""What torch.save writes: a zip of a pickle and, one after another, the bytes of storages.

A file is one, or has several behind one another (DCP's). Torch wants all tensors in memory, and
runs what a pickle says; here each is read when its turn has come, and nothing is run.
https://pytorch.org/docs/stable/notes/serialization.html#torch-save-serialization-format
"""

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import _open_zipfile_writer

from everstep.errors import Corrupt, Unsupported
from everstep.format.dtypes import ITEM_SIZES
from everstep.interchange.pickles import STORAGES, read_pickle
from everstep.interchange.tensors import Stretch, reading, regular
from everstep.sharding.leaves import bytes_of, dtype_name

Read = Callable[[Sequence[str]], Iterator[torch.Tensor]]
_DIRECTORY_BYTES_MAX = 1 << 26
_LOCAL = struct.Struct("<4s5H3I2H")


def is_archive(path: Path) -> bool:
    """Whether it begins as a zip does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def load(path: Path) -> Any:
    """What a file of torch.save has (read_pickle). Raises Corrupt, Unsupported, Unavailable."""
    if not is_archive(path):
        raise Unsupported(
            f"reading {path}: it is no zip. Files of torch before 1.6 (or of other programs) have "
            f"to be loaded and saved anew: torch.save(torch.load(path), other)"
        )
    return load_piece(Stretch(path, 0, path.stat().st_size))


def load_piece(lies: Stretch) -> Any:
    """Likewise, of one that is a stretch of a file."""
    with reading(lies):
        try:
            records = _records(lies)
        except zipfile.BadZipFile as error:
            if lies.size > 8 and lies.part(8, 1).read() == b"{":
                raise Unsupported(
                    f"reading {lies}: it is safetensors. DCP has to save as TORCH_SAVE, its default"
                ) from error
            raise Corrupt(f"reading {lies}: it is no whole zip: {error}") from error
        return read_pickle(records["data.pkl"], records)


def _records(lies: Stretch) -> dict[str, Stretch]:
    there, found = regular(lies.path).stat().st_size, dict[str, Stretch]()
    if lies.offset + lies.size > there:
        raise Corrupt(f"reading {lies}: it has only {there} bytes, and {lies.size} are named")
    for entry in zipfile.ZipFile(_Window(lies)).infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise Unsupported(f"reading {lies}: {entry.filename[:80]} is compressed")
        row = _LOCAL.unpack(lies.part(entry.header_offset, _LOCAL.size).read())
        if row[0] != b"PK\x03\x04":
            raise Corrupt(f"reading {lies}: {entry.filename[:80]} is not in it")
        start = entry.header_offset + _LOCAL.size + row[-2] + row[-1]
        found[entry.filename.partition("/")[2]] = lies.part(start, entry.file_size)
    if "data.pkl" not in found or "constants.pkl" in found:
        raise Unsupported(f"reading {lies}: a zip, but not one of torch.save")
    order = found.get("byteorder")
    if order and order.size < 100 and order.read() != b"little":
        raise Unsupported(f"reading {lies}: it is of a big-endian machine")
    return found


class _Window:
    """A stretch of a file as a file, of which nobody reads much at once."""

    def __init__(self, lies: Stretch) -> None:
        self._lies, self._at = lies, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._lies.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._lies.size - self._at)
        part = self._lies.part(self._at, left if size is None or size < 0 else min(size, left))
        if part.size > _DIRECTORY_BYTES_MAX:
            raise ValueError("its directory is enormous")
        self._at += part.size
        return part.read()


# ---- to a file -----------------------------------------------------------------------------------


class StandIn(torch.Tensor):
    """A tensor of some dtype and shape without memory of its own, for what takes states apart.
    `of`: the name of what it stands for; `place`: the device that a file says it was on."""

    of: str
    place: str

    @classmethod
    def make(cls, dtype: str, shape: Sequence[int], of: str, place: str = "cpu") -> "StandIn":
        """Torch warns where complex32 is asked for in new memory."""
        item = torch.empty(ITEM_SIZES[dtype], dtype=torch.uint8, device="cpu")
        made = item.view(getattr(torch, dtype)).view(()).expand(tuple(shape)).as_subclass(cls)
        made.of, made.place = of, place
        return made


def write_torch(path: Path, value: Any, read: Read) -> None:
    """A new file of `value`, for torch.load; `read` brings the tensors that it has stand-ins of.
    Raises OSError."""
    with path.open("xb") as file:
        write_archive(file, value, read)


def write_archive(file: IO[bytes], value: Any, read: Read) -> None:
    """From where `file` is written to now."""
    data, names = pickled(value)
    with _open_zipfile_writer(file) as archive:
        archive.write_record("data.pkl", data, len(data))
        archive.write_record("byteorder", b"little", len(b"little"))
        for key, tensor in zip(range(len(names)), read(names), strict=True):
            view = bytes_of(tensor)
            if view.untyped_storage().nbytes() != view.nbytes:
                view = view.clone()
            archive.write_record(f"data/{key}", view.untyped_storage(), view.nbytes)


def pickled(value: Any) -> tuple[bytes, list[str]]:
    """The pickle of a file, and which tensors it has stand-ins of, in the order of its storages."""
    pickler = _Pickler()
    pickler.dump(value)
    return pickler.file.getvalue(), list(pickler.keys)


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
        key = self.keys.setdefault(obj.of, f"{len(self.keys)}")
        count = obj.numel() if kind else obj.nbytes
        told = (kind or torch.UntypedStorage, key, obj.place, count)
        hooks: OrderedDict[str, Any] = OrderedDict()
        shape = tuple(obj.shape)
        strides = torch.empty(shape, device="meta").stride()
        known = (_Storage(("storage", *told)), 0, shape, strides, False, hooks)
        if kind:
            return torch._utils._rebuild_tensor_v2, known
        return torch._utils._rebuild_tensor_v3, (*known, obj.dtype)

    def persistent_id(self, obj: Any) -> Any:
        return tuple(obj) if type(obj) is _Storage else None
