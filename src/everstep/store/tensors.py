"""Tensors out of a store, without a model. The one module of the store that needs torch."""

from collections.abc import Collection
from contextlib import ExitStack

import torch

from everstep.errors import Missing
from everstep.format.manifest import Manifest, Part, Table, TensorEntry
from everstep.store.read import open_pack, read_piece
from everstep.tiers.disk import Disk, DiskReader


def read_tensors(
    disk: Disk, manifest: Manifest, tables: list[Table], names: Collection[str] | None
) -> dict[str, torch.Tensor]:
    """The named tensors (None: all), each a new CPU tensor that the caller owns.

    Raises Missing for names that are not there, Corrupt.
    """
    found: dict[str, torch.Tensor] = {}
    known = {name for table in tables for name in _names(table)}
    if unknown := sorted(set(names or ()) - known):
        raise Missing(
            f"reading step {manifest.step} of {disk.root}: it has no tensors named {unknown}; "
            f"everstep show {manifest.step} lists the {len(known)} that it has"
        )
    for part, table in zip(manifest.parts, tables, strict=True):
        with ExitStack() as stack:
            readers = []
            for pack in part.packs:
                readers.append(open_pack(disk, pack))
                stack.callback(readers[-1].close)
            for entry in table.tensors.values():
                wanted = [
                    name
                    for name in (entry.spec.name, *entry.aliases)
                    if names is None or name in names
                ]
                if wanted:
                    found[wanted[0]] = _read(readers, part, entry)
                    found.update(dict.fromkeys(wanted[1:], found[wanted[0]]))
    return found


def _names(table: Table) -> set[str]:
    return {name for entry in table.tensors.values() for name in (entry.spec.name, *entry.aliases)}


def _read(readers: list[DiskReader], part: Part, entry: TensorEntry) -> torch.Tensor:
    tensor = torch.empty(entry.spec.shape, dtype=getattr(torch, entry.spec.dtype))
    for piece in entry.pieces:
        raw = bytearray(piece.size)
        read_piece(readers[piece.pack], part, piece, memoryview(raw), entry.spec.name)
        if piece.size:
            where = tuple(
                slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.lengths, strict=True)
            )
            tensor[where].copy_(torch.frombuffer(raw, dtype=tensor.dtype).view(piece.box.lengths))
    return tensor
