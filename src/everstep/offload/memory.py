"""Tensors in a slot of an arena, as a piece table says: two processes see the same ones."""

import torch

from everstep.format.packs import ALIGNED_FROM_BYTES, Layout, pack_starts, round_up
from everstep.format.tables import Table
from everstep.keeper.arena import Arena, SlotState
from everstep.keeper.data import Image, Segment, parse
from everstep.sharding.leaves import bytes_of


class Memory:
    """A slot's image, by the names of the tensors in it."""

    def __init__(self, arena: Arena, slot: int, table: Table | None = None) -> None:
        """`table`: None: that which is sealed in the first slot. Raises Corrupt."""
        if table is None:
            row = arena.row(0)
            assert row
            table = parse(bytes(arena.table(0, row))).table
        self.arena, self.table = arena, table
        image = arena.image(slot)
        self._starts = pack_starts(pack.size for pack in table.packs)
        rows = zip(self._starts, table.packs, strict=True)
        views = [image[at : at + pack.size] for at, pack in rows]
        self._packs = [torch.frombuffer(view, dtype=torch.uint8) for view in views]
        self._segments = [[Segment(view)] for view in views]

    @classmethod
    def create(cls, layout: Layout, document: bytes, documents_bytes: int) -> "Memory":
        """For a whole state, in an arena of its own, with the packs' headers in their places.
        `document`: the piece table."""
        arena = Arena.create(1, documents_bytes, layout.size)
        arena.set_state(0, SlotState.CAPTURING)
        found = cls(arena, 0, parse(document).table)
        for memory, header in zip(found._packs, layout.headers, strict=True):
            memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return found

    @property
    def size(self) -> int:
        """Bytes of all packs."""
        return sum(pack.size for pack in self.table.packs)

    def image(self, document: bytes) -> Image:
        """All of it, by its table's document."""
        return Image(parse(document), self._segments)

    def bytes(self, name: str) -> torch.Tensor:
        """A tensor's."""
        (piece,) = self.table.tensors[name].pieces
        return self._packs[piece.pack][piece.offset : piece.offset + piece.size]

    def drop(self, name: str) -> None:
        """Let the file alone have a tensor's bytes, where they are pages; blocks."""
        (piece,) = self.table.tensors[name].pieces
        if piece.size >= ALIGNED_FROM_BYTES:
            start = self._starts[piece.pack] + piece.offset
            self.arena.drop(0, start, round_up(piece.size))

    def tensor(self, name: str) -> torch.Tensor:
        """Row-major, as its spec says."""
        spec = self.table.tensors[name].spec
        return self.bytes(name).view(getattr(torch, spec.dtype)).view(spec.shape)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Let it lie here from now on; one that is not row-major is copied."""
        here = self.bytes(name)
        if here.numel() == 0 or tensor.data_ptr() == here.data_ptr():
            return
        here.copy_(bytes_of(tensor))
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            tensor.data = here.view(tensor.dtype).view(tensor.shape)
