"""What torch.save writes: a zip of a pickle and the bytes of storages, read without torch.load.

A file is one, or has several behind one another (DCP's). https://pytorch.org/docs/stable/notes/
serialization.html#torch-save-serialization-format
"""

import io
import os
import struct
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.storage import _dtype_to_storage_type_map

from everstep.errors import Corrupt, Unavailable, Unsupported
from everstep.format.dtypes import ITEM_SIZES
from everstep.interchange.pickles import Global, Inert, Settler, read_pickle
from everstep.interchange.tensors import Found, Storage, Stretch, view_of
from everstep.sharding.leaves import dtype_name

PICKLE_BYTES_MAX = 1 << 28
_DIRECTORY_BYTES_MAX = 1 << 26
_LOCAL = struct.Struct("<4s5H3I2H")
_BROKEN = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, LookupError)
STORAGES: dict[str, Any] = {
    dtype_name(dtype): getattr(torch, kind)
    for dtype, kind in _dtype_to_storage_type_map().items()
    if dtype_name(dtype) in ITEM_SIZES
}
"""What a pickle calls the storage of a dtype; of others there are bytes alone."""
_DTYPES = {kind.__name__: dtype for dtype, kind in STORAGES.items()} | {"UntypedStorage": None}


def is_archive(path: Path) -> bool:
    """Whether it begins as a zip does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


class Archive:
    """One zip of torch.save."""

    def __init__(self, path: Path, offset: int = 0, size: int | None = None) -> None:
        """Raises Corrupt, Unsupported, Unavailable."""
        self.where = path if size is None else f"{path} at byte {offset}"
        try:
            there = path.stat().st_size
            size = there - offset if size is None else size
            if offset < 0 or size < 0 or offset + size > there:
                raise Corrupt(f"reading {path}: {size} bytes at {offset} are named, it has {there}")
            with path.open("rb") as file:
                file.seek(offset)
                self._read(Window(file, offset, size), Stretch(path, offset, size))
        except OSError as error:
            raise Unavailable(f"reading {path}: {error.strerror or error}") from error
        except _BROKEN as error:
            raise Corrupt(f"reading {self.where}: it is no whole zip: {error}") from error

    def _read(self, window: "Window", whole: Stretch) -> None:
        self._records: dict[str, Stretch] = {}
        for entry in zipfile.ZipFile(window).infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise Unsupported(f"reading {self.where}: {entry.filename[:80]} is compressed")
            window.seek(entry.header_offset)
            row = _LOCAL.unpack(window.read(_LOCAL.size))
            start = entry.header_offset + _LOCAL.size + row[-2] + row[-1]
            if row[0] != b"PK\x03\x04" or not 0 <= start <= start + entry.file_size <= whole.size:
                raise Corrupt(f"reading {self.where}: {entry.filename[:80]} is not in it")
            _, _, name = entry.filename.partition("/")
            self._records[name] = Stretch(whole.path, whole.offset + start, entry.file_size)
        if "data.pkl" not in self._records or "constants.pkl" in self._records:
            raise Unsupported(f"reading {self.where}: a zip, but not one of torch.save")
        order = self._records.get("byteorder")
        if order and order.size < 100 and order.read() != b"little":
            raise Unsupported(f"reading {self.where}: it is of a big-endian machine")

    def load(self) -> Any:
        """What was saved, with a Found for each tensor, and an Inert for what nobody here knows.
        Raises Corrupt, Unsupported."""
        data = self._records["data.pkl"]
        if data.size > PICKLE_BYTES_MAX:
            raise Unsupported(f"reading {self.where}: its pickle has {data.size} bytes")
        return read_pickle(data.read(), self.where, makers(self.where), self._storage)

    def _storage(self, identity: Any) -> Storage:
        kind, storage, key, _, count = identity
        name = storage.name.rpartition(".")[2]
        if kind != "storage" or name not in _DTYPES or type(count) is not int:
            raise ValueError(f"no storage: {identity!r:.200}")
        stretch, dtype = self._records[f"data/{key}"], _DTYPES[name]
        if not 0 <= count * (ITEM_SIZES[dtype] if dtype else 1) <= stretch.size:
            raise ValueError(f"a storage of {count} items in {stretch.size} bytes")
        return Storage(stretch, dtype)


def load(path: Path) -> Any:
    """What a file of torch.save has, settled: plain containers. Raises Corrupt, Unsupported."""
    if not is_archive(path):
        raise Unsupported(
            f"reading {path}: it is no zip. Files of torch before 1.6 (or of other programs) have "
            f"to be loaded and saved anew: torch.save(torch.load(path), other)"
        )
    return settled(Archive(path).load(), path)


def settled(value: Any, where: object) -> Any:
    """Containers of its own, with arrays for what makes them; Inert and Found stay."""
    return Settler(where, lambda leaf, path: _resolved(leaf)).settle(value)


def makers(where: object) -> dict[str, Callable[..., Any]]:
    """What torch's and numpy's names make in a pickle."""

    def tensor(*given: Any, dtype: str | None = None) -> Found:
        storage, offset, shape, strides = given[:4]
        return view_of(storage, dtype, offset, shape, strides, where)

    known = {f"torch._utils._rebuild_tensor{version}": tensor for version in ("", "_v2")}

    def subclass(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        if not isinstance(function, Global) or function.name not in known:
            return Inert("torch.Tensor", (function, kind, arguments))
        return known[function.name](*arguments)

    return known | {
        "torch._utils._rebuild_tensor_v3": lambda *a: tensor(*a, dtype=dtype_of(a[6])),
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
        "torch._tensor._rebuild_from_type_v2": subclass,
        "torch.Size": lambda items=(): tuple(items),
        "torch.device": torch.device,
    }


def dtype_of(named: Any) -> str:
    """A dtype's name. Raises Unsupported for one that nobody here knows."""
    name: str = named.name.removeprefix("torch.") if isinstance(named, Global) else ""
    if name not in ITEM_SIZES:
        raise Unsupported(f"reading a tensor of dtype {name or named!r:.80}")
    return name


