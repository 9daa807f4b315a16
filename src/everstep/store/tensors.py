"""Tensors out of a store, without a model. The one module of the store that needs torch."""

from collections.abc import Collection
from contextlib import ExitStack

import torch

from everstep.errors import Missing
from everstep.format.boxes import Box
from everstep.format.global_tensors import Described, whole_tensors
from everstep.format.manifest import Manifest, Part
from everstep.format.packs import Piece
from everstep.format.tables import Table, TensorEntry
from everstep.store.read import open_pack, read_piece
from everstep.tiers.disk import Disk
from everstep.tiers.files import DiskReader

_ITEMS = {
    1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128,
}  # fmt: skip


def read_tensors(
    disk: Disk, manifest: Manifest, tables: list[Table], names: Collection[str] | None
) -> dict[str, torch.Tensor]:
    """The named tensors (None: all), each a new CPU tensor that the caller owns.

    Raises Missing for names that are not there, Corrupt.
    """
    if isinstance(names, str):
        raise ValueError(f"names must be a list of names, not {names!r}")
    found: dict[str, torch.Tensor] = {}
    known = {name for table in tables for name in _names(table)}
    if unknown := sorted(set(names or ()) - known):
        raise Missing(
            f"reading step {manifest.step} of {disk.root}: it has no tensors named {unknown}; "
            f"everstep show {disk.root} {manifest.step} lists the {len(known)} that it has"
        )
    Described(manifest, tables).check(disk.root)
    wholes = whole_tensors(tables)
    for part, table in zip(manifest.parts, tables, strict=True):
        with ExitStack() as stack:
            readers = []
            for pack in part.packs:
                readers.append(open_pack(disk, pack))
                stack.callback(readers[-1].close)
            for name, entry in table.tensors.items():
                keys = (name, *wholes[name].aliases)
                if wanted := [key for key in keys if names is None or key in names]:
                    tensor = _read(readers, part, entry, found.get(wanted[0]))
                    found.update(dict.fromkeys(wanted, tensor))
    return found


def _names(table: Table) -> set[str]:
    return {name for entry in table.tensors.values() for name in (entry.spec.name, *entry.aliases)}


def as_items(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers of the same size: torch cannot copy all dtypes, and numpy does not
    know them all."""
    return tensor.view(_ITEMS[tensor.itemsize])


def _read(
    readers: list[DiskReader], part: Part, entry: TensorEntry, begun: torch.Tensor | None
) -> torch.Tensor:
    """A tensor with all that the part has of it; in `begun`, where another part had some."""
    dtype = getattr(torch, entry.spec.dtype)
    whole = Box.whole(entry.spec.shape)
    if [piece.box for piece in entry.pieces] == [whole]:
        return _read_piece(readers, part, entry.pieces[0], entry.spec.name, dtype)
    tensor = begun
    if tensor is None:
        tensor = torch.empty(entry.spec.shape, dtype=dtype, device="cpu")
    for piece in entry.pieces:
        found = _read_piece(readers, part, piece, entry.spec.name, dtype)
        as_items(tensor)[piece.box.slices_in(whole)] = as_items(found)
    return tensor


def _read_piece(
    readers: list[DiskReader], part: Part, piece: Piece, name: str, dtype: torch.dtype
) -> torch.Tensor:
    """A piece in memory of its own, into which it is read straight."""
    raw = torch.empty(piece.size, dtype=torch.uint8, device="cpu")
    read_piece(readers[piece.pack], part, piece, raw.numpy().data, name)
    return raw.view(dtype).view(piece.box.lengths)
