"""A tensor in somebody's files: its dtype and shape, and boxes of it whose bytes come when asked.

Nothing is read before it is written somewhere else; memory is taken for a block of it, or, where
its elements do not lie in order, for the tensor and what it is a view of.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from everstep.errors import Corrupt, Missing, Unavailable
from everstep.format.boxes import Box, flat_boxes
from everstep.format.dtypes import ITEM_SIZES
from everstep.sharding.leaves import bytes_of, dtype_name
from everstep.state.objects import Foreign, Json, as_stored

BLOCK_BYTES = 4 << 20
_FIRST_BYTES = 64 << 10
_DIMS_MAX = 64
NAME = re.compile(r"[\w-][\w.-]{0,199}")
"""Of what lies in a folder, and nowhere else."""
Blocks = Callable[[], Iterator[memoryview]]
"""Bytes, one block after another. What is equal has the same ones."""


@contextmanager
def reading(where: object) -> Iterator[None]:
    """Raises Corrupt where what is read within makes no sense, Unavailable."""
    try:
        with as_stored(f"reading {where}"):
            yield
    except OSError as error:
        raise Unavailable(f"reading {where}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file, which are its `Blocks`."""

    path: Path
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.path} at byte {self.offset}" if self.offset else str(self.path)

    def part(self, start: int, size: int) -> "Stretch":
        """So many of them, from `start` on. Raises ValueError where they are not there."""
        if not 0 <= start <= start + size <= self.size:
            raise ValueError(f"{size} bytes from {start} on, of {self.size}")
        return Stretch(self.path, self.offset + start, size)

    def __call__(self) -> Iterator[memoryview]:
        """They, one block after another. Raises Corrupt where the file is short, Unavailable."""
        left, count = self.size, _FIRST_BYTES  # whoever compares is often done after that
        with reading(self.path), self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            while left:
                block = file.read(min(count, left))
                count = BLOCK_BYTES
                if not block:
                    raise Corrupt(f"reading {self.path}: it is cut short")
                left -= len(block)
                yield memoryview(block)

    def read(self) -> bytes:
        """All of them."""
        return b"".join(self())


def named(folder: Path, name: object, where: object) -> Path:
    """A file or folder there that a source names. Raises Corrupt where that may lead out of it,
    Missing where it is not there."""
    if type(name) is not str or not NAME.fullmatch(name):
        raise Corrupt(f"reading {where}: it names a file or folder {name!r:.80}")
    if not (folder / name).exists():
        raise Missing(f"reading {where}: {name}, which it names, is not there")
    return folder / name


def regular(path: Path) -> Path:
    """That file. Raises Corrupt where something else has its name, which might never end."""
    if path.exists() and not path.is_file():
        raise Corrupt(f"reading {path}: it is no file")
    return path


def lengths(value: Any) -> tuple[int, ...]:
    """A shape, offsets or strides. Raises ValueError for what is none."""
    is_short = isinstance(value, (list, tuple)) and len(value) <= _DIMS_MAX
    if not is_short or not all(type(each) is int and 0 <= each < 1 << 62 for each in value):
        raise ValueError(f"{value!r:.80} are no lengths")
    return tuple(value)


class Part(NamedTuple):
    """A box of a tensor; `blocks` are its bytes, row-major."""

    box: Box
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Found(Foreign):
    """A tensor of a source. Equal ones are one: their bytes are the same."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def encode(self, path: str, sink: Callable[[str, Any], str]) -> Json:
        """See Foreign."""
        return {"$": "tensor", "v": sink(path, self), "device": "cpu"}

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        return ITEM_SIZES[self.dtype] * prod(self.shape)

    @classmethod
    def whole(cls, dtype: str, shape: Sequence[int], blocks: Blocks) -> "Found":
        """One that comes in one piece, row-major."""
        return cls(dtype, tuple(shape), (Part(Box.whole(tuple(shape)), blocks),))

    def flat(self, shape: tuple[int, ...], start: int, at: int, count: int) -> list[Part]:
        """Of a row of numbers those from `at` on: the row-major elements from `start` on of a
        tensor of that shape. Raises ValueError where they are not there."""
        start, at, count = lengths((start, at, count))
        lies: Any = self.parts[0].blocks
        item, parts = ITEM_SIZES[self.dtype], []
        for box in flat_boxes(shape, start, start + count):
            parts.append(Part(box, lies.part(at * item, box.count * item)))
            at += box.count
        return parts

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Found":
        """One that is here."""
        view = bytes_of(tensor).numpy().data
        return cls.whole(dtype_name(tensor.dtype), tensor.shape, lambda: iter([view]))

    def has_bytes_of(self, other: "Found") -> bool:
        """Whether both have the same bytes, wherever; mostly told by the first of them."""
        if [part.box for part in self.parts] != [part.box for part in other.parts]:
            return False
        pairs = zip(self.parts, other.parts, strict=True)
        return all(a == b for one, two in pairs for a, b in zip_longest(one.blocks(), two.blocks()))