def _resolved(leaf: Any) -> Any:
    """Dtypes and numpy's arrays as they are; the bytes of an array stay where they are."""
    if isinstance(leaf, Global) and leaf.name.removeprefix("torch.") in ITEM_SIZES:
        return getattr(torch, leaf.name.removeprefix("torch."))
    if not isinstance(leaf, Inert):
        return leaf
    match leaf.kind:
        case "numpy.core.multiarray._reconstruct":
            _, shape, dtype, is_fortran, data = leaf.state
            return _array(data, dtype, shape, "F" if is_fortran else "C")
        case "numpy.core.multiarray.scalar":
            dtype, data = leaf.args
            return _array(data, dtype, (1,), "C")[0]
        case "numpy.core.numeric._frombuffer":
            return _array(*leaf.args)
    return leaf


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if type(data) not in (bytes, bytearray) or order not in ("C", "F"):
        raise TypeError("an array without bytes")
    kind = _numpy_dtype(dtype)
    if kind.itemsize * prod(shape) != len(data) or not kind.itemsize:
        raise ValueError(f"an array of shape {shape!r:.80} in {len(data)} bytes")
    return np.frombuffer(data, kind).reshape(shape, order=order)


def _numpy_dtype(said: Inert) -> "np.dtype[Any]":
    """Of numbers or texts; of nothing that has objects."""
    code = said.args[0]
    if said.kind != "numpy.dtype" or type(code) is not str or len(code) > 8:
        raise TypeError("no dtype of numbers")
    found = np.dtype(code)
    if found.hasobject or found.kind not in "biufcSU":
        raise TypeError(f"{code} is no dtype of numbers")
    order: Any = said.state[1] if said.state else "="
    return found.newbyteorder(order) if order in ("<", ">") else found


class Window(io.RawIOBase):
    """A stretch of a file as a file, of which nobody reads much at once."""

    def __init__(self, file: Any, offset: int, size: int) -> None:
        super().__init__()
        self._file, self._offset, self._size = file, offset, size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """In the stretch. Raises ValueError."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._file.seek(self._offset + base + offset)
        return base + offset

    def tell(self) -> int:
        """Likewise."""
        at: int = self._file.tell() - self._offset
        return at

    def read(self, size: int | None = -1) -> bytes:
        """Up to its end. Raises ValueError for much."""
        left = max(0, self._size - self.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > _DIRECTORY_BYTES_MAX:
            raise ValueError("its directory is enormous")
        data: bytes = self._file.read(wanted)
        return data
