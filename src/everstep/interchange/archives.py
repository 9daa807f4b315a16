"""What torch.save writes: a zip of a pickle and the bytes of storages, read without torch.load.

A file is one, or has several behind one another (DCP's). https://pytorch.org/docs/stable/notes/
serialization.html#torch-save-serialization-format
"""

import os
import struct
import zipfile
from pathlib import Path
from typing import Any

from everstep.errors import Corrupt, Unavailable, Unsupported
from everstep.interchange.pickles import read_pickle
from everstep.interchange.tensors import Stretch, regular

PICKLE_BYTES_MAX = 1 << 28
_DIRECTORY_BYTES_MAX = 1 << 26
_LOCAL = struct.Struct("<4s5H3I2H")
_BROKEN = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, LookupError)


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
    return load_piece(Stretch(path, 0, path.stat().st_size), path)


def load_piece(lies: Stretch, where: object) -> Any:
    """Likewise, of one that is a stretch of a file."""
    try:
        records = _records(lies, where)
    except OSError as error:
        raise Unavailable(f"reading {lies.path}: {error.strerror or error}") from error
    except _BROKEN as error:
        if lies.size > 8 and lies.part(8, 1).read() == b"{":
            raise Unsupported(
                f"reading {where}: it is safetensors. DCP has to save as TORCH_SAVE, its default"
            ) from error
        raise Corrupt(f"reading {where}: it is no whole zip: {error}") from error
    data = records["data.pkl"]
    if data.size > PICKLE_BYTES_MAX:
        raise Unsupported(f"reading {where}: its pickle has {data.size} bytes")
    return read_pickle(data.read(), where, records)


def _records(lies: Stretch, where: object) -> dict[str, Stretch]:
    there, found = regular(lies.path).stat().st_size, dict[str, Stretch]()
    if lies.offset < 0 or lies.size < 0 or lies.offset + lies.size > there:
        raise Corrupt(
            f"reading {lies.path}: {lies.size} bytes at {lies.offset} are named, it has {there}"
        )
    with lies.path.open("rb") as file:
        window = _Window(file, lies.offset, lies.size)
        for entry in zipfile.ZipFile(window).infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise Unsupported(f"reading {where}: {entry.filename[:80]} is compressed")
            window.seek(entry.header_offset)
            row = _LOCAL.unpack(window.read(_LOCAL.size))
            start = entry.header_offset + _LOCAL.size + row[-2] + row[-1]
            if row[0] != b"PK\x03\x04" or not 0 <= start <= start + entry.file_size <= lies.size:
                raise Corrupt(f"reading {where}: {entry.filename[:80]} is not in it")
            _, _, name = entry.filename.partition("/")
            found[name] = lies.part(start, entry.file_size)
    if "data.pkl" not in found or "constants.pkl" in found:
        raise Unsupported(f"reading {where}: a zip, but not one of torch.save")
    order = found.get("byteorder")
    if order and order.size < 100 and order.read() != b"little":
        raise Unsupported(f"reading {where}: it is of a big-endian machine")
    return found


class _Window:
    """A stretch of a file as a file, of which nobody reads much at once."""

    def __init__(self, file: Any, offset: int, size: int) -> None:
        self._file, self._offset, self._size = file, offset, size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._file.seek(self._offset + base + offset)
        return base + offset

    def tell(self) -> int:
        at: int = self._file.tell() - self._offset
        return at

    def read(self, size: int | None = -1) -> bytes:
        """Up to its end."""
        left = max(0, self._size - self.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > _DIRECTORY_BYTES_MAX:
            raise ValueError("its directory is enormous")
        data: bytes = self._file.read(wanted)
        return data
